"""An agent that speaks through litellm, as a process of its own: its import is slow and noisy.

    python -m tests.integration.gateway.litellm_agent BASE_URL SCENE

Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices
warnings.simplefilter("ignore")

import litellm  # noqa: E402

HI = [{"role": "user", "content": "hi"}]
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


async def ask(url: str, messages: list[Any], **fields: Any) -> Any:
    """Return what litellm makes of one request; a stream is put together by litellm itself."""
    reply = await litellm.acompletion(
        model="openai/m", api_base=f"{url}/v1", api_key="none", messages=messages,
        num_retries=0, max_retries=0, **fields,
    )  # fmt: skip
    if not fields.get("stream"):
        return reply
    return litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)


async def talk(url: str, *, stream: bool) -> dict[str, Any]:
    """Run what the model calls and send the results, until it answers."""
    messages: list[Any] = list(HI)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    usages = []
    while True:
        reply = await ask(url, messages, tools=[CALC], temperature=0.2, **options)
        usages.append(reply.usage.completion_tokens)
        message = reply.choices[0].message
        messages.append(message.model_dump())  # every field of litellm's own, null or not
        if not message.tool_calls:
            return {"content": message.content, "usages": usages, "messages": len(messages)}
        for call in message.tool_calls:
            x = json.loads(call.function.arguments)["x"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(x + 1)})


async def fail(url: str) -> dict[str, Any]:
    """Return which errors litellm raises."""
    names = []
    asked: list[dict[str, Any]] = [
        {"messages": HI},
        {"messages": HI, "n": 2},
        {"messages": [{"role": "user", "content": "hello " * 200}]},
    ]
    for fields in asked:
        try:
            await ask(url, **fields)
        except Exception as error:  # noqa: BLE001 - which one is what is asked
            names.append(type(error).__name__)
    return {"errors": names}


async def main() -> None:
    """Play one scene."""
    url, scene = sys.argv[1:]
    if scene == "fail":
        found = await fail(url)
    else:
        found = await talk(url, stream=scene == "stream")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
