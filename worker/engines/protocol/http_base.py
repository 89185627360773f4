"""The HTTP of one engine, whatever protocol it speaks: one try, its timer, its abort, its record.

Owns the transport, how a body is written and read, the time that a call may take, and what a lost
connection is called. Never retries and never chooses an engine: that is the pool's; the words of a
protocol are its client's. Invariant: whatever ends a call other than its reply (timeout,
cancellation), the engine is told to stop sampling. A call with a sink is streamed (`streams`), and
returns the very same.

The transport is called directly, and a body is joined when it is written and dropped then: a
request in flight holds neither its bytes nor a reference cycle (docs/engines.md, "Cost").
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rollstream.errors import ConfigError, ContractError, EngineFault
from rollstream.sample import UNKNOWN_VERSION

from ...sampling import Sampling
from ...types import Completion, Finish, RequestIds, TokenSink
from ..client import Extension, Look
from ..faults import Detail, detail_of_status, fault, rule_of
from .checks import error_text
from .connections import LineConnector, LineTransport
from .replay import Asked, ReplayShape
from .request import TAIL, body_bytes, body_length
from .streams import Joiner, StreamedReply, is_stream
from .versions import VersionMap
from .wire_log import WireLog

MAX_REPLY_BYTES = 64 << 20
"""A body beyond it is no reply (128k tokens with log-probs are 5 MB), and would fill the memory."""
KEEPALIVE_S = 4.0
"""Below the 5 s after which the engines' web server (uvicorn) closes an idle connection: reusing
one that is being closed looks like a reset, and a POST must not be repeated blindly."""


def new_transport() -> AiohttpTransport:
    """Return a transport without a cap on connections; engines bound what they run."""
    return LineTransport(
        # The session has a context of its own; the transport would read all certificates for one
        # that nobody uses (75 ms a pool). This one trusts nobody.
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        client=lambda: aiohttp.ClientSession(
            connector=LineConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        ),
    )


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What every client of a pool has in common."""

    max_token_id: int
    """The highest id of the vocabulary."""
    connect_timeout_s: float = 5.0
    abort_wait_s: float = 2.0
    """How long the reply to an abort is awaited."""
    versions: VersionMap = field(default_factory=VersionMap)
    """What labels of weights mean; the pool's own, shared by its clients."""
    wire_log: WireLog | None = None
    replay: ReplayShape | None = None
    lora_path: str = ""
    """With SGLang: the adapter of every request."""
    model: str = ""
    """With vLLM: the model's name in every request."""
    vllm_route: str = "generate"
    """With vLLM: `generate` or `completions`."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a reply is held against: one request, as far as its reply must agree with it."""

    rid: str
    engine: str
    num_prompt: int
    version: int
    """The weight version current at dispatch."""
    max_new_tokens: int
    replay: Asked | None


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


