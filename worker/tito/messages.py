"""Chat messages and tool specs in the one shape that every template renders.

Owns what people and other systems write in many ways: absent or null content, lists of text parts,
arguments as a JSON string, null call lists, the developer role, control strings. Never touches the
caller's objects. Invariant: a normalized message renders without raising, nothing absent is
rendered as the word None, and what is a control string in it is the template's own markup.

The rules, each the same on every turn:
- several text parts are joined without a separator;
- `developer` is `system`;
- arguments that are a JSON object in a string become the object, any other string stays;
- results stand behind an assistant turn in the order of its calls (`history`);
- every string is escaped; only in the content of an assistant message do the family's own markers
  (reasoning, calls) stay, because that is how a model writes a turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from rollstream.sample import Message

from .history import result_order

ROLES = ("system", "developer", "user", "assistant", "tool")
NOTHING: frozenset[str] = frozenset()
MAX_DEPTH = 64
"""Levels of the arguments of a call and of a tool spec; templates recurse over them."""
_SCHEMA = frozenset(
    "type function name description parameters properties required items enum strict default "
    "additionalProperties anyOf oneOf allOf $ref $defs title format".split()
)


class Escaper(Protocol):
    """What makes control strings harmless: a `Tokenizer`."""

    def escape(self, text: str, keep: frozenset[str] = NOTHING) -> str:
        """Return `text` with every control string cut but those to `keep`."""
        ...

    def escape_name(self, name: str) -> str:
        """Return a name around which no template makes a control string."""
        ...


def normalize_messages(
    messages: Sequence[Message], escaper: Escaper, markup: frozenset[str] = NOTHING
) -> list[dict[str, Any]]:
    """Return new messages with `role`, a string `content`, and what else a template reads.

    Args:
        messages: OpenAI's form.
        escaper: of the vocabulary that the rendering is encoded with.
        markup: control strings that stay what they are in an assistant's content.

    Raises:
        ValueError: a message that has no text form (no mapping, an unknown role, an image part),
            or a tool result that answers no call of the turn before it; the message names its
            index.
    """
    plain = [_normalize(message, place, escaper, markup) for place, message in enumerate(messages)]
    return [plain[place] for place in result_order(messages)]


def normalize_tools(
    tools: Sequence[Message] | None, escaper: Escaper
) -> list[dict[str, Any]] | None:
    """Return new tool specs in OpenAI's form with every string escaped, None for no tools.

    Keys keep their order. The flat form (`{"type": "function", "name": …}`) gets its `function`.

    Raises:
        ValueError: an entry that is no function tool; the message names its index.
    """
    if not tools:
        return None
    return [_tool(tool, place, escaper) for place, tool in enumerate(tools)]


def _tool(tool: Any, place: int, escaper: Escaper) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'tool {place}: expected {{"type": "function", "function": {{"name": …}}}}, '
            f"got {tool!r:.200}"
        )
    if function is tool:
        flat = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function", "function": flat}
    try:
        escaped: dict[str, Any] = _escaped(tool, escaper)
    except ValueError as error:
        raise ValueError(f"tool {place}: {error}") from None
    return escaped


def _normalize(
    message: Message, place: int, escaper: Escaper, markup: frozenset[str]
) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ValueError(
            f"message {place}: role {role!r} is none of {', '.join(ROLES)}; "
            'a message is {"role": …, "content": …}'
        )
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
    text = _text(message.get("content"), place)
    plain["content"] = escaper.escape(text, markup if role == "assistant" else NOTHING)
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = escaper.escape_name(message[name])
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(reasoning, str):
            plain["reasoning_content"] = escaper.escape(reasoning)
        calls = [_call(call, place, escaper) for call in message.get("tool_calls") or ()]
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


def _call(call: Any, place: int, escaper: Escaper) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"message {place}: a tool call is {call!r}, expected a mapping")
    name = function.get("name")
    try:
        arguments = _escaped(_arguments(function.get("arguments")), escaper)
    except ValueError as error:
        raise ValueError(f"message {place}: the arguments of a tool call: {error}") from None
    plain: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": escaper.escape_name(name) if isinstance(name, str) else "",
            "arguments": arguments,
        },
    }
    if isinstance(call.get("id"), str):
        plain["id"] = escaper.escape_name(call["id"])
    return plain


def _escaped(value: Any, escaper: Escaper, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"JSON of more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return escaper.escape(value)
    if isinstance(value, dict):
        return {
            # `required` lists keys, and templates look one up in the other.
            _key(k, escaper): [_key(name, escaper) for name in v]
            if k == "required" and isinstance(v, list) and all(isinstance(n, str) for n in v)
            else _escaped(v, escaper, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_escaped(item, escaper, depth + 1) for item in value]
    return value


def _key(key: Any, escaper: Escaper) -> Any:
    # What a template looks up must stay what it is.
    return key if key in _SCHEMA or not isinstance(key, str) else escaper.escape_name(key)


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
