"""An agent on the OpenAI Agents SDK, which has its own loop, tools and bookkeeping.

In the configuration: `worker.generate = "agent"`,
`worker.agent = "examples.agents.openai_agents:run"`. With `metadata = {"api": "responses"}` in a
row it speaks the Responses API, else chat completions.
"""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from examples.agents.tools import compute, task_of

MAX_TURNS = 8
set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression."""
    return compute({"expression": expression})


async def run(
    base_url: str,
    prompt: str | list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    **kw: Any,
) -> dict[str, Any]:
    """Answer one prompt; returns what is to stand in the sample's metadata."""
    async with AsyncOpenAI(base_url=base_url, api_key=kw["api_key"]) as client:
        kind = (
            OpenAIResponsesModel
            if metadata.get("api") == "responses"
            else (OpenAIChatCompletionsModel)
        )
        agent = Agent(
            name="solver",
            instructions="Solve the problem. Use the calculator for arithmetic.",
            model=kind(model="policy", openai_client=client),
            model_settings=ModelSettings(max_tokens=request_kwargs["max_tokens"]),
            tools=[calculator],
        )
        result = await Runner.run(agent, task_of(prompt), max_turns=MAX_TURNS)
    return {"turns": len(result.raw_responses), "answer": str(result.final_output)}
