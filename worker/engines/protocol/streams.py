"""A reply that comes in pieces: server-sent events in, new ids out, and one whole reply at the end.

Owns what a stream is in either protocol: its events, its end, its size, and what is passed on when.
Never knows a protocol's fields (a `Joiner` does), and never sends anything. Invariants: what is
passed on are ids that the reply goes on to have, each once and in order; the last piece of a reply
is passed on by nobody before the whole was validated; and what is validated is the reply that the
engine would have given without a stream, whatever came before it.

No piece is kept longer than it takes to read it, but for what a server says once only (`Joiner`).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import aiohttp
import httpx
import msgspec

from rollstream.errors import EngineFault

from ...types import Completion, TokenSink
from ..faults import Detail, detail_of_status, fault, says_overflow
from .checks import UNREADABLE, check_count, checked_ids, error_text

if TYPE_CHECKING:
    from .http_base import Sent

STREAM_FACTOR = 20
"""A stream that says everything again in each event may be so many times its reply; as it is paced
(`stream.interval_of`) it stays below that."""
DRAIN_S = 1.0
"""How long the end of a body is awaited behind its last event: until then its connection cannot be
used again."""
_DONE = b"[DONE]"
_FIELDS = (b"data", b"event", b"id", b"retry", b"")
"""Of server-sent events; an empty name is a comment, which keeps a silent connection open."""


class Events:
    """Cuts bytes into the data of events, however they arrive."""

    __slots__ = ("_buffer", "_data", "_engine", "_seen")

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._seen = 0
        """How much of the buffer holds no end of a line."""
        self._data: list[bytes] = []

    @property
    def num_waiting(self) -> int:
        """Return how many bytes of an event are there whose end is not."""
        return len(self._buffer) + sum(map(len, self._data))

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end here.

        Raises:
            EngineFault: a line that is none of an event, behind the events before it.
        """
        buffer, start = self._buffer, 0
        buffer += chunk
        while (end := buffer.find(b"\n", max(start, self._seen))) >= 0:
            line = bytes(memoryview(buffer)[start:end])
            start = self._seen = end + 1
            if (data := self._line(line.removesuffix(b"\r"))) is not None:
                yield data
        del buffer[:start]
        self._seen = len(buffer)

    def _line(self, line: bytes) -> bytes | None:
        """Take a line, and return the data of the event that it ends."""
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name not in _FIELDS:
            raise fault(
                Detail.BAD_REPLY,
                f"{self._engine}: a line of a stream that is none: {error_text(line)}",
            )
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None


class Joiner(ABC):
    """Reads the events of one reply in a protocol's words, and makes of them the whole reply.

    Attributes:
        ids: those that were passed on.
        is_whole: the reply's last piece has come.
    """

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self.ids: list[int] = []
        self.is_whole = False

    @abstractmethod
    def add(self, data: bytes) -> list[int]:
        """Take an event, and return the ids that are new in it; none of the reply's last piece.

        Raises:
            EngineFault: it is none, or contradicts those before it.
        """

    @abstractmethod
    def joined(self) -> bytes:
        """Return the reply as its engine would have given it without a stream.

        Raises:
            EngineFault: there is nothing to make one of.
        """


