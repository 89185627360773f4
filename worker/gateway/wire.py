"""One request on its connection: what came, what is answered, and whether anybody still listens.

Owns the order of a response's parts and the bounds of each write. Never knows what is answered.
Invariants: every response has a request id; a request that ends unread, and is not small, ends its
connection too; a client that left, or takes nothing, is noticed and raised as `ClientLeft`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .limits import CONNECTION, ClientLeft, Connection, HttpLimits, HttpRefusal, status_of
from .types import RETRYABLE, Refusal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Headers = Sequence[tuple[bytes, bytes]]

RETRY_AFTER_S = 1
SMALL_BYTES = 64 << 10
"""An unread body of so many bytes is thrown away by the connection, which then serves on."""
_JSON = (b"content-type", b"application/json")
_LATE: set[asyncio.Future[Any]] = set()
"""What was begun for clients that left meanwhile; held until it is undone."""


class Wire:
    """One request.

    Attributes:
        request_id: 32 hex, as in the response's header.
        headers: of the request; names in lower case, of equal names the last.
        is_read: the whole body came.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: HttpLimits) -> None:
        self.scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.request_id = uuid.uuid4().hex
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.is_read = False
        self.has_begun = False
        self._connection: Connection = scope[CONNECTION]
        self._gone: asyncio.Future[None] | None = None

    async def receive(self) -> Any:
        """Return the next message of the body."""
        message = await self._receive()
        self.is_read = not message.get("more_body", False)
        return message

    # --- whether the client is there -------------------------------------------------------------
    @property
    def is_gone(self) -> bool:
        """The client left."""
        return self._connection.is_gone or (self._gone is not None and self._gone.done())

    @contextlib.asynccontextmanager
    async def watching(self) -> Any:
        """Notice meanwhile that the client leaves; the body was read before."""
        gone = self._gone = asyncio.ensure_future(_until_gone(self._receive))
        try:
            yield
        finally:
            gone.cancel()
            self._gone = None  # or this object, and all it holds, waits for the collector

    async def wait(self, coming: asyncio.Future[Any], *, timeout_s: float | None = None) -> None:
        """Wait for a result, which is left where it is.

        Raises:
            ClientLeft: meanwhile.
        """
        assert self._gone is not None
        await asyncio.wait(
            (coming, self._gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self.is_gone:
            raise ClientLeft

    async def until(
        self, coming: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None
    ) -> T:
        """Return what a coroutine returns; it is cancelled where the client leaves.

        Args:
            coming: what is waited for.
            undo: takes back a result that came all the same.

        Raises:
            ClientLeft: meanwhile.
        """
        task = asyncio.ensure_future(coming)
        try:
            await self.wait(task)
        except BaseException:
            _discard(task, undo)
            raise
        return task.result()

    async def drained(self) -> None:
        """Return once the client took most of what was sent.

        Raises:
            ClientLeft: it left, or takes nothing.
        """
        async with self._bounded():
            await self._connection.drain()
        if self.is_gone:
            raise ClientLeft

    # --- the response ----------------------------------------------------------------------------
    async def send_head(self, status: int, headers: Headers) -> None:
        """Begin the response."""
        self.has_begun = True
        request_id = self.request_id.encode()
        ids = ((b"x-request-id", request_id), (b"request-id", request_id))
        await self._write(
            {"type": "http.response.start", "status": status, "headers": [*headers, *ids]}
        )

    async def send_body(self, body: bytes, *, more: bool = True) -> None:
        """Send a piece of it.

        Raises:
            ClientLeft: nobody takes it.
        """
        await self._write({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(
        self, status: int, body: bytes, headers: Headers = (), *, closes: bool = False
    ) -> None:
        """Send a whole response; with `closes` the connection ends there.

        Raises:
            ClientLeft: nobody takes it.
        """
        lingers = not closes and not self._can_serve_on()
        last = ((b"connection", b"close"),) if closes or lingers else ()
        length = (b"content-length", str(len(body)).encode())
        await self.send_head(status, [*headers, length, *last])
        if lingers:
            await self.send_body(body)
            await self._linger()
            body = b""
        await self.send_body(body, more=False)

    async def answer_json(
        self, status: int, body: Any, headers: Headers = (), *, closes: bool = False
    ) -> None:
        """Send a whole response; `body` is bytes of JSON, or becomes them."""
        encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
        await self.answer(status, encoded, [_JSON, *headers], closes=closes)

    async def refuse(self, refusal: Refusal, body: Any, headers: Headers = ()) -> None:
        """Send an error, with what an SDK is to do about it."""
        again, closes, more = refusal.kind in RETRYABLE, False, headers
        if isinstance(refusal, HttpRefusal):
            again, closes, more = refusal.again, refusal.closes, (*headers, *refusal.headers)
        said = [(b"x-should-retry", b"true" if again else b"false")]
        if again:
            said.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        await self.answer_json(status_of(refusal), body, [*said, *more], closes=closes)

    def _can_serve_on(self) -> bool:
        """The connection is good for another request."""
        if self.is_read or self.scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return True
        if "transfer-encoding" in self.headers or "expect" in self.headers:
            return False
        length = self.headers.get("content-length", "0")
        return length.isdigit() and int(length) <= SMALL_BYTES

    async def _linger(self) -> None:
        """Throw away what the client still sends, for a while."""
        if "expect" in self.headers:  # it waits to be told whether to send at all
            return
        left = 2 * self._limits.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_s):
                while left > 0 and not self.is_read:
                    left -= len((await self.receive()).get("body", b""))

    async def _write(self, message: dict[str, Any]) -> None:
        if self.is_gone:
            raise ClientLeft
        async with self._bounded():
            await self._send(message)

    @contextlib.asynccontextmanager
    async def _bounded(self) -> Any:
        """Leave a client that takes nothing, and what was to be sent to it with it."""
        try:
            async with asyncio.timeout(self._limits.stall_s):
                yield
        except TimeoutError:
            self._connection.abort()
            raise ClientLeft from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _discard(task: asyncio.Future[T], undo: Callable[[T], None] | None) -> None:
    def done(ended: asyncio.Future[T]) -> None:
        _LATE.discard(ended)
        if not ended.cancelled() and ended.exception() is None and undo is not None:
            undo(ended.result())

    task.cancel()
    _LATE.add(task)
    task.add_done_callback(done)
