"""An agent on the `anthropic` SDK, which streams: a loop with a tool.

In the configuration: `worker.generate = "agent"`,
`worker.agent = "examples.agents.anthropic_sdk:run"`.
"""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

from examples.agents.tools import CALCULATOR, as_messages, compute

MAX_TURNS = 8
TOOL: Any = {
    "name": CALCULATOR["function"]["name"],
    "description": CALCULATOR["function"]["description"],
    "input_schema": CALCULATOR["function"]["parameters"],
}


async def run(
    base_url: str,
    prompt: str | list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    **kw: Any,
) -> dict[str, Any]:
    """Answer one prompt; returns what is to stand in the sample's metadata."""
    messages: list[Any] = as_messages(prompt)
    async with AsyncAnthropic(base_url=base_url, api_key=kw["api_key"]) as client:
        for turn in range(1, MAX_TURNS + 1):
            async with client.messages.stream(
                model="policy",
                messages=messages,
                tools=[TOOL],
                max_tokens=request_kwargs["max_tokens"],
            ) as stream:
                reply = await stream.get_final_message()
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return {"turns": turn, "stop": reply.stop_reason}
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": compute(call.input)}
                for call in calls
            ]
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": results})
    return {"turns": MAX_TURNS, "stop": "turns"}
