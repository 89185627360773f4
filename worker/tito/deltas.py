"""Tool calls in a stream: ours cut into OpenAI's deltas, an upstream's deltas gathered to calls.

Owns what a chunk of a stream says about calls. Never parses ids, never executes, does no I/O.
Invariant: the pieces of a call's arguments, concatenated, are byte for byte what the reply without
streaming says; and a stream gives the same calls however it was cut into chunks. So nothing of a
call is sent before the whole of it was judged (`calls.judge_call`): what was sent cannot be taken
back, and a call that turns out malformed is text.

For the gateway to agents, which answers chat completions out of finished replies (`message_deltas`)
and reads an upstream's (`CallGatherer`); `CallText` is for text that grows, where there are no ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..types import AssistantMessage, ProblemKind, ToolCall
from .calls import MAX_LATER_CLOSES, judge_call, new_call_id

PIECE_CHARS = 64
"""Arguments are sent in pieces of this many characters."""
MAX_CALLS = 1024
"""More calls in one upstream message are no message."""

Delta: TypeAlias = dict[str, Any]
"""The `delta` of one choice: `{"content": …}` or `{"tool_calls": [one entry]}`."""


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as a client gets them: JSON, encoded once, no spaces."""
    return json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))


def call_deltas(call: ToolCall, index: int, *, piece_chars: int = PIECE_CHARS) -> Iterator[Delta]:
    """Yield one call as deltas: id, type and name in the first, the same index in all.

    Args:
        call: an executable one.
        index: its place among the calls of the message.
        piece_chars: at most this many characters of the arguments in each.
    """
    head = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    yield {"tool_calls": [{"index": index, **head}]}
    text = arguments_text(call)
    for at in range(0, len(text), piece_chars):
        piece = {"arguments": text[at : at + piece_chars]}
        yield {"tool_calls": [{"index": index, "function": piece}]}


def message_deltas(message: AssistantMessage, *, piece_chars: int = PIECE_CHARS) -> Iterator[Delta]:
    """Yield a finished reply as deltas: reasoning, content, then its calls in order.

    A malformed call is content, as the model wrote it, so that it is seen and not executed.
    """
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    index = 0
    for call in message.tool_calls:
        if call.problem is not None:
            yield {"content": call.raw}
            continue
        yield from call_deltas(call, index, piece_chars=piece_chars)
        index += 1


class CallText:
    """Text that grows, split into content and calls of JSON between two markers.

    Cost: linear in the text; a block is judged once per closing marker in it.

    Example:
        >>> stream = CallText()
        >>> for chunk in chunks:
        ...     deltas += stream.feed(chunk)
        >>> deltas += stream.finish()
    """

    def __init__(
        self,
        opener: str = "<tool_call>",
        closer: str = "</tool_call>",
        *,
        piece_chars: int = PIECE_CHARS,
    ) -> None:
        self._opener, self._closer, self._piece_chars = opener, closer, piece_chars
        self._held: list[str] = []
        """Chunks that are not settled: they are joined only where a marker may be in them."""
        self._tail = ""
        self._num_calls = 0
        self._in_call = False
        self.calls: list[ToolCall] = []
        """Every attempt so far, in order, malformed ones too."""

    def feed(self, chunk: str) -> list[Delta]:
        """Return the deltas that `chunk` settles."""
        self._held.append(chunk)
        seam = self._tail + chunk
        overlap = max(len(self._opener), len(self._closer)) - 1
        self._tail = seam[-overlap:] if overlap else ""
        marker = self._closer if self._in_call else self._opener
        if self._in_call and marker not in seam:
            return []
        return self._settle(ended=False)

    def finish(self) -> list[Delta]:
        """Return the deltas of what is left; nothing may be fed behind it."""
        return self._settle(ended=True)

    def _settle(self, *, ended: bool) -> list[Delta]:
        text, self._held = "".join(self._held), []
        deltas: list[Delta] = []
        at = 0
        while True:
            if not self._in_call:
                start = text.find(self._opener, at)
                content_end = start if start >= 0 else len(text)
                if start < 0 and not ended:
                    content_end -= _partial(text, at, self._opener)
                if content_end > at:
                    deltas.append({"content": text[at:content_end]})
                at = content_end
                if start < 0:
                    break
                self._in_call = True
            behind = self._call(text, at, deltas, ended=ended)
            if behind < 0:
                break
            at, self._in_call = behind, False
        if at < len(text):
            self._held = [text[at:]]
        return deltas

    def _call(self, text: str, start: int, deltas: list[Delta], *, ended: bool) -> int:
        """Settle the block that is opened at `start`; return where it ends, -1 for not yet."""
        begin = start + len(self._opener)
        closes: list[int] = []
        found = text.find(self._closer, begin)
        while found >= 0 and len(closes) <= MAX_LATER_CLOSES:
            closes.append(found)
            found = text.find(self._closer, found + len(self._closer))
        for close in closes:
            call = judge_call(text[begin:close].strip(), closed=True)
            if call.problem is not ProblemKind.INVALID_JSON:
                return self._emit(call, text[start : close + len(self._closer)], deltas, close)
        if closes and (ended or len(closes) > MAX_LATER_CLOSES):
            call = judge_call(text[begin : closes[0]].strip(), closed=True)
            return self._emit(call, text[start : closes[0] + len(self._closer)], deltas, closes[0])
        if not ended:
            return -1
        call = judge_call(text[begin:].strip(), closed=False)
        self._emit(call, text[start:], deltas, len(text))
        return len(text)

    def _emit(self, call: ToolCall, whole: str, deltas: list[Delta], close: int) -> int:
        self.calls.append(call)
        if call.problem is None:
            deltas.extend(call_deltas(call, self._num_calls, piece_chars=self._piece_chars))
            self._num_calls += 1
        else:
            deltas.append({"content": whole})
        return close + len(self._closer)


def _partial(text: str, start: int, marker: str) -> int:
    """Return how many characters at the end of `text[start:]` may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


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
