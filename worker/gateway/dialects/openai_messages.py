"""The messages of a chat completions request, checked and in the form that the rest knows.

Owns which shapes a message may have. Never renders, never looks at what a text says. Invariant:
what comes out has `role` and `content` (text, or a list of text parts as it was sent), and of the
rest only what a template or a matcher reads; calls are as they were sent, for matchers to compare.

Every refusal names the index of the message, the field, and what to do.
"""

from __future__ import annotations

from typing import Any

from rollstream.sample import Message

from ..types import ErrorKind, Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 60


def read_messages(given: Any) -> list[Message]:
    """Return the messages of a request.

    Raises:
        Refusal: something that has no text form; says where, and what to do.
    """
    if not isinstance(given, list) or not given:
        raise Refusal(
            ErrorKind.INVALID,
            'messages: a list of at least one message ({"role": "user", "content": …})',
            param="messages",
        )
    return [_message(message, f"messages[{place}]") for place, message in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise _bad(where, f'is {given!r:.{_SHOWN}}; a message is {{"role": …, "content": …}}')
    role = given.get("role")
    if role == "function":
        raise _bad(
            f"{where}.role",
            'is "function", which is no more: declare tools, and send results as '
            '{"role": "tool", "tool_call_id": …, "content": …}',
        )
    if not isinstance(role, str) or role not in ROLES:
        raise _bad(f"{where}.role", f"is {role!r:.{_SHOWN}}: one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(given.get("content"), role, where)}
    for name in ("name", "tool_call_id") if role == "tool" else ("name",):
        _keep_text(given, name, message, where)
    if role == "assistant":
        _assistant(given, message, where)
    return message


def _assistant(given: dict[str, Any], message: Message, where: str) -> None:
    """Add what only the model's own messages have."""
    if given.get("function_call") is not None:
        raise _bad(f"{where}.function_call", "is no more: calls are tool_calls")
    if given.get("audio") is not None:
        raise _bad(f"{where}.audio", "cannot be shown to a model that reads text: send its text")
    refusal = given.get("refusal")
    if refusal and not message["content"]:
        if not isinstance(refusal, str):
            raise _bad(f"{where}.refusal", f"is {refusal!r:.{_SHOWN}}: expected text")
        message["content"] = refusal
    _keep_text(given, "reasoning_content", message, where)
    if "reasoning_content" not in message:
        _keep_text(given, "reasoning", message, where)
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
    calls = given.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise _bad(f"{where}.tool_calls", f"is {calls!r:.{_SHOWN}}: a list of calls")
    for place, call in enumerate(calls):
        _check_call(call, f"{where}.tool_calls[{place}]")
    message["tool_calls"] = calls


def _check_call(call: Any, where: str) -> None:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        kind = call.get("type", "?") if isinstance(call, dict) else type(call).__name__
        raise _bad(
            where,
            f"is of type {kind!r:.{_SHOWN}}; a call is "
            '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}',
        )
    if call.get("type", "function") != "function":
        raise _bad(f"{where}.type", f'is {call["type"]!r:.{_SHOWN}}: only "function" calls exist')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _bad(f"{where}.function.name", f"is {function.get('name')!r:.{_SHOWN}}: a name")
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise _bad(f"{where}.id", f"is {call['id']!r:.{_SHOWN}}: expected text")


def _content(content: Any, role: str, where: str) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise _bad(f"{where}.content", 'is missing: text, or a list of text parts ("" is a text)')
    if not isinstance(content, list):
        raise _bad(f"{where}.content", f"is {content!r:.{_SHOWN}}: text, or a list of text parts")
    return [_part(part, role, f"{where}.content[{place}]") for place, part in enumerate(content)]


def _part(part: Any, role: str, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    name = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind == name and isinstance(part.get(name), str):
        return {"type": "text", "text": part[name]}
    if kind == name:
        raise _bad(f"{where}.{name}", f"is {part.get(name)!r:.{_SHOWN}}: expected text")
    shown = kind if isinstance(part, dict) else type(part).__name__
    raise _bad(
        where,
        f"is of type {shown!r:.{_SHOWN}}: only text parts are read "
        '({"type": "text", "text": …}); images, audio and files are not',
    )


def _keep_text(given: dict[str, Any], name: str, message: Message, where: str) -> None:
    value = given.get(name)
    if value is None:
        return
    if not isinstance(value, str):
        raise _bad(f"{where}.{name}", f"is {value!r:.{_SHOWN}}: expected text")
    message[name] = value


def _bad(where: str, what: str) -> Refusal:
    return Refusal(ErrorKind.INVALID, f"{where} {what}", param=where)
