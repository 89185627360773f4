"""HTTP to one MCP server, such that a request that fails costs nobody but its own caller.

Owns the connections, the limits of one answer and the reading of statuses. Never repeats a request.
Invariant: no failure of a request leaves this transport as an exception that would end the session
(the library runs every request of a session in one task group); the caller learns of it by `Fate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

from .fate import FATE, Fate, Trouble

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Of one answer, notifications that come before it included. It is read and checked on the worker's
loop, where so much takes some 30 ms."""
_MAX_ERROR_BYTES = 64 * 1024
_SIDE_S = 2.0
"""For what no caller waits for: notifications, the end of a session."""
_KEEPALIVE_S = 2.0
"""Servers close idle connections too (uvicorn after 5 s); below theirs, none is used as it ends."""
_CALL, _CANCELLED = "tools/call", "notifications/cancelled"
_NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_BUSY = (429, 503)
_REFUSED = (401, 403)


class Wire(httpx2.AsyncBaseTransport):
    """Connections of one session."""

    def __init__(self, connect_timeout_s: float, ssl_context: ssl.SSLContext) -> None:
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=32, keepalive_expiry=_KEEPALIVE_S
        )
        self._inner = httpx2.AsyncHTTPTransport(verify=ssl_context, limits=limits)
        self._connect_timeout_s = connect_timeout_s
        self._cancellations: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it; a POST that fails is answered with an error of the protocol."""
        # A call is over when its caller says so; nothing here ends it earlier.
        side = request.method == "DELETE"
        method = "" if request.method != "POST" else _method_of(request)
        side = side or method.startswith("notifications/")
        limit = _SIDE_S if side else None
        request.extensions["timeout"] = {
            "connect": min(self._connect_timeout_s, limit or self._connect_timeout_s),
            "read": limit,
            "write": limit,
            "pool": limit,
        }
        if method == _CANCELLED:
            # The library sends one message behind the other, and calls wait for their turn: a
            # server that stands still must not keep them by what it does not answer here.
            task = asyncio.create_task(self._aside(request), name="mcp-cancellation")
            self._cancellations.add(task)
            task.add_done_callback(self._cancellations.discard)
        elif side:
            await self._aside(request)
        if side:
            return httpx2.Response(202, request=request)
        if request.method != "POST":
            return await self._inner.handle_async_request(request)
        return await self._post(request, FATE.get() or Fate(), is_call=method == _CALL)

    async def aclose(self) -> None:
        """Close every connection."""
        for task in self._cancellations:
            task.cancel()
        await asyncio.gather(*self._cancellations, return_exceptions=True)
        await self._inner.aclose()

    async def _aside(self, request: httpx2.Request) -> None:
        """Send what nobody waits for; what becomes of it shows at the next call."""
        with contextlib.suppress(httpx2.TransportError):
            response = await self._inner.handle_async_request(request)
            await response.aclose()

    async def _post(self, request: httpx2.Request, fate: Fate, *, is_call: bool) -> httpx2.Response:
        # What is asked behind a call that was answered (a listing) says nothing about the call.
        not_run = Trouble.LOST if fate.was_sent and not is_call else Trouble.NOT_RUN
        try:
            response = await self._send(request, fate, is_call=is_call)
        except _NOT_CONNECTED as error:
            fate.note(not_run, f"no connection: {_words(error)}")
        except httpx2.TransportError as error:
            fate.note(Trouble.LOST, f"the connection broke: {_words(error)}")
        else:
            if response.status_code >= 400:
                return await self._refusal(request, response, fate, not_run)
            if (problem := _problem(response)) is None:
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                response.stream = _Body(response.stream, fate, is_stream=_is_stream(response))
                return response
            await response.aclose()
            fate.note(Trouble.LOST, problem)
        return _failure(request)

    async def _send(self, request: httpx2.Request, fate: Fate, *, is_call: bool) -> httpx2.Response:
        if is_call:

            async def trace(event: str, info: Mapping[str, Any]) -> None:
                if event.endswith("send_request_headers.started"):
                    fate.was_sent = True

            request.extensions["trace"] = trace
        # An answer that unpacks to a thousand times its size could not be bounded here.
        request.headers["accept-encoding"] = "identity"
        return await self._inner.handle_async_request(request)

    async def _refusal(
        self, request: httpx2.Request, response: httpx2.Response, fate: Fate, not_run: Trouble
    ) -> httpx2.Response:
        """Return an answer >= 400 that is an error of the protocol as it is; note any other."""
        status = response.status_code
        said = f"HTTP {status}"
        body = await _error_body(response)
        if status in _REFUSED:
            fate.note(Trouble.REFUSED, f"{said}: the server refuses the token, or wants one")
        elif status in _BUSY:
            fate.note(Trouble.BUSY if not_run is Trouble.NOT_RUN else not_run, said)
        elif _forgot_session(request, status, body):
            fate.note(not_run, "the server no longer knows the session")
        elif status >= 500 or body is None:
            # Nothing there takes messages: a server that is being replaced behind its proxy.
            fate.note(not_run if status in (404, 405) else Trouble.LOST, said)
        else:
            return httpx2.Response(status, json=body, request=request)
        return _failure(request)


class _Body(httpx2.AsyncByteStream):
    """The body of an answer, bounded; whatever ends it early is an error that costs one request."""

    def __init__(self, inner: httpx2.AsyncByteStream, fate: Fate, *, is_stream: bool) -> None:
        self._inner, self._fate, self._is_stream = inner, fate, is_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        try:
            async for chunk in self._inner:
                num_bytes += len(chunk)
                if num_bytes > MAX_ANSWER_BYTES:
                    said = f"the answer is larger than {MAX_ANSWER_BYTES // 1024**2} MB"
                    self._fate.note(Trouble.TOO_LARGE, said)
                    raise _ended(said, is_stream=self._is_stream)
                yield chunk
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.SSEError):
                raise
            self._fate.note(Trouble.LOST, f"the connection broke: {_words(error)}")
            if self._is_stream:
                raise  # the library may take the stream up again where the server can do that
            raise _ended(str(error), is_stream=False) from None

    async def aclose(self) -> None:
        await self._inner.aclose()


def _ended(said: str, *, is_stream: bool) -> Exception:
    """Return the error for which the library gives up the one request."""
    return httpx2.SSEError(said) if is_stream else httpx2.StreamError(said)


def _method_of(request: httpx2.Request) -> str:
    try:
        message = json.loads(request.content)
    except (ValueError, httpx2.StreamError):
        return ""
    return str(message.get("method", "")) if isinstance(message, dict) else ""


def _kind(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _is_stream(response: httpx2.Response) -> bool:
    return _kind(response) == "text/event-stream"


def _problem(response: httpx2.Response) -> str | None:
    """Return why an answer below 400 can be none of an MCP server."""
    if response.status_code in (307, 308):
        return None  # followed by the library, on the same host
    if response.status_code != 200:
        return f"HTTP {response.status_code}"
    if response.headers.get("content-encoding", "identity") != "identity":
        return "the answer is compressed, which was not asked for"
    if _kind(response) not in ("application/json", "text/event-stream"):
        return f"the answer is {_kind(response)[:64] or 'nothing'}: no MCP server speaks there"
    return None


async def _error_body(response: httpx2.Response) -> dict[str, Any] | None:
    """Return the JSON of an error of the protocol; None where the body is anything else."""
    text = b""
    try:
        async for chunk in response.aiter_raw():
            text += chunk
            if len(text) > _MAX_ERROR_BYTES:
                return None
        body = json.loads(text)
    except (ValueError, RecursionError, httpx2.TransportError):
        return None
    finally:
        await response.aclose()
    match body:
        case {"error": {"code": int(), "message": str()}}:
            return dict(body)
    return None


def _forgot_session(request: httpx2.Request, status: int, body: dict[str, Any] | None) -> bool:
    """Return whether it says that this session is unknown: 404, and 400 of many servers."""
    if "mcp-session-id" not in request.headers:
        return False
    said = "" if body is None else body["error"]["message"].lower()
    return status == 404 or (status == 400 and "session" in said)


def _failure(request: httpx2.Request) -> httpx2.Response:
    """Return what makes the library give up the one request; the caller looks at its fate."""
    return httpx2.Response(500, request=request)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
