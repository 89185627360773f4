"""A lean HTTP/1.1 server: whole requests in, whole answers out, thousands of them in flight.

Owns parsing and connections. Never knows what is served: a handler gets an `Exchange` and answers
it, at once or later. Invariant: one exchange at a time per connection, answered in order; a body
over the limit, or framed other than by Content-Length, is refused and the connection closed.

It exists because an engine's stand-in must not be what a benchmark measures: a request costs about
a tenth of what a full web framework takes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TypeAlias

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 64 << 20
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    411: b"Length Required",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}


class Exchange:
    """One request, and the way to answer it once.

    Attributes:
        closed: the client went away; an answer would go nowhere.
        on_close: called when that happens before the answer.
    """

    __slots__ = ("_connection", "body", "closed", "head", "method", "on_close", "path")

    def __init__(
        self, connection: _Connection, method: str, path: str, head: bytes, body: bytes
    ) -> None:
        self.method, self.path, self.head, self.body = method, path, head, body
        self.closed = False
        self.on_close: Callable[[], None] | None = None
        self._connection: _Connection | None = connection

    def answer(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send the whole answer; a second one, or one to a client that left, is dropped."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.closed:
            connection.send(status, body, content_type)

    def drop(self) -> None:
        """Close the connection without an answer, as a crash or a reset would."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()


Handler: TypeAlias = Callable[[Exchange], None]


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._wanted = 0
        """How many bytes the buffer must hold before it is worth another look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.closed = True
            if exchange.on_close is not None:
                exchange.on_close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        """Begin the next exchange, if no other is open and a whole request is there."""
        while self._exchange is None and self._transport is not None:
            if len(self._buffer) < max(self._wanted, 4):
                return
            end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
            if end < 0:
                if len(self._buffer) >= MAX_HEAD_BYTES:
                    self._refuse(431, "the request's head is too large")
                return
            head = bytes(self._buffer[:end])
            length = self._length(head)
            if length is None:
                return
            total = end + 4 + length
            if len(self._buffer) < total:
                if self._wanted == 0 and b"100-continue" in head.lower():
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._wanted = total
                return
            body = bytes(memoryview(self._buffer)[end + 4 : total])
            del self._buffer[:total]
            self._wanted = 0
            method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
            target = rest.partition(b" ")[0].partition(b"?")[0]
            self._exchange = Exchange(
                self, method.decode("latin-1"), target.decode("latin-1"), head, body
            )
            self._handler(self._exchange)

    def _length(self, head: bytes) -> int | None:
        """Return the body's length, None where the request was refused."""
        lower = head.lower()
        if b"\r\ntransfer-encoding:" in lower:
            self._refuse(411, "send a Content-Length; chunked bodies are not read")
            return None
        _, found, rest = lower.partition(b"\r\ncontent-length:")
        if not found:
            return 0
        digits = rest.partition(b"\r\n")[0].strip()
        if not digits.isdigit():
            self._refuse(400, "Content-Length is not a number")
            return None
        if int(digits) > MAX_BODY_BYTES:
            self._refuse(413, f"a body may have {MAX_BODY_BYTES} bytes")
            return None
        return int(digits)

    def _refuse(self, status: int, message: str) -> None:
        self.send(status, b'{"error":{"message":"%b"}}' % message.encode(), b"application/json")
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def send(self, status: int, body: bytes, content_type: bytes) -> None:
        self._exchange = None
        if self._transport is None:
            return
        reason = _REASONS.get(status, b"Status")
        self._transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, reason, content_type, len(body), body)
        )
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def abort(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listen; port 0 takes a free one.

    Raises:
        OSError: the address is in use.
    """
    listener = socket.create_server((host, port), backlog=4096, reuse_port=False)
    listener.setblocking(False)
    return await asyncio.get_running_loop().create_server(
        lambda: _Connection(handler), sock=listener, backlog=4096
    )


def port_of(server: asyncio.Server) -> int:
    """Return the port that a server listens on."""
    port: int = server.sockets[0].getsockname()[1]
    return port