class StreamedReply:
    """One reply on its way, from its first byte to its last.

    Attributes:
        is_open: it began, and its end did not come.
    """

    __slots__ = ("_events", "_joiner", "_max_bytes", "_max_token_id", "_sent", "_sink", "is_open")

    def __init__(
        self, joiner: Joiner, sink: TokenSink, sent: Sent, *, max_token_id: int, max_bytes: int
    ) -> None:
        """Begin with nothing.

        Args:
            joiner: of the protocol.
            sink: is passed the ids.
            sent: the request.
            max_token_id: the highest id of the vocabulary.
            max_bytes: that the reply may have without a stream; each event may, too.
        """
        self._joiner, self._sink, self._sent = joiner, sink, sent
        self._max_token_id, self._max_bytes = max_token_id, max_bytes
        self._events = Events(sent.engine)
        self.is_open = False

    async def read(self, body: AsyncIterator[bytes]) -> bytes:
        """Return the whole reply, as if it had not been streamed; its ids are passed on meanwhile.

        Raises:
            EngineFault: by the table in `faults`.
        """
        engine, num_bytes = self._sent.engine, 0
        self.is_open = True
        async for chunk in body:
            num_bytes += len(chunk)
            for data in self._events.feed(chunk):
                if data.strip() == _DONE:
                    self.is_open = False
                    await _drain(body)
                    return self._joiner.joined()
                self._take(data)
            if max(self._events.num_waiting, num_bytes // STREAM_FACTOR) > self._max_bytes:
                raise fault(
                    Detail.BAD_REPLY, f"{engine}: {num_bytes} bytes of a stream are no reply"
                )
        raise fault(Detail.RESET, f"{engine}: the stream ended before its [DONE]")

    def _take(self, data: bytes) -> None:
        joiner, engine = self._joiner, self._sent.engine
        new = joiner.add(data)
        if not new:
            return
        ids = checked_ids(new, self._max_token_id, engine)
        ids.flags.writeable = False
        check_count(len(joiner.ids), self._sent.max_new_tokens, engine)
        self._sink.add(ids)

    def check(self, completion: Completion) -> int:
        """Refuse a reply that is not what was passed on; return how many ids of it were.

        Raises:
            EngineFault: its ids are others, or fewer.
        """
        num = len(self._joiner.ids)
        if completion.ids[:num].tolist() != self._joiner.ids:
            raise changed(self._sent.engine, num)
        return num


def is_stream(response: httpx.Response) -> bool:
    """Return whether an answer is a stream of events."""
    kind: str = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.lower().startswith("text/event-stream")


async def _drain(body: AsyncIterator[bytes]) -> None:
    """Read what is behind the last event: nothing, in all likelihood; the reply is there."""
    lost = (TimeoutError, httpx.TransportError, aiohttp.ClientError, OSError)
    with contextlib.suppress(*lost):
        async with asyncio.timeout(DRAIN_S):
            async for _ in body:
                pass


def no_finish(engine: str) -> EngineFault:
    """Return the fault of a stream whose `[DONE]` came before the reply's last piece."""
    return fault(Detail.UNKNOWN_FINISH, f"{engine}: the stream has no finish reason")


def odd_event(data: bytes, engine: str, *, is_late: bool) -> EngineFault:
    """Return the fault of an event that is no piece of the reply, or behind its last one."""
    what = "behind the end of its reply" if is_late else "that is no piece of a reply"
    return fault(Detail.BAD_REPLY, f"{engine}: an event of a stream {what}: {error_text(data)}")


def changed(engine: str, num: int) -> EngineFault:
    """Return the fault of a stream that takes back what it said."""
    return fault(
        Detail.BAD_REPLY, f"{engine}: the {num} ids that a stream had said already are others now"
    )


class _HasError(Protocol):
    """An event of either protocol."""

    error: msgspec.Raw


E = TypeVar("E", bound=_HasError)
NOTHING = (b"", b"null")
"""JSON of a field that is not there."""


def decode_event(decoder: msgspec.json.Decoder[E], data: bytes, engine: str) -> E:
    """Return an event that is no error.

    Raises:
        EngineFault: it cannot be read, or says that the request broke.
    """
    try:
        event = decoder.decode(data)
    except UNREADABLE as error:
        raise fault(Detail.BAD_REPLY, f"{engine}: {error}: {error_text(data)}") from None
    if bytes(event.error) not in NOTHING:
        raise error_event(data, event.error, engine)
    return event


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: int | str | None = None


def error_event(data: bytes, error: msgspec.Raw, engine: str) -> EngineFault:
    """Return the fault that an event is which has an error in place of a piece of the reply.

    Both servers began with HTTP 200 and can say no other status any more: theirs is the `code`.
    """
    text = error_text(data)
    try:
        said = msgspec.json.decode(error, type=_Error)
    except UNREADABLE:
        said = _Error()
    status = said.code if isinstance(said.code, int) else 0
    if 400 <= status < 600:
        detail = detail_of_status(status, text)
    else:  # older servers name no code, and say only so what they would refuse with a 400
        detail = Detail.CONTEXT_OVERFLOW if says_overflow(text) else Detail.BAD_REPLY
    return fault(detail, f"{engine}: an error in a stream (code {status}): {text}")
