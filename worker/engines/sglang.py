"""Talks to one SGLang server (or router): token ids in, token ids out.

Owns the HTTP of one engine: one `/generate` per call, the abort of what nobody waits for any more,
and the probe. Never retries and never chooses an engine: that is the pool's. Invariant: whatever
ends a call other than its reply (timeout, cancellation), the engine is told to stop sampling.

The transport is called directly, and a body is joined when it is written and dropped then: a
request in flight holds neither its bytes nor a reference cycle (docs/engines.md, "Cost").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from rollstream.errors import ConfigError, EngineFault
from rollstream.sample import UNKNOWN_VERSION

from ..sampling import Sampling
from ..types import Completion, Finish, RequestIds
from .faults import Detail, detail_of_status, fault
from .replay import Asked, ReplayShape
from .reply import UNREADABLE, error_text, read_reply, read_version
from .request import ROUTING_HEADER, TAIL, RequestWriter, body_bytes, body_length
from .wire_log import WireLog

MAX_REPLY_BYTES = 64 << 20
"""A body beyond it is no reply (128k tokens with log-probs are 5 MB), and would fill the memory."""
KEEPALIVE_S = 4.0
"""Below the 5 s after which SGLang's web server closes an idle connection: reusing one that is
being closed looks like a reset, and a POST must not be repeated blindly."""


def new_transport() -> AiohttpTransport:
    """Return a transport without a cap on connections; engines bound what they run."""
    return AiohttpTransport(
        client=lambda: aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    )


class _Body(httpx.AsyncByteStream):
    """A request's body, joined only when it is written.

    Attributes:
        sent: the pieces that were joined; empty before.
    """

    def __init__(self, head: bytes, pieces: Sequence[bytes]) -> None:
        self._parts: tuple[bytes, Sequence[bytes]] | None = (head, pieces)
        self.sent: tuple[bytes, ...] = ()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._parts is None:
            raise httpx.StreamConsumed
        head, pieces = self._parts
        self._parts, self.sent = None, tuple(pieces)
        yield b"".join((head, b",".join(self.sent), TAIL))


class ModelInfo(msgspec.Struct):
    """What `/model_info` says, as far as we ask."""

    model_path: str = ""
    weight_version: str | int | None = None


class _Patience:
    """One call's timer: when it runs out, the engine is told to stop, and its reply awaited."""

    __slots__ = ("_client", "_rid", "over")

    def __init__(self, client: SglangClient, rid: str) -> None:
        self._client, self._rid, self.over = client, rid, False

    def end(self) -> None:
        self.over = True
        self._client.abort_soon(self._rid)


