"""Connections to engines that say whether they were used before, and whether an answer began.

Owns the two facts about the connection of one request (`Line`) that tell a server which closed an
idle connection just as we wrote to it from one that broke while it worked. Never retries anything.
Invariant: a request that asks for a fresh connection gets one that carried no request before.

The facts travel in a context variable: between the pool that asks and the connector there are a
client, httpx's transport interface and aiohttp, and none of them passes anything through.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace


class Line:
    """The connection of one try.

    Attributes:
        fresh: asked for: no connection that was used before.
        reused: it had carried a request before.
        answered: the head of an answer arrived on it.
    """

    __slots__ = ("answered", "fresh", "reused")

    def __init__(self, *, fresh: bool = False) -> None:
        self.fresh, self.reused, self.answered = fresh, False, False

    @property
    def stale(self) -> bool:
        """Return whether a lost connection was one that the server had given up already."""
        return self.reused and not self.answered


LINE: ContextVar[Line | None] = ContextVar("LINE", default=None)
"""Of the request that this task makes; None where nobody asks."""


class LineConnector(aiohttp.TCPConnector):
    """A connector that fills in the `Line` of who asks for a connection."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Connection:
        """Return a connection; a fresh one where the line says so."""
        line = LINE.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            reused = protocol in self._used
            if not reused or line is None or not line.fresh:
                break
            connection.close()
        if line is not None:
            line.reused = reused
        if not reused and protocol is not None:
            self._used.add(protocol)
        return connection


class LineTransport(AiohttpTransport):  # type: ignore[misc]  # httpx-aiohttp has no types
    """A transport that notes when the head of an answer has arrived."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer, the body not yet read."""
        response: httpx.Response = await super().handle_async_request(request)
        line = LINE.get()
        if line is not None:
            line.answered = True
        return response
