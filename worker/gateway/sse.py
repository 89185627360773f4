"""Server-sent events: how they are written, and a stream that opens late and never falls silent.

Owns the bytes of events and the first and last of a stream. Never knows a dialect's events.
Invariants: nothing is sent before the first event is due, so what breaks before is an ordinary
error; while nothing comes the client hears something every `keepalive_s`; events that the client
does not take are not piled up (the next ones are asked for when these are sent).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from .types import Event, Refusal, Streamer
from .wire import Wire

T = TypeVar("T")

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
COMMENT = b": alive\n\n"
_encode = msgspec.json.Encoder().encode


def encode(events: Iterable[Event]) -> bytes:
    """Return events as they are sent."""
    pieces: list[bytes] = []
    for name, data in events:
        if name:
            pieces.append(b"event: %b\n" % name.encode())
        lines = data.encode().split(b"\n") if isinstance(data, str) else (_encode(data),)
        pieces += [b"data: %b\n" % line for line in lines]
        pieces.append(b"\n")
    return b"".join(pieces)


class EventStream:
    """One stream of events to one client.

    Attributes:
        is_open: something was sent; from now on errors are events.
    """

    def __init__(
        self,
        wire: Wire,
        streamer: Streamer,
        headers: Sequence[tuple[bytes, bytes]],
        keepalive_s: float,
    ) -> None:
        self._wire, self._streamer = wire, streamer
        self._headers, self._keepalive_s = (*HEADERS, *headers), keepalive_s
        self.is_open = False

    async def wait(self, coming: asyncio.Future[T]) -> T:
        """Return a result, and keep the connection alive until it is there.

        Raises:
            ClientLeft: meanwhile.
        """
        while not coming.done():
            await self._wire.wait(coming, timeout_s=self._keepalive_s)
            if not coming.done():
                await self._alive()
        return coming.result()

    async def _alive(self) -> None:
        if not self.is_open:
            await self.send(())
            return
        ping = self._streamer.ping()
        await self._wire.send_body(COMMENT if ping is None else encode((ping,)))

    async def send(self, events: Sequence[Event]) -> None:
        """Send events, the first ones before them."""
        if not self.is_open:
            begun = encode(self._streamer.begin())
            await self._open()
            await self._wire.send_body(begun + encode(events))
        elif events:
            await self._wire.send_body(encode(events))

    async def _open(self) -> None:
        self.is_open = True
        await self._wire.send_head(200, self._headers)

    async def end(self, events: Sequence[Event]) -> None:
        """Send the last events and end the response."""
        await self.end_with(encode(events))

    async def end_with(self, encoded: bytes) -> None:
        """Send the last events as bytes and end the response."""
        await self._wire.send_body(encoded, more=False)

    async def fail(self, refusal: Refusal) -> None:
        """End a stream that began as broken."""
        await self.end(self._streamer.error(refusal))