class SglangClient:
    """One engine, by its base URL.

    Attributes:
        url: without a slash at the end.
        aborts: how many aborts were sent.
        failed_aborts: how many of them the engine did not take.
    """

    def __init__(
        self,
        url: str,
        transport: AiohttpTransport,
        *,
        max_token_id: int,
        connect_timeout_s: float,
        abort_wait_s: float,
        wire_log: WireLog | None = None,
        replay: ReplayShape | None = None,
    ) -> None:
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"engine.urls: {url!r}: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(f"engine.urls: {url!r} is not http://host:port or https://host:port")
        self.url = url.rstrip("/")
        self.aborts = self.failed_aborts = 0
        self._transport = transport
        self._generate_url = httpx.URL(f"{self.url}/generate")
        self._max_token_id = max_token_id
        self._abort_wait_s = abort_wait_s
        self._writer = RequestWriter()
        self._wire_log, self._replay = wire_log, replay
        self._extensions = {"timeout": {"connect": connect_timeout_s, "read": None, "pool": None}}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._closed = False

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        rid: str,
        routing_key: str,
        version: int,
        timeout_s: float,
        salt: int = UNKNOWN_VERSION,
        limit_s: float = float("inf"),
    ) -> Completion:
        """Sample a continuation of `prompt` in one try.

        Args:
            prompt: all ids held so far.
            sampling: the effective parameters.
            rid: of this try.
            routing_key: sent in the body and, for routers, in a header.
            version: the weight version current at dispatch.
            timeout_s: after so long the engine is told to stop.
            salt: the weight version that the prefix cache is salted with.
            limit_s: not even the reply to that abort is awaited beyond it.

        Raises:
            EngineFault: by the table in `faults`.
        """
        asked = self._asked(prompt)
        head = self._writer.head(
            sampling, rid=rid, routing_key=routing_key, salt=salt, replay=asked
        )
        request, body = self._request(head, prompt, routing_key)
        num_prompt, witness = prompt.num_tokens, prompt.witness
        if self._wire_log is not None:
            await self._wire_log.keep(rid, "req", body_bytes(head, prompt))
        del head, prompt
        patience = _Patience(self, rid)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_s, patience.end)
        try:
            async with asyncio.timeout(min(timeout_s + self._abort_wait_s, limit_s)):
                status, raw = await self._send(request, _longest_reply(asked, num_prompt, sampling))
        except TimeoutError:
            if not patience.over:
                self.abort_soon(rid)
            raise fault(Detail.TIMEOUT, f"{self.url}: no reply within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.abort_soon(rid)
            raise
        finally:
            timer.cancel()
        if self._wire_log is not None:
            await self._wire_log.keep(rid, "rep", raw)
        completion = read_reply(
            status,
            raw,
            rid=rid,
            engine=self.url,
            num_prompt=num_prompt,
            version=version,
            max_token_id=self._max_token_id,
            max_new_tokens=sampling.max_new_tokens,
            replay=asked,
        )
        if witness is not None:
            witness.add(body.sent, completion)
        if patience.over and completion.finish is Finish.ABORT:
            raise fault(Detail.TIMEOUT, f"{self.url}: aborted after {timeout_s:g} s")
        return completion

    def _asked(self, prompt: RequestIds) -> Asked | None:
        if prompt.replay_start is None:
            return None
        if self._replay is None:
            raise fault(
                Detail.REFUSED,
                "replay rows were asked for (replay_start), but their shape is not known here: set "
                "engine.routed_experts, or leave replay off",
            )
        return Asked(self._replay, prompt.replay_start)

    def _request(
        self, head: bytes, prompt: RequestIds, routing_key: str
    ) -> tuple[httpx.Request, _Body]:
        headers = {
            "content-type": "application/json",
            "content-length": str(body_length(head, prompt.pieces)),
            ROUTING_HEADER: _header_value(routing_key),
        }
        body = _Body(head, prompt.pieces)
        request = httpx.Request(
            "POST",
            self._generate_url,
            headers=headers,
            stream=body,
            extensions=self._extensions,
        )
        return request, body

    async def _send(
        self, request: httpx.Request, max_bytes: int = MAX_REPLY_BYTES
    ) -> tuple[int, bytes]:
        """Return status and whole body; half a body is a fault, never an answer."""
        if self._closed:
            raise fault(Detail.NO_ENGINE, f"{self.url}: the client is closed")
        try:
            response: httpx.Response = await self._transport.handle_async_request(request)
            try:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                chunks, num_bytes = [], 0
                async for chunk in response.stream:
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        raise fault(
                            Detail.BAD_REPLY,
                            f"{self.url}: the body is larger than {max_bytes} bytes",
                        )
            finally:
                await response.aclose()
        except (httpx.TransportError, aiohttp.ClientError, OSError) as error:
            raise _transport_fault(self.url, error) from None
        return response.status_code, chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def score(self, body: bytes, *, timeout_s: float) -> bytes:
        """Return the raw answer to a `/generate` that samples nothing; never tried again.

        Raises:
            EngineFault: no answer in time, or another status than 200.
        """
        status, raw = await self._ask("POST", "/generate", body, limit_s=timeout_s)
        if status != 200:
            text = error_text(raw)
            raise fault(detail_of_status(status, text), f"{self.url} answered {status}: {text}")
        return raw

    async def abort(self, rid: str) -> bool:
        """Tell the engine to stop a request; return whether it took that. Bounded, never raises.

        SGLang answers nothing about whether it knew the request: one that ended meanwhile is fine.
        """
        self.aborts += 1
        try:
            status, _ = await self._ask("POST", "/abort_request", b'{"rid":"%b"}' % rid.encode())
        except EngineFault:
            status = 0
        if status != 200:
            self.failed_aborts += 1
        return status == 200

    def abort_soon(self, rid: str) -> None:
        """Abort in the background, for callers that cannot wait; nothing once it is closed."""
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self.abort(rid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def model_info(self) -> ModelInfo:
        """Ask the engine whether it is there, and what it serves.

        `/model_info` rather than `/health`: a paused engine answers it at once.

        Raises:
            EngineFault: it did not answer, or not with 200.
        """
        status, raw = await self._ask("GET", "/model_info")
        if status != 200:
            text = error_text(raw)
            raise fault(detail_of_status(status, text), f"{self.url}/model_info: {status}: {text}")
        try:
            return msgspec.json.decode(raw, type=ModelInfo)
        except UNREADABLE as error:
            raise fault(Detail.BAD_REPLY, f"{self.url}/model_info: {error}") from None

    async def weight_version(self, dispatched: int) -> int:
        """Return the version that the engine says it serves now."""
        return read_version((await self.model_info()).weight_version, dispatched)

    async def _ask(
        self, method: str, path: str, body: bytes = b"", *, limit_s: float | None = None
    ) -> tuple[int, bytes]:
        request = httpx.Request(
            method,
            self.url + path,
            headers={"content-type": "application/json"},
            content=body,
            extensions=self._extensions,
        )
        if limit_s is None:
            limit_s = max(self._abort_wait_s, self._extensions["timeout"]["connect"] or 0.0)
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(request)
        except TimeoutError:
            raise fault(Detail.TIMEOUT, f"{self.url}{path}: no answer in {limit_s:g} s") from None

    async def aclose(self) -> None:
        """Let aborts that are on their way go out (bounded by their own limit)."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._closed = True


def _longest_reply(asked: Asked | None, num_prompt: int, sampling: Sampling) -> int:
    """Return how large a reply may be: replay rows come on top of everything else."""
    if asked is None:
        return MAX_REPLY_BYTES
    num_tokens = num_prompt + sampling.max_new_tokens
    return MAX_REPLY_BYTES + num_tokens * asked.shape.bytes_a_token


def _header_value(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return text.encode("unicode_escape").decode()


def _transport_fault(url: str, error: Exception) -> EngineFault:
    """Tell a connection that was never made from one that was lost.

    httpx-aiohttp calls most of them ConnectTimeout; aiohttp's own error is the cause.
    """
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = f"{url}: {type(cause).__name__}: {cause}"
    if isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return fault(Detail.CONNECT, text)
    if isinstance(cause, (aiohttp.InvalidURL, httpx.UnsupportedProtocol)):
        return fault(Detail.REFUSED, text)
    return fault(Detail.RESET, text)
