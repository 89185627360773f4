"""The way between an agent and its base URL: what happens to a request on it, and the journal.

Owns one transport of httpx, below raw clients and SDKs alike. Never changes what passes; it only
loses it. Invariant: a request is in the journal before it is sent, and how it ended before its
client hears of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from tests.e2e.agents.plan import Fate
from tests.e2e.weights.journal import Journal

PATIENCE_S = 0.03
"""How long a client waits that does not wait."""
MOST_PIECES = 4
"""Behind one to so many pieces of a stream a client leaves."""
TIMEOUT_S = 30.0
_SOON = {"retry-after-ms": "5"}


class Line(httpx.AsyncBaseTransport):
    """One conversation's way, with a fate for each of its next requests."""

    def __init__(self, journal: Journal, numbers: Iterator[int], number: int) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._journal, self._numbers, self._number = journal, numbers, number
        self.fates: list[Fate] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, or do worse."""
        fate = self.fates.pop(0) if self.fates else Fate.PASS
        n = next(self._numbers)
        body = json.loads(await request.aread())
        self._journal.write(
            "sent", n=n, line=self._number, path=request.url.path, body=body, fate=fate.value,
            retry=int(request.headers.get("x-stainless-retry-count", 0)), sent_s=time.time(),
        )  # fmt: skip
        if fate is Fate.REFUSE:
            self._end(n, "unsent")
            return _unavailable()
        if fate is Fate.PASS or (fate is Fate.LEAVE and body.get("stream")):
            return await self._pass(request, n, leaves=fate is Fate.LEAVE)
        try:
            async with asyncio.timeout(None if fate is Fate.LOSE else PATIENCE_S):
                response = await self._inner.handle_async_request(request)
                try:
                    raw = await response.aread()
                finally:
                    await response.aclose()
        except TimeoutError:
            self._end(n, "left")
            raise httpx.ReadTimeout("it did not wait", request=request) from None
        self._end(n, "lost", response.status_code, raw)
        if fate is not Fate.LOSE:
            raise httpx.ReadTimeout("it did not wait", request=request)
        return _unavailable()

    async def _pass(self, request: httpx.Request, n: int, *, leaves: bool) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
            self._end(n, "got", response.status_code, raw)
            return httpx.Response(response.status_code, headers=response.headers, content=raw)
        return httpx.Response(
            response.status_code, headers=response.headers,
            stream=_Watched(self, response, n, leaves=leaves, request=request),
        )  # fmt: skip

    def _end(self, n: int, how: str, status: int = 0, raw: bytes = b"") -> None:
        self._journal.write(
            how, n=n, status=status, raw=raw.decode("utf-8", "replace"), at_s=time.time()
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Watched(httpx.AsyncByteStream):
    """A stream that is written down, and may be left in its middle."""

    def __init__(
        self, line: Line, response: httpx.Response, n: int, *, leaves: bool, request: httpx.Request
    ) -> None:
        self._line, self._response, self._n = line, response, n
        self._left_after = 1 + n % MOST_PIECES if leaves else None
        self._request = request
        self._told: list[bytes] = []
        self._done = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for count in itertools.count():
            if count == self._left_after:
                await self.aclose()
                raise httpx.ReadError("it left", request=self._request)
            piece = await self._next()
            if piece is None:
                break
            self._told.append(piece)
            yield piece
        # A client that leaves at the end has left too late.
        self._end("got")

    async def _next(self) -> bytes | None:
        if not hasattr(self, "_pieces"):
            self._pieces: Any = aiter(self._response.stream)  # type: ignore[arg-type]
        return await anext(self._pieces, None)

    def _end(self, how: str) -> None:
        if not self._done:
            self._done = True
            self._line._end(self._n, how, self._response.status_code, b"".join(self._told))

    async def aclose(self) -> None:
        """Close the connection; before the end, that is leaving."""
        self._end("left")
        await self._response.aclose()


def _unavailable() -> httpx.Response:
    return httpx.Response(503, headers=_SOON, json={"error": {"message": "lost on the way"}})
