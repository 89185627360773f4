"""What one client may take of the server, and the connection that holds it to that.

Owns the bounds on connections, heads, bodies and waits. Never reads a request's content.
Invariant: whatever a client sends, or does not send, or does not read, it costs one connection, a
bounded number of bytes and a bounded time; a flood of idle connections never keeps a new one out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .types import STATUS, ErrorKind, Refusal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

CONNECTION = "rollstream.connection"
"""Key of the connection in a request's scope."""
READ_BYTES = 16 << 10
"""Read from a socket at once: what a body in chunks of one byte may cost the loop before others
have their turn (some 30 ms; asyncio's own 256 KiB would be half a second)."""
FILES_SHARE = 2
"""Connections may take one in so many of the files that this process may have open."""
_KINDS = {404: ErrorKind.NOT_FOUND, 413: ErrorKind.TOO_LARGE}
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the server; the first two are settings, the others have no reason to differ."""

    max_body_bytes: int = 8 << 20
    keepalive_s: float = 10.0
    """How long a stream is silent before it says that it is alive."""
    body_s: float = 30.0
    """A request's body is there within so long."""
    idle_s: float = 60.0
    """A connection without a whole head of a request is closed after so long."""
    stall_s: float = 60.0
    """A client that takes nothing of what is sent is left after so long."""
    linger_s: float = 2.0
    """How long the rest of a refused body is read and thrown away, so that its sender gets to read
    the refusal: a connection that is closed before would be reset under it."""
    max_connections: int = 4096
    max_head_bytes: int = 64 << 10
    bodies_at_once: int = 8
    """Largest bodies that are held at once; more are told to try again."""

    @property
    def held_bytes(self) -> int:
        """All bodies that are held at once."""
        return self.bodies_at_once * self.max_body_bytes

    def connections(self) -> int:
        """Return how many connections this process can have, which is what may be open here."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        return max(1, min(self.max_connections, soft // FILES_SHARE))


class HttpRefusal(Refusal):
    """A refusal for what HTTP itself says, which no chat API has a kind for.

    Attributes:
        status: of the response.
        again: the same request may succeed later.
        closes: the connection ends with the response, at once.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        again: bool = False,
        closes: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(_KINDS.get(status, ErrorKind.INVALID), message)
        self.status, self.again, self.closes, self.headers = status, again, closes, headers


class ClientLeft(Exception):
    """The client is gone, or takes nothing any more: there is nobody to answer."""


def status_of(refusal: Refusal) -> int:
    """Return the status of its response."""
    return refusal.status if isinstance(refusal, HttpRefusal) else STATUS[refusal.kind]


def generic_error(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an error that belongs to no dialect."""
    kind, code = refusal.kind.value, status_of(refusal)
    return {"error": {"message": refusal.message, "type": kind, "code": code}}


class Connection(H11Protocol):
    """One client's connection: uvicorn's, with bounds that it does not have.

    Attributes:
        wire_bytes: read since the last response, head and framing included.
    """

    def __init__(
        self, config: Config, state: ServerState, limits: HttpLimits, max_connections: int
    ) -> None:
        super().__init__(config, state, app_state={})
        self._handler: ASGIApp = self.app
        self.app = self._call
        self._max_connections = max_connections
        self.wire_bytes = 0
        self.idle_since_s = self.loop.time()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = self
        await self._handler(scope, receive, send)

    @property
    def is_idle(self) -> bool:
        """No request is under way; part of one may have come."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_gone(self) -> bool:
        """Nothing that is sent arrives any more."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new client; at the limit the one that was idle longest makes room."""
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            # asyncio does not for a listener of ours (its socket names no protocol): each event of
            # a stream would wait 40 ms for the acknowledgement of the one before it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own transports
        if len(self.connections) > self._max_connections and not self._make_room():
            self._answer(503, "too many connections: try again")

    def _make_room(self) -> bool:
        """Return whether there is room now; what closes already has made it."""
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self and not other.is_gone
        ]
        if len(others) < self._max_connections:
            return True
        oldest = min((o for o in others if o.is_idle), key=_idle_since, default=None)
        if oldest is not None:
            oldest.abort()
        return oldest is not None

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self.wire_bytes += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.wire_bytes = 0
        self.idle_since_s = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client, and the timer that uvicorn leaves behind where it was reset."""
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # All lead back here: this object and its last request would wait for the collector.
        self.app = self._handler
        self.cycle = self.scope = None  # type: ignore[assignment]

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; `msg` is uvicorn's, the reason is the error being handled."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._answer(status if status in _REASONS else 400, f"{msg} {error}".strip())

    def _answer(self, status: int, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()  # a response is on its way: another one in its midst would be read as it
            return
        body = msgspec.json.encode(generic_error(HttpRefusal(status, message)))
        reason = _REASONS.get(status, b"Service Unavailable")
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%bconnection: close\r\n\r\n%b"
            % (status, reason, len(body), _head_lines(self.server_state), body)
        )
        self.transport.close()

    def abort(self) -> None:
        """Drop the connection with whatever was not sent yet."""
        self.transport.abort()

    async def drain(self) -> None:
        """Wait until the client took most of what was sent."""
        if self.flow.write_paused:
            await self.flow.drain()


def _idle_since(connection: Connection) -> float:
    return connection.idle_since_s


def _head_lines(state: ServerState) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in state.default_headers)


def sweep(state: ServerState, limits: HttpLimits, now_s: float) -> None:
    """Drop connections that never became a request, or have been idle for long enough."""
    for connection in list(state.connections):
        if (
            isinstance(connection, Connection)
            and connection.is_idle
            and now_s - connection.idle_since_s >= limits.idle_s
        ):
            connection.abort()


async def sweep_forever(state: ServerState, limits: HttpLimits, clock: Callable[[], float]) -> None:
    """Drop idle connections every now and then; until cancelled."""
    while True:
        await asyncio.sleep(min(limits.idle_s / 4, 5.0))
        sweep(state, limits, clock())
