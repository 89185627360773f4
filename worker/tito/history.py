"""A conversation that comes back: is it the one we know, and which result answers which call.

Owns the comparison of an echoed message with the stored one, and the order of tool results. Never
renders, never changes a message, does no I/O. Invariant: two messages are the same exactly where
every template must render them alike, so that the ids that were sampled may stand for the echo;
whatever else differs (a key order, a space in the arguments, null for absent) is spelling.

Used by `messages` (the order of results, at every rendering) and by a gateway to agents, which must
know an echoed turn before it reuses its ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rollstream.sample import Message

_MAX_SHOWN_CHARS = 40


def difference(stored: Message, echoed: Message) -> str:
    """Return in which part two messages differ, empty where they are the same.

    The same: null, "", [] and an absent key; a text and a list of text parts that join to it;
    `developer` and `system`; arguments as an object or as any JSON text of it (key order and
    spaces are free, `1` is `1.0`, but `true` is not `1` and null is not "null"). What no template
    reads (`index`, `refusal`, `audio`, …) does not count. The ids of calls and of what they
    answer must agree: results are found by them. JSON of thousands of levels, which no template
    takes, is the same as nothing.
    """
    for name, read in _PARTS.items():
        if not _same(read(stored), read(echoed)):
            return name
    calls, others = _calls(stored), _calls(echoed)
    if len(calls) != len(others):
        return f"tool_calls: {len(others)} instead of {len(calls)}"
    for place, (call, other) in enumerate(zip(calls, others, strict=True)):
        for name, read in _CALL_PARTS.items():
            if not _same(read(call), read(other)):
                return f"tool_calls[{place}].{name}"
    return ""


def first_difference(
    stored: Sequence[Message], echoed: Sequence[Message]
) -> tuple[int, str] | None:
    """Return at which message, and in which part, a history leaves the stored one.

    Args:
        stored: the conversation so far.
        echoed: what came back, which may go on behind it.

    Returns:
        None where `echoed` begins with all of `stored`.
    """
    for place, message in enumerate(stored):
        if place >= len(echoed):
            return place, "missing"
        part = difference(message, echoed[place])
        if part:
            return place, part
    return None


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results behind every assistant turn in the order of its calls.

    Raises:
        ValueError: as `result_order`.
    """
    return [messages[place] for place in result_order(messages)]


def result_order(messages: Sequence[Message]) -> list[int]:
    """Return the places of messages, results behind a turn in the order of the turn's calls.

    Templates pair results with calls by position. Ids count within the latest assistant turn
    alone: formats such as Kimi's repeat them in every turn. A result without an id takes the next
    call that no other result names; where neither side has ids, the order stays.

    Args:
        messages: OpenAI's form; what is no message is left for whoever checks messages.

    Raises:
        ValueError: a result names a call that the turn before it did not make; says its index.
    """
    ordered: list[int] = []
    calls: list[str] = []
    at = 0
    while at < len(messages):
        role = _get(messages[at], "role")
        if role != "tool":
            if role == "assistant":
                calls = [_id(call) for call in _calls(messages[at])]
            ordered.append(at)
            at += 1
            continue
        end = at
        while end < len(messages) and _get(messages[end], "role") == "tool":
            end += 1
        ordered.extend(_run_order(calls, messages, at, end))
        at = end
    return ordered


def _run_order(
    call_ids: Sequence[str], messages: Sequence[Message], start: int, end: int
) -> list[int]:
    """Return the places of the results `messages[start:end]` in the order of their calls."""
    if not any(call_ids):
        return list(range(start, end))
    open_places: dict[str, list[int]] = {}
    for place, call_id in enumerate(call_ids):
        open_places.setdefault(call_id, []).append(place)
    answered: dict[int, int] = {}
    for at in range(start, end):
        wanted = _get(messages[at], "tool_call_id")
        if not isinstance(wanted, str) or not wanted:
            continue
        if wanted not in open_places:
            known = ", ".join(repr(one[:_MAX_SHOWN_CHARS]) for one in call_ids)
            raise ValueError(
                f"message {at}: tool_call_id {wanted[:_MAX_SHOWN_CHARS]!r} answers no call of the "
                f"assistant turn before it (its calls: {known})"
            )
        left = open_places[wanted]
        answered[at] = left.pop(0) if len(left) > 1 else left[0]
    taken = set(answered.values())
    free = iter(place for place in range(len(call_ids)) if place not in taken)
    places = {
        at: answered[at] if at in answered else next(free, len(call_ids))
        for at in range(start, end)
    }
    return sorted(range(start, end), key=lambda at: (places[at], at))


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RecursionError:
        return False


def _get(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else None


def _role(message: Message) -> Any:
    role = _get(message, "role")
    return "system" if role == "developer" else role or ""


def _content(message: Message) -> Any:
    content = _get(message, "content")
    if not isinstance(content, list | tuple):
        return content or ""
    texts = [_part(part) for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else texts


def _part(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        return part.get("text") or ""
    return part


def _reasoning(message: Message) -> Any:
    return _get(message, "reasoning_content") or _get(message, "reasoning") or ""


def _calls(message: Message) -> list[Any]:
    calls = _get(message, "tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else []


def _id(call: Any) -> str:
    found = _get(call, "id")
    return found if isinstance(found, str) else ""


def _function(call: Any) -> Any:
    function = _get(call, "function")
    return function if isinstance(function, Mapping) else call


def _arguments(call: Any) -> Any:
    given = _get(_function(call), "arguments")
    if given is None or given == "" or given == []:
        return {}
    try:
        if isinstance(given, str):
            return _comparable(json.loads(given, parse_float=Decimal, parse_int=Decimal))
        return _comparable(given)
    except (ValueError, RecursionError, InvalidOperation):
        return given  # no JSON: the same only as the very same text


def _comparable(value: Any) -> Any:
    """Return a JSON value such that `==` tells exactly what JSON tells apart."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, float) and not math.isfinite(value):
        return ("constant", str(value))  # as a number, NaN would not even be itself
    if isinstance(value, int | float | Decimal):
        return Decimal(str(value))
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value


_PARTS: dict[str, Callable[[Message], Any]] = {
    "role": _role,
    "content": _content,
    "reasoning": _reasoning,
    "name": lambda message: _get(message, "name") or "",
    "tool_call_id": lambda message: _get(message, "tool_call_id") or "",
}
_CALL_PARTS: dict[str, Callable[[Any], Any]] = {
    "id": _id,
    "name": lambda call: _get(_function(call), "name") or "",
    "arguments": _arguments,
}
