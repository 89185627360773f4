"""Tool calls as the model wrote them, judged once.

Owns the mapping from what a parser found to a call that can be executed or a problem that the
model can read. Never executes, never repairs: a text that strict JSON refuses is a problem.
Invariant: every attempt of the model is one `ToolCall`, in order; none is dropped in silence.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ..types import ProblemKind, ToolCall

MAX_LATER_CLOSES = 8
"""So many closing markers inside one block's strings are looked beyond."""
MAX_UNWRAPS = 3
"""Arguments may be JSON in a string, in a string, …, this many times."""

_FORM = 'write {"name": <function name>, "arguments": {<name>: <value>, …}}'


def judge_call(raw: str, *, closed: bool) -> ToolCall:
    """Return the call that a block of JSON spells.

    Args:
        raw: the text between the markers.
        closed: whether the closing marker came.
    """
    call = ToolCall(id=new_call_id(), name="", arguments={}, raw=raw)
    if not closed:
        return _problem(call, ProblemKind.UNCLOSED, f"the tool call was not closed; {_FORM}")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return _problem(call, ProblemKind.INVALID_JSON, f"not valid JSON ({error}); {_FORM}")
    if not isinstance(parsed, dict):
        return _problem(call, ProblemKind.INVALID_JSON, f"not a JSON object; {_FORM}")
    name = parsed.get("name")
    if not isinstance(name, str) or not name:
        return _problem(call, ProblemKind.NO_NAME, f"the tool call has no name; {_FORM}")
    call.name = name
    arguments = unwrap_arguments(parsed.get("arguments", {}))
    if not isinstance(arguments, dict):
        kind = "null" if arguments is None else type(arguments).__name__
        return _problem(
            call, ProblemKind.BAD_ARGUMENTS, f"arguments must be a JSON object, not {kind}; {_FORM}"
        )
    call.arguments = arguments
    return call


def closes_behind(ids: list[int], start: int, marker: int) -> list[int]:
    """Return the first places of `marker` in `ids` from `start` on, at most `MAX_LATER_CLOSES`."""
    places: list[int] = []
    while len(places) < MAX_LATER_CLOSES:
        try:
            places.append(ids.index(marker, places[-1] + 1 if places else start))
        except ValueError:
            break
    return places


def unwrap_arguments(arguments: Any) -> Any:
    """Return `arguments` freed of at most `MAX_UNWRAPS` layers of JSON in a string.

    The empty string is an empty object; a string that is no JSON comes back as it is.
    """
    for _ in range(MAX_UNWRAPS):
        if not isinstance(arguments, str):
            break
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            break
    return arguments


def new_call_id() -> str:
    """Return an id that repeats in no turn: formats such as Qwen3's carry none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _problem(call: ToolCall, kind: ProblemKind, text: str) -> ToolCall:
    call.problem, call.problem_text = kind, text
    return call
