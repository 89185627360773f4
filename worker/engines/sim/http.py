"""A lean HTTP/1.1 server: whole requests in, whole answers out, thousands of them in flight.

Owns parsing and connections. Never knows what is served: a handler gets an `Exchange` and answers
it, at once or later, as a whole or in pieces. Invariant: one exchange at a time per connection,
answered in order; a body over the limit, or framed other than by Content-Length, is refused and the
connection closed; with `keepalive_s`, a connection that has been idle for so long since its last
answer is closed.

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
    408: b"Request Timeout",
    411: b"Length Required",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}


class Exchange:
    """One request, and the way to answer it once.

    Attributes:
        query: what follows the path's question mark.
        closed: the client went away; an answer would go nowhere.
        on_close: called when that happens before the answer, or its end.
        is_streamed: the answer has begun, in pieces.
    """

    __slots__ = (
        "_connection",
        "body",
        "closed",
        "head",
        "is_streamed",
        "method",
        "on_close",
        "path",
        "query",
    )

    def __init__(
        self, connection: _Connection, method: str, path: str, query: str, head: bytes, body: bytes
    ) -> None:
        self.method, self.path, self.query, self.head = method, path, query, head
        self.body = body
        self.closed = self.is_streamed = False
        self.on_close: Callable[[], None] | None = None
        self._connection: _Connection | None = connection

    def answer(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send the whole answer; a second one, or one to a client that left, is dropped."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.closed:
            connection.send(status, body, content_type)

    def begin(self, content_type: bytes = b"text/event-stream") -> None:
        """Send the head of an answer whose pieces follow."""
        self.is_streamed = True
        if self._connection is not None and not self.closed:
            self._connection.begin(200, content_type)

    def write(self, piece: bytes) -> None:
        """Send a piece; one to a client that left is dropped."""
        if self._connection is not None and not self.closed and piece:
            self._connection.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """End an answer that came in pieces."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.closed:
            connection.write(b"0\r\n\r\n")
            connection.answered()

    def break_piece(self, piece: bytes) -> None:
        """Send half a piece and close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.closed:
            connection.write(b"%x\r\n%b" % (len(piece), piece[: len(piece) // 2]))
            connection.close()

    def header(self, name: bytes) -> str | None:
        """Return a header's value, None where it is not sent.

        Args:
            name: in lower case.
        """
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return value.strip().decode("latin-1")
        return None

    def break_off(self, status: int, body: bytes) -> None:
        """Send half an answer and close the connection, as a server that dies meanwhile."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.closed:
            connection.send(status, body, b"application/json", len(body) // 2)
            connection.close()

    def drop(self) -> None:
        """Close the connection without an answer, as a crash or a reset would.

        What was sent of a stream arrives.
        """
        connection, self._connection = self._connection, None
        if connection is not None and self.is_streamed:
            connection.close()
        elif connection is not None:
            connection.abort()


Handler: TypeAlias = Callable[[Exchange], None]


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, keepalive_s: float) -> None:
        self._handler = handler
        self._keepalive_s = keepalive_s
        self._idle_since_s = 0.0
        self._reaper: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._wanted = 0
        """How many bytes the buffer must hold before it is worth another look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # asyncio does it for sockets whose protocol is named, which a listener's is not: each
            # event of a stream would wait for the acknowledgement of the one before it (40 ms).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reaper is not None:
            self._reaper.cancel()
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
            path, _, query = rest.partition(b" ")[0].decode("latin-1").partition("?")
            self._exchange = Exchange(self, method.decode("latin-1"), path, query, head, body)
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
        self.close()

    def send(
        self, status: int, body: bytes, content_type: bytes, num_bytes: int | None = None
    ) -> None:
        reason = _REASONS.get(status, b"Status")
        self.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, reason, content_type, len(body), body[:num_bytes])
        )
        self.answered()

    def begin(self, status: int, content_type: bytes) -> None:
        self.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
            % (status, _REASONS.get(status, b"Status"), content_type)
        )

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answered(self) -> None:
        """Go on to the next exchange."""
        self._exchange = None
        if self._transport is None:
            return
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._next)
        if self._keepalive_s > 0.0:
            loop = asyncio.get_running_loop()
            self._idle_since_s = loop.time()
            if self._reaper is None:
                self._reaper = loop.call_later(self._keepalive_s, self._reap)

    def _reap(self) -> None:
        """Close if idle for long enough, else look again then: one timer, however many answers."""
        self._reaper = None
        if self._transport is None:
            return
        loop = asyncio.get_running_loop()
        is_busy = self._exchange is not None or bool(self._buffer)
        left_s = self._idle_since_s + self._keepalive_s - loop.time()
        if not is_busy and left_s <= 0.001:
            self.close()
        elif not is_busy:
            self._reaper = loop.call_later(left_s, self._reap)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def abort(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


async def serve(
    handler: Handler, host: str, port: int, *, keepalive_s: float = 0.0
) -> asyncio.Server:
    """Listen; port 0 takes a free one.

    Args:
        handler: gets each request.
        host: to listen on.
        port: to listen on.
        keepalive_s: close a connection that was idle for so long; 0 never does.

    Raises:
        OSError: the address is in use.
    """
    listener = socket.create_server((host, port), backlog=4096, reuse_port=False)
    listener.setblocking(False)
    return await asyncio.get_running_loop().create_server(
        lambda: _Connection(handler, keepalive_s), sock=listener, backlog=4096
    )


def port_of(server: asyncio.Server) -> int:
    """Return the port that a server listens on."""
    port: int = server.sockets[0].getsockname()[1]
    return port
