"""Tool calls in a stream: ours cut into OpenAI's deltas, others' deltas gathered to calls.

Owns how a call is cut, and its arguments as text. Never parses ids, never executes, does no I/O.
Invariant: the pieces of a call's arguments, concatenated, are byte for byte what the reply without
streaming says; and a stream gives the same calls however it was cut into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..types import ToolCall
from .calls import new_call_id

PIECE_CHARS = 256
"""Arguments are sent in pieces of this many characters."""
MAX_CALLS = 1024
"""More calls in one upstream message are no message."""

Delta: TypeAlias = dict[str, Any]
"""The `delta` of one choice: `{"tool_calls": [one entry]}`."""


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as a client gets them: JSON, encoded once, no spaces."""
    return json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))


def call_deltas(
    call: Mapping[str, Any], index: int, *, piece_chars: int = PIECE_CHARS
) -> Iterator[Delta]:
    """Yield one call as deltas: id, type and name in the first, the same index in all.

    Args:
        call: an entry of a message's `tool_calls`, its arguments text.
        index: its place among the calls of the message.
        piece_chars: at most this many characters of the arguments in each.
    """
    function = call["function"]
    head = {"id": call["id"], "type": "function"}
    head["function"] = {"name": function["name"], "arguments": ""}
    yield {"tool_calls": [{"index": index, **head}]}
    text = function["arguments"]
    for at in range(0, len(text), piece_chars):
        piece = {"arguments": text[at : at + piece_chars]}
        yield {"tool_calls": [{"index": index, "function": piece}]}


@dataclass(slots=True)
class GatheredCall:
    """One call of an upstream's stream; its arguments are text that nobody has judged."""

    id: str
    name: str
    arguments: str


class _Growing:
    __slots__ = ("has_own_id", "id", "name", "pieces")

    def __init__(self, given_id: str | None) -> None:
        self.id, self.has_own_id = given_id or new_call_id(), given_id is not None
        self.name = ""
        self.pieces: list[str] = []


class CallGatherer:
    """Gathers the tool-call deltas of one message of an upstream.

    An entry belongs to the last call of its index, in the same chunk or an earlier one; a new id
    under a known index, or another name, opens a new call. A call whose first entry has no id gets
    one that stays.
    """

    def __init__(self) -> None:
        self._calls: list[_Growing] = []
        self._last_of: dict[Any, _Growing] = {}
        """By index; by id where an entry has no index."""

    def add(self, entries: Iterable[Mapping[str, Any]] | None) -> None:
        """Take the `tool_calls` of one delta (absent and null are none).

        Raises:
            ValueError: an entry that is no mapping, or too many calls.
        """
        for entry in entries or ():
            if not isinstance(entry, Mapping):
                raise ValueError(f"a tool call delta is {type(entry).__name__}, expected a mapping")
            function = entry.get("function")
            function = function if isinstance(function, Mapping) else {}
            name, piece = _text(function.get("name")), _text(function.get("arguments"))
            call = self._call_of(entry.get("index"), _text(entry.get("id")) or None, name)
            call.name = call.name or name
            if piece:
                call.pieces.append(piece)

    def calls(self) -> list[GatheredCall]:
        """Return the calls so far, in the order in which they were opened."""
        return [GatheredCall(call.id, call.name, "".join(call.pieces)) for call in self._calls]

    def _call_of(self, index: Any, given_id: str | None, name: str) -> _Growing:
        if isinstance(index, int):
            call = self._last_of.get(index)
            if call is not None and not self._opens(call, given_id, name):
                return call
            return self._open(index, given_id)
        if given_id is not None:
            return self._last_of.get(given_id) or self._open(given_id, given_id)
        if name or not self._calls:
            return self._open(None, None)
        return self._calls[-1]

    @staticmethod
    def _opens(call: _Growing, given_id: str | None, name: str) -> bool:
        """Return whether an entry under the index of `call` begins another one."""
        if given_id == call.id:
            return False
        if given_id is not None and call.has_own_id:
            return True
        return bool(name and call.name and (given_id is not None or name != call.name))

    def _open(self, key: Any, given_id: str | None) -> _Growing:
        if len(self._calls) >= MAX_CALLS:
            raise ValueError(f"more than {MAX_CALLS} tool calls in one message")
        call = _Growing(given_id)
        self._calls.append(call)
        if key is not None:
            self._last_of[key] = call
        return call


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
