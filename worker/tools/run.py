"""Running the calls of one turn: every ending of a call is a text for the model.

Owns the order of results, the timeout of each, and the reasons of what went wrong. Never raises for
a call: unknown names, wrong arguments, exceptions, hangs and odd results are observations, counted.
Invariant: as many observations as calls, in the order of the calls, whichever ends first.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..bounded import LeakedCancel, Overdue, run_bounded
from ..functions import describe
from ..types import CutSide, ProblemKind, Tool, ToolCall
from .schema import complaint
from .text import clean, cut, text_of

MAX_ERROR_CHARS = 512
_MAX_NAME_CHARS = 64


class ToolError(StrEnum):
    """Why a call has no result; the metric label, and the keys of `metadata["tool_errors"]`."""

    MALFORMED = "malformed"
    TOO_MANY = "too_many"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BAD_RESULT = "bad_result"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model reads as the answer to one call."""

    call: ToolCall
    text: str
    error: ToolError | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The same as a chat message."""
        return {
            "role": "tool",
            "tool_call_id": self.call.id,
            "name": clean(self.call.name[:_MAX_NAME_CHARS]),
            "content": self.text,
        }


async def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    *,
    timeout_s: float,
    max_chars: int,
    side: CutSide = "middle",
) -> list[Observation]:
    """Run all calls of one turn side by side and return their observations in order.

    Args:
        calls: as parsed from the ids of the turn.
        tools: the registered ones, by name.
        timeout_s: of each call; an overdue one is cancelled and its late result discarded.
        max_chars: cap of each observation, in characters.
        side: what of a longer one is cut away.

    Raises:
        asyncio.CancelledError: the caller was cancelled; every tool was told to stop.
    """
    run_one = functools.partial(
        run_call, tools=tools, timeout_s=timeout_s, max_chars=max_chars, side=side
    )
    if len(calls) == 1:
        return [await run_one(calls[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(call)) for call in calls]
    return [task.result() for task in tasks]


async def run_call(
    call: ToolCall,
    tools: Mapping[str, Tool],
    *,
    timeout_s: float,
    max_chars: int,
    side: CutSide = "middle",
) -> Observation:
    """Run one call and return what the model reads of it."""
    text, error = await _outcome(call, tools, timeout_s)
    if error is not None:
        text = cut(clean(f"Error: {text}"), min(MAX_ERROR_CHARS, max_chars))
        return Observation(call, text, error)
    return Observation(call, cut(text, max_chars, side))


async def _outcome(
    call: ToolCall, tools: Mapping[str, Tool], timeout_s: float
) -> tuple[str, ToolError | None]:
    if call.problem is ProblemKind.TOO_MANY:
        return call.problem_text, ToolError.TOO_MANY
    if call.problem is not None:
        return call.problem_text or f"malformed tool call ({call.problem})", ToolError.MALFORMED
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools) or "none"
        return f"unknown tool {call.name[:_MAX_NAME_CHARS]!r}; available tools: {known}", (
            ToolError.UNKNOWN_TOOL
        )
    wrong = complaint(tool.spec["function"].get("parameters") or {}, call.arguments)
    if wrong is not None:
        return f"wrong arguments for {tool.name}: {wrong}", ToolError.BAD_ARGUMENTS
    try:
        result = await run_bounded(tool.__call__, call.arguments, timeout_s=timeout_s)
    except Overdue:
        return f"{tool.name} did not answer within {timeout_s:g} s", ToolError.TIMEOUT
    except LeakedCancel:
        return f"{tool.name} was cancelled", ToolError.CANCELLED
    except Exception as error:  # noqa: BLE001 - a tool may raise anything; the model is told
        return describe(error), ToolError.RAISED
    try:
        return text_of(result), None
    except Exception as error:  # noqa: BLE001 - a result's own methods may raise anything
        return f"the result of {tool.name} cannot be shown: {describe(error)}", ToolError.BAD_RESULT