class _Patience:
    """One call's timer: when it runs out, the engine is told to stop, and its reply awaited.

    Attributes:
        over: the engine was told to stop.
        bound: the end of all waiting, the reply to the abort included.
    """

    __slots__ = ("_client", "_extend", "_has_ended", "_question", "_rid", "_timer", "bound", "over")

    def __init__(
        self, client: HttpClient, rid: str, bound: asyncio.Timeout, extend: Extension | None
    ) -> None:
        self._client, self._rid, self._extend, self.bound = client, rid, extend, bound
        self.over = self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._question: asyncio.Task[float] | None = None

    def start(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def stop(self) -> None:
        """End with the call: nobody is asked, and nothing aborted, for what has its reply."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._question is not None:
            self._question.cancel()

    def _run_out(self) -> None:
        if self._extend is None:
            self._end()
        else:
            self._question = asyncio.get_running_loop().create_task(self._ask(self._extend))
            self._question.add_done_callback(self._answered)

    async def _ask(self, extend: Extension) -> float:
        """Let whoever knows say how much longer; no answer is no reason to wait."""
        try:
            async with asyncio.timeout(self._client.answer_limit_s):
                return await extend()
        except (TimeoutError, EngineFault):
            return 0.0

    def _answered(self, question: asyncio.Task[float]) -> None:
        self._question = None
        if question.cancelled() or self._has_ended:
            return
        error = question.exception()
        if error is not None:  # a bug of whoever was asked, which must not keep the call for ever
            message = f"patience with {self._client.url} could not be extended"
            asyncio.get_running_loop().call_exception_handler(
                {"message": message, "exception": error}
            )
        more = 0.0 if error is not None else question.result()
        if more > 0:
            self.start(more)
        else:
            self._end()

    def _end(self) -> None:
        self.over = True
        self._client.abort_soon(self._rid)
        end = asyncio.get_running_loop().time() + self._client.abort_wait_s
        when = self.bound.when()
        if when is None or end < when:
            self.bound.reschedule(end)


class HttpClient(ABC):
    """One engine, by its base URL; protocols say how it is asked and what its answers mean.

    Attributes:
        url: without a slash at the end.
        aborts: how many aborts were sent.
        failed_aborts: how many of them the engine did not take.
        abort_wait_s: how long the reply to an abort is awaited.
        answer_limit_s: how long anything but a generation may take.
    """

    def __init__(
        self, url: str, transport: AiohttpTransport, options: ClientOptions, *, path: str
    ) -> None:
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"engine.urls: {url!r}: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(f"engine.urls: {url!r} is not http://host:port or https://host:port")
        self.url = url.rstrip("/")
        self.aborts = self.failed_aborts = 0
        self.abort_wait_s = options.abort_wait_s
        self.answer_limit_s = max(options.abort_wait_s, options.connect_timeout_s)
        self._options, self._transport = options, transport
        self._generate_url = httpx.URL(self.url + path)
        self._wire_log = options.wire_log
        self._extensions = {
            "timeout": {"connect": options.connect_timeout_s, "read": None, "pool": None}
        }
        self._tasks: set[asyncio.Task[bool]] = set()
        self._closed = False

    # --- what a protocol says --------------------------------------------------------------------
    @abstractmethod
    def _head(
        self, sampling: Sampling, sent: Sent, *, routing_key: str, salt: int, streams: bool
    ) -> bytes:
        """Return the request's body in front of the ids; it may ask for a stream."""

    @abstractmethod
    def _joiner(self, sent: Sent) -> Joiner | None:
        """Return what reads a streamed reply; None where this one cannot be streamed."""

    @abstractmethod
    def _headers(self, sent: Sent, routing_key: str) -> dict[str, str]:
        """Return the protocol's own headers: routers keep calls together by one."""

    @abstractmethod
    def _read(self, status: int, raw: bytes, sent: Sent) -> Completion:
        """Return what the engine answered, validated; one synchronous function per reply."""

    @abstractmethod
    async def _abort(self, rid: str) -> int:
        """Post the abort of one request and return the HTTP status."""

    @abstractmethod
    async def look(self) -> Look:
        """Ask the engine whether it is there, without loading it."""

    @abstractmethod
    async def score(self, body: bytes, *, timeout_s: float) -> bytes:
        """Return the raw answer to a request that samples nothing."""

    # --- what is the same for all ----------------------------------------------------------------
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
        extend: Extension | None = None,
    ) -> Completion:
        """Sample a continuation of `prompt` in one try.

        Args:
            prompt: all ids held so far; its sink is passed what is sampled (`begin` is the pool's).
            sampling: the effective parameters.
            rid: of this try.
            routing_key: sent with the request, for routers.
            version: the weight version current at dispatch.
            timeout_s: after so long the engine is told to stop.
            salt: the weight version that the prefix cache is salted with.
            limit_s: not even the reply to that abort is awaited beyond it.
            extend: asked when the time runs out, before the engine is told to stop: how many
                seconds more this call has (a paused engine's time does not count). 0 is none.

        Raises:
            EngineFault: by the table in `faults`.
            ContractError: no prompt, or no budget.
        """
        if sampling.max_new_tokens < 1 or prompt.num_tokens < 1:
            raise ContractError(
                f"a request of {prompt.num_tokens} ids for {sampling.max_new_tokens} more is never "
                "sent: budgets are looked at first"
            )
        sent = Sent(
            rid,
            self.url,
            prompt.num_tokens,
            version,
            sampling.max_new_tokens,
            self._asked(prompt),
        )
        witness, sink = prompt.witness, prompt.sink
        stream = None if sink is None else self._stream(sink, sent)
        head = self._head(
            sampling, sent, routing_key=routing_key, salt=salt, streams=stream is not None
        )
        request, body = self._request(head, prompt, sent, routing_key)
        if self._wire_log is not None:
            await self._wire_log.keep(rid, "req", body_bytes(head, prompt))
        del head, prompt
        bound = asyncio.timeout(None if limit_s == float("inf") else limit_s)
        patience = _Patience(self, rid, bound, extend)
        try:
            async with bound:
                patience.start(timeout_s)
                status, raw = await self._send(request, _longest_reply(sent), stream)
        except TimeoutError:
            if not patience.over:
                self.abort_soon(rid)
            raise fault(Detail.TIMEOUT, f"{self.url}: no reply within {timeout_s:g} s") from None
        except EngineFault as error:
            if stream is not None and stream.is_open and not rule_of(error).stop_first:
                self.abort_soon(rid)  # nobody else does for what was wrong before its end
            raise
        except BaseException:
            self.abort_soon(rid)
            raise
        finally:
            patience.stop()
        if self._wire_log is not None:
            await self._wire_log.keep(rid, "rep", raw)
        completion = self._read(status, raw, sent)
        num_passed = 0 if stream is None else stream.check(completion)
        completion.dispatched_version = version
        if witness is not None:
            witness.add(body.sent, completion)
        if patience.over and completion.finish is Finish.ABORT:
            raise fault(Detail.TIMEOUT, f"{self.url}: aborted after {timeout_s:g} s")
        if sink is not None and num_passed < len(completion.ids):
            sink.add(completion.ids[num_passed:])
        return completion

    def _stream(self, sink: TokenSink, sent: Sent) -> StreamedReply | None:
        joiner = self._joiner(sent)
        if joiner is None:
            return None
        return StreamedReply(
            joiner,
            sink,
            sent,
            max_token_id=self._options.max_token_id,
            max_bytes=_longest_reply(sent),
        )

    def _asked(self, prompt: RequestIds) -> Asked | None:
        if prompt.replay_start is None:
            return None
        if self._options.replay is None:
            raise fault(
                Detail.REFUSED,
                "replay rows were asked for (replay_start), but their shape is not known here: set "
                "engine.routed_experts, or leave replay off",
            )
        return Asked(self._options.replay, prompt.replay_start)

    def _request(
        self, head: bytes, prompt: RequestIds, sent: Sent, routing_key: str
    ) -> tuple[httpx.Request, _Body]:
        headers = {
            "content-type": "application/json",
            "content-length": str(body_length(head, prompt.pieces)),
            **self._headers(sent, routing_key),
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
        self,
        request: httpx.Request,
        max_bytes: int = MAX_REPLY_BYTES,
        stream: StreamedReply | None = None,
    ) -> tuple[int, bytes]:
        """Return status and whole body; half a body is a fault, never an answer.

        With `stream` it is made of events, where they come: an error, and the reply of a server
        that does not stream, come as one body all the same.
        """
        if self._closed:
            raise fault(Detail.NO_ENGINE, f"{self.url}: the client is closed")
        try:
            response: httpx.Response = await self._transport.handle_async_request(request)
            try:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                if stream is not None and is_stream(response):
                    return 200, await stream.read(aiter(response.stream))
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

    async def abort(self, rid: str) -> bool:
        """Tell the engine to stop a request; return whether it took that. Bounded, never raises.

        No protocol says whether the engine knew the request: one that ended meanwhile is fine.
        """
        self.aborts += 1
        try:
            status = await self._abort(rid)
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

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, limit_s: float | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of a request that is no generation.

        Raises:
            EngineFault: no connection, or no answer in time.
        """
        request = httpx.Request(
            method,
            self.url + path,
            headers={"content-type": "application/json"},
            content=body,
            extensions=self._extensions,
        )
        limit_s = self.answer_limit_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(request)
        except TimeoutError:
            raise fault(Detail.TIMEOUT, f"{self.url}{path}: no answer in {limit_s:g} s") from None

    def refusal(self, path: str, status: int, raw: bytes) -> EngineFault:
        """Return the fault of an answer other than 200."""
        text = error_text(raw)
        return fault(detail_of_status(status, text), f"{self.url}{path} answered {status}: {text}")

    async def aclose(self) -> None:
        """Let aborts that are on their way go out (bounded by their own limit)."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._closed = True


def header_value(text: str) -> str:
    """Return `text` as a header can carry it."""
    if text.isascii() and text.isprintable():
        return text
    return text.encode("unicode_escape").decode()


def _longest_reply(sent: Sent) -> int:
    """Return how large a reply may be: replay rows come on top of everything else."""
    if sent.replay is None:
        return MAX_REPLY_BYTES
    num_tokens = sent.num_prompt + sent.max_new_tokens
    return MAX_REPLY_BYTES + num_tokens * sent.replay.shape.bytes_a_token


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
