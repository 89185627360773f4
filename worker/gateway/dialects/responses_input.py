"""What a client of OpenAI's Responses API sends as `input`, as messages.

Owns the translation of items, on the way in, and the ids of items, which say of which reply an item
is a part. Never renders, never compares, does no I/O. Invariant: the items of one reply of ours are
one assistant message again, whole or without the reasoning, also where a client put results between
its calls.

    sent                                    becomes
    a text                                  a user message
    message (user, system, developer)       that message, parts of text joined without a separator
    reasoning, message of the assistant,    one assistant message for all that stand together:
      function_call                         reasoning_content, content, tool_calls
    function_call_output                    a tool message
    anything else                           400, with the index of the item
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from rollstream.sample import Message

from ..types import ErrorKind, Refusal

ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})(?:_\d{1,6})?")
"""Ids of our items: what it is, the reply's id, its place among others of its kind."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
}  # fmt: skip


def read_input(given: Any) -> list[Message]:
    """Return the messages of a request's `input`.

    Raises:
        Refusal: an item that has no text form, or an end behind which nothing can be answered;
            says its index.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        _refuse("input", "a text, or a list of at least one item")
    reader = _Reader()
    for place, item in enumerate(given):
        reader.add(item, f"input[{place}]")
    if reader.messages and reader.messages[-1]["role"] == "assistant":
        _refuse(
            f"input[{len(given) - 1}]",
            "the conversation ends with the assistant's own words: send a message or a result "
            "behind them",
        )
    if not reader.messages:
        _refuse("input", "nothing in it that a model can read")
    return reader.messages


class _Reader:
    """Gathers items to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The newest assistant message, as long as nobody but its tools spoke behind it."""
        self._reply_id = ""
        """Which reply of ours it is, as far as its items say so."""
        self._is_answered = False
        """Results stand behind it."""

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, Mapping):
            _refuse(where, f"is {item!r:.40}; an item is an object with a type")
        kind = item.get("type")
        if kind in (None, "message") and "role" in item:
            self._message(item, where)
        elif kind == "reasoning":
            if thought := _reasoning(item, where):
                turn = self._turn_of(item)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        elif kind == "function_call":
            call = _call(item, where)
            turn = self._turn_of(item)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        elif kind == "function_call_output":
            self.messages.append(_result(item, where))
            self._is_answered = True
        else:
            _refuse(
                f"{where}.type",
                f"is {kind!r:.60}: messages, reasoning, function_call and function_call_output are "
                "what can be shown to the model; send the item itself where this refers to one",
            )

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            _refuse(f"{where}.role", f"is {role!r:.40}: one of {', '.join(_ROLES)}")
        words = _words(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn_of(item)["content"] += words
            return
        self.messages.append({"role": role, "content": words})
        self._turn = None

    def _turn_of(self, item: Mapping[str, Any]) -> Message:
        """Return the assistant message that an item is a part of."""
        given = item.get("id")
        found = ITEM_ID.fullmatch(given) if isinstance(given, str) else None
        reply_id = found[1] if found else ""
        same = bool(reply_id) and reply_id == self._reply_id
        other = bool(reply_id) and bool(self._reply_id) and not same
        if self._turn is None or other or (self._is_answered and not same):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
            self._reply_id, self._is_answered = "", False
        self._reply_id = self._reply_id or reply_id
        return self._turn


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str):
        _refuse(f"{where}.arguments", "expected JSON as text")
    function = {"name": _string(item, "name", where), "arguments": arguments}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _result(item: Mapping[str, Any], where: str) -> Message:
    output = item.get("output")
    return {
        "role": "tool",
        "tool_call_id": _string(item, "call_id", where),
        "content": "" if output is None else _words(output, f"{where}.output"),
    }


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: all of it, where it says it, or else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not parts:
            continue
        if not isinstance(parts, list):
            _refuse(f"{where}.{name}", "a list of parts")
        return "".join(
            _string(part, "text", path) for path, part in _parts(parts, f"{where}.{name}")
        )
    return ""


def _words(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, f"is {content!r:.40}: a text, or a list of parts")
    words = []
    for path, part in _parts(content, where):
        kind = part.get("type")
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            _refuse(f"{path}.type", f"is {kind!r:.60}: the model reads text only (input_text)")
        words.append(_string(part, name, path))
    return "".join(words)


def _parts(parts: list[Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place, part in enumerate(parts):
        path = f"{where}[{place}]"
        if not isinstance(part, Mapping):
            _refuse(path, "an object with a type")
        yield path, part


def _string(of: Mapping[str, Any], name: str, where: str) -> str:
    found = of.get(name)
    if not isinstance(found, str):
        _refuse(f"{where}.{name}", f"is {found!r:.40}: expected text")
    return found


def _refuse(path: str, what: str) -> NoReturn:
    raise Refusal(ErrorKind.INVALID, f"{path}: {what}", param=path)
