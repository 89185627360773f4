"""Chat messages in the one shape that every template renders.

Owns what people and other systems write in many ways: absent or null content, lists of text parts,
arguments as a JSON string, null call lists, the developer role. Never touches the caller's
messages. Invariant: a normalized message renders without raising, and nothing absent is rendered
as the word None.

The rules, each the same on every turn: several text parts are joined without a separator;
`developer` is `system`; arguments that are a JSON object in a string become the object, any other
string stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rollstream.sample import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize_messages(
    messages: Sequence[Message], escape: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return new messages with `role`, a string `content`, and what else a template reads.

    Args:
        messages: OpenAI's form.
        escape: makes control strings harmless; applied to what a user or a tool wrote.

    Raises:
        ValueError: a message that has no text form (no mapping, an unknown role, an image part);
            the message names its index.
    """
    return [_normalize(message, place, escape) for place, message in enumerate(messages)]


def _normalize(message: Message, place: int, escape: Callable[[str], str]) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ValueError(
            f"message {place}: role {role!r} is none of {', '.join(ROLES)}; "
            'a message is {"role": …, "content": …}'
        )
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
    text = _text(message.get("content"), place)
    plain["content"] = escape(text) if role in ("user", "tool") else text
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(reasoning, str):
            plain["reasoning_content"] = reasoning
        calls = [_call(call, place) for call in message.get("tool_calls") or ()]
        if calls:
            plain["tool_calls"] = calls
    return plain


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(_part_text(part, place) for part in content)
    raise ValueError(
        f"message {place}: content is a {type(content).__name__}; "
        "expected text, a list of text parts, or nothing"
    )


def _part_text(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text")
        if text is None or isinstance(text, str):
            return text or ""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"message {place}: a content part of type {kind!r} is not text")


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"message {place}: a tool call is {call!r}, expected a mapping")
    name = function.get("name")
    plain: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": name if isinstance(name, str) else "",
            "arguments": _arguments(function.get("arguments")),
        },
    }
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def _arguments(arguments: Any) -> Any:
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
