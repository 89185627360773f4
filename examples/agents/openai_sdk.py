"""An agent on the `openai` SDK: a loop with a tool, and nothing of Rollstream in it.

In the configuration: `worker.generate = "agent"`,
`worker.agent = "examples.agents.openai_sdk:run"`.
It gives no reward, so the environment's own scores it.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.agents.tools import CALCULATOR, as_messages, compute

MAX_TURNS = 8


async def run(
    base_url: str,
    prompt: str | list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    **kw: Any,
) -> dict[str, Any]:
    """Answer one prompt; returns what is to stand in the sample's metadata."""
    messages: list[Any] = as_messages(prompt)
    async with AsyncOpenAI(base_url=base_url, api_key=kw["api_key"]) as client:
        for turn in range(1, MAX_TURNS + 1):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[CALCULATOR], **request_kwargs
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return {"turns": turn, "answer": message.content}
            # The SDK's own way to say a reply again: reasoning comes back with it.
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = compute(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"turns": MAX_TURNS, "answer": None}
