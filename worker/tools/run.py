"""Running the calls of one turn: whatever the model or a tool does is a text for the model.

Owns the order of results, the time of each, and the reasons of what went wrong. Unknown names,
wrong arguments, exceptions, hangs and odd results are observations, counted. Raises only what the
policy did not bring about: a fault of `rollstream.errors`, or the end of the process's memory.
Invariant: as many observations as calls, in the order of the calls, whichever ends first; behind
the return nothing holds a slot. docs/tools.md has the table of all endings.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.errors import RolloutFault

from ..bounded import LeakedCancel, Overdue, run_bounded
from ..functions import describe
from ..types import CutSide, ProblemKind, Renderer, Tool, ToolCall
from .arguments import check_of
from .bound import BoundTool, Within, within_of
from .caps import Cap
from .outcome import ToolError, ToolTrouble
from .rules import NO_RULES
from .text import clean, is_small, text_of

MAX_ERROR_CHARS = 512
"""Of an error in our words; one in a tool's own words is as long as a result may be."""
LONG_ARGUMENTS_CHARS = 8192
"""Longer arguments are checked in a thread."""
SHOWING_S = 1.0
"""A result that came in time has at least so long to become text."""
_MAX_NAME_CHARS = 64


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
    max_tokens: int | None = None,
    renderer: Renderer | None = None,
    side: CutSide = "middle",
) -> list[Observation]:
    """Run all calls of one turn side by side and return their observations in order.

    Args:
        calls: as parsed from the ids of the turn.
        tools: the registered ones, by name; what one has in its own settings goes before the rest.
        timeout_s: of each call; an overdue one is cancelled and its late result discarded.
        max_chars: cap of each observation, in characters.
        max_tokens: the same in tokens; needs `renderer`.
        renderer: of the model.
        side: what of a longer one is cut away.

    Raises:
        RolloutFault: what runs the tool broke; the other calls were told to stop.
        MemoryError: the process is out of it.
        asyncio.CancelledError: the caller was cancelled; every tool was told to stop.
    """
    run_one = functools.partial(
        run_call, tools=tools, timeout_s=timeout_s, cap=Cap(max_chars, max_tokens, side, renderer)
    )
    if len(calls) == 1:
        return [await run_one(calls[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(call)) for call in calls]
    except BaseExceptionGroup as broken:
        raise _first_of(broken) from None
    return [task.result() for task in tasks]


async def run_call(
    call: ToolCall, tools: Mapping[str, Tool], *, timeout_s: float, cap: Cap
) -> Observation:
    """Run one call and return what the model reads of it.

    Raises:
        RolloutFault: what runs the tool broke.
        MemoryError: the process is out of it.
    """
    tool = tools.get(call.name)
    rules = tool.rules if isinstance(tool, BoundTool) else NO_RULES
    if rules is not NO_RULES:
        chars = rules.output_chars or cap.chars
        cap = Cap(chars, rules.output_tokens or cap.tokens, cap.side, cap.renderer)
    try:
        text = await _result(call, tool, tools, rules.timeout_s or timeout_s)
    except _Refused as refused:
        short = Cap(min(MAX_ERROR_CHARS, cap.chars), cap.tokens, renderer=cap.renderer)
        return Observation(call, await short.of(f"Error: {refused.text}"), refused.error)
    except ToolTrouble as trouble:
        return Observation(call, await cap.of(f"Error: {trouble.text}"), trouble.error)
    return Observation(call, await cap.of(text))


class _Refused(Exception):
    """There is no result, in our words."""

    def __init__(self, text: str, error: ToolError) -> None:
        super().__init__(text)
        self.text, self.error = text, error


async def _result(
    call: ToolCall, tool: Tool | None, tools: Mapping[str, Tool], timeout_s: float
) -> str:
    """Return the text of a call's result.

    Raises:
        _Refused: there is none.
        ToolTrouble: there is none, in the tool's own words.
    """
    if call.problem is ProblemKind.TOO_MANY:
        raise _Refused(call.problem_text, ToolError.TOO_MANY)
    if call.problem is not None:
        said = call.problem_text or f"malformed tool call ({call.problem})"
        raise _Refused(said, ToolError.MALFORMED)
    if tool is None:
        known = ", ".join(tools) or "none"
        name = call.name[:_MAX_NAME_CHARS]
        raise _Refused(f"unknown tool {name!r}; available tools: {known}", ToolError.UNKNOWN_TOOL)
    due_mono_s = time.monotonic() + timeout_s
    await _check_arguments(call, tool, timeout_s)
    try:
        result = await _in_slot(tool, call.arguments, timeout_s, due_mono_s)
    except Overdue:
        raise _Refused(
            f"{tool.name} did not answer within {timeout_s:g} s", ToolError.TIMEOUT
        ) from None
    except LeakedCancel:
        raise _Refused(f"{tool.name} was cancelled", ToolError.CANCELLED) from None
    except (_Refused, ToolTrouble, RolloutFault, MemoryError):
        raise
    except Exception as error:  # a tool may raise anything; the model is told
        raise _Refused(describe(error), ToolError.RAISED) from error
    return await _text_of(tool, result, max(due_mono_s - time.monotonic(), SHOWING_S))


async def _check_arguments(call: ToolCall, tool: Tool, timeout_s: float) -> None:
    if isinstance(tool, BoundTool):
        check = tool.check
    else:
        check = check_of(tool.spec["function"].get("parameters") or {})
    if len(call.raw) <= LONG_ARGUMENTS_CHARS:
        wrong = check.complaint(call.arguments)
    else:
        try:
            wrong = await run_bounded(check.complaint, call.arguments, timeout_s=timeout_s)
        except Overdue:
            wrong = f"they could not be checked within {timeout_s:g} s"
    if wrong is not None:
        raise _Refused(f"wrong arguments for {tool.name}: {wrong}", ToolError.BAD_ARGUMENTS)


async def _in_slot(
    tool: Tool, arguments: dict[str, Any], timeout_s: float, due_mono_s: float
) -> Any:
    """Run the tool once there is room for its call."""
    if not isinstance(tool, BoundTool):
        return await _run(tool, within_of(tool), arguments, due_mono_s - time.monotonic())
    slots = tool.slots
    try:
        await slots.take(due_mono_s - time.monotonic())
    except TimeoutError:
        raise _Refused(
            f"{tool.name} did not answer within {timeout_s:g} s: as many of its calls as may run "
            f"at once ({slots.limit}) ran before this one",
            ToolError.TIMEOUT,
        ) from None
    try:
        return await _run(tool.tool, tool.within, arguments, due_mono_s - time.monotonic())
    finally:
        slots.give()


async def _run(tool: Tool, within: Within | None, arguments: dict[str, Any], left_s: float) -> Any:
    if within is not None:
        return await run_bounded(within, arguments, left_s, timeout_s=math.inf)
    return await run_bounded(tool.__call__, arguments, timeout_s=left_s)


async def _text_of(tool: Tool, result: Any, left_s: float) -> str:
    """Return the text of a result; what may take long, or calls a user's code, in a thread."""
    try:
        if isinstance(result, str) and type(result) is str:
            return result  # whoever cuts it cleans what is left
        if is_small(result):
            return text_of(result)
        text: str = await run_bounded(text_of, result, timeout_s=left_s)
    except MemoryError:
        raise
    except Overdue:
        why = "it does not become text in time"
    except Exception as error:  # noqa: BLE001 - a result's own methods may raise anything
        why = describe(error)
    else:
        return text
    raise _Refused(f"the result of {tool.name} cannot be shown: {why}", ToolError.BAD_RESULT)


def _first_of(error: BaseException) -> BaseException:
    """Return the first error itself: who handles faults knows no groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
