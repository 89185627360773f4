"""The paths of the gateway, and the life of one request on each.

Owns the order of a request: session, body, translation, call, commit, last byte. Never knows a
dialect's fields or what a session does. Invariants: a reply is committed just before its last
bytes are sent, and never where its client left before; whatever goes wrong is an answer in the
dialect's shape; one request's bug is logged once and ends only that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import structlog
from starlette.routing import Route, Router

from ..bounded import in_thread
from .bodies import Bodies
from .dialects.unknown import UnknownFields
from .limits import ClientLeft, HttpLimits, HttpRefusal, generic_error
from .sse import EventStream, encode
from .types import ChatReply, ChatRequest, Delta, Dialect, ErrorKind, Exchange, Refusal
from .wire import Headers, Wire

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = structlog.get_logger("gateway")

OUTCOMES = ("ok", "refused", "failed", "left")
PREFIX = "/sessions/{key}"
_KEY = re.compile(r"[0-9a-f]{32}")
_KEY_SHOWN = 64
_PATH_SHOWN = 128
_CANCEL_S = 5.0
"""How long what a stream waits for may take to end once its client left."""
_SESSION_PATH = re.compile(r"^/sessions/[^/]*(/v1)?/")
_THREADED_TOKENS = 4096
"""Replies of so many tokens with log-probs are written in a thread."""
Call: TypeAlias = Callable[[Wire, dict[str, str]], Coroutine[Any, Any, None]]


class Session(Protocol):
    """What is asked of a session."""

    async def begin(self, request: ChatRequest) -> Exchange:
        """Begin one request."""
        ...

    def broke(self, error: Exception) -> None:
        """Take note that a request met a bug of ours."""
        ...


class Sessions(Protocol):
    """What is asked of the book of sessions."""

    def find(self, key: str) -> Session:
        """Return an open session."""
        ...

    @property
    def num_open(self) -> int:
        """Sessions that can be called."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests under way."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """What all routes share."""

    sessions: Sessions
    dialects: Sequence[Dialect]
    limits: HttpLimits
    bodies: Bodies
    outcomes: Counter[str]
    instance_id: str
    model: str

    def find(self, key: str) -> Any:
        """Return a session.

        Raises:
            Refusal: there is none, or it is closed.
        """
        if _KEY.fullmatch(key) is None:  # of any length, with anything in it
            shown = key[:_KEY_SHOWN]
            raise Refusal(ErrorKind.NOT_FOUND, f"session not found: session_id={shown}")
        return self.sessions.find(key)

    def dialect_of(self, path: str) -> Dialect | None:
        """Return whose path it is, or is below."""
        tail = _SESSION_PATH.sub("", path) + "/"
        for dialect in self.dialects:
            if any(tail.startswith(f"{known}/") for known in dialect.paths):
                return dialect
        return None


class Endpoint:
    """An ASGI app of one path: what it calls never breaks the connection."""

    def __init__(self, served: Served, call: Call, dialect: Dialect | None, *, counted: bool):
        self._served, self._call = served, call
        self._dialect, self._counted = dialect, counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        wire = Wire(scope, receive, send, self._served.limits)
        outcome = await answered(wire, self._dialect, self._call(wire, scope["path_params"]))
        if self._counted:
            self._served.outcomes[outcome] += 1


async def answered(wire: Wire, dialect: Dialect | None, call: Coroutine[Any, Any, None]) -> str:
    """Run what answers a request; return its outcome."""
    try:
        try:
            await call
            return "ok"
        except Refusal as refusal:
            # Its traceback holds this frame, and so the request, until the next collection.
            refused = refusal.with_traceback(None)
        except ClientLeft:
            return "left"
        except Exception as error:  # noqa: BLE001 - the runner of a request: one is not the server
            refused = internal(error, wire.request_id)
        await say(wire, dialect, refused)
    except ClientLeft:
        return "left"
    return outcome_of(refused)


async def say(wire: Wire, dialect: Dialect | None, refusal: Refusal) -> None:
    """Answer with an error, in the dialect's shape where there is one."""
    if wire.has_begun:  # a stream has said so itself, or could not
        return
    body = generic_error(refusal) if dialect is None else dialect.error(refusal)
    await wire.refuse(refusal, body)


def internal(error: Exception, request_id: str) -> Refusal:
    """Log a bug of ours; return what its client is told."""
    log.error("gateway_bug", request_id=request_id, exc_info=error)
    name = type(error).__name__
    return Refusal(ErrorKind.INTERNAL, f"the gateway failed ({name}); request id {request_id}")


def outcome_of(refusal: Refusal) -> str:
    """Return what an error counts as."""
    return "failed" if refusal.kind in (ErrorKind.ENGINE, ErrorKind.INTERNAL) else "refused"


class Chat:
    """The path of one dialect that asks for a reply."""

    def __init__(self, served: Served, dialect: Dialect) -> None:
        self._served, self._dialect = served, dialect
        self._unknown = UnknownFields(dialect.name)

    async def __call__(self, wire: Wire, params: dict[str, str]) -> None:
        """Serve one request.

        Raises:
            Refusal: nothing was sent, or (`has_begun`) the stream said so.
            ClientLeft: before the reply was given out.
        """
        session = self._served.find(params["key"])
        try:
            await self._serve(wire, session)
        except Refusal as refusal:
            if refusal.kind is ErrorKind.INTERNAL:
                session.broke(refusal)
            raise
        except ClientLeft:
            raise
        except Exception as error:
            session.broke(error)
            raise

    async def _serve(self, wire: Wire, session: Session) -> None:
        served, dialect = self._served, self._dialect
        async with served.bodies.reading(wire.scope, wire.receive, wire.headers) as body:
            request = await served.bodies.parse(body, lambda b: dialect.parse(b, wire.headers))
            del body
        self._unknown.tell(request.ignored)
        async with wire.watching():
            exchange = await wire.until(session.begin(request), undo=_leave)
            headers = _pinned(request)
            async with _left_unless_committed(exchange) as committed:
                if request.stream:
                    await self._stream(wire, request, exchange, headers, committed)
                else:
                    await self._reply(wire, request, exchange, headers, committed)

    async def _reply(
        self,
        wire: Wire,
        request: ChatRequest,
        exchange: Exchange,
        headers: Headers,
        committed: Callable[[], None],
    ) -> None:
        reply = await wire.until(exchange.reply())
        body = await self._written(request, reply)
        await wire.drained()
        exchange.commit()
        committed()
        await wire.answer_json(200, body, headers)

    async def _written(self, request: ChatRequest, reply: ChatReply) -> bytes:
        def write() -> bytes:
            return msgspec.json.encode(self._dialect.reply(request, reply))

        return await in_thread(write) if _is_long(request, reply) else write()

    async def _stream(
        self,
        wire: Wire,
        request: ChatRequest,
        exchange: Exchange,
        headers: Headers,
        committed: Callable[[], None],
    ) -> None:
        streamer = self._dialect.streamer(request, exchange.reply_id, time.time())
        stream = EventStream(wire, streamer, headers, self._served.limits.keepalive_s)
        try:
            async for delta in _watched(stream, exchange.deltas()):
                await stream.send(streamer.delta(delta))
            reply = await _of(stream, exchange.reply())
            if _is_long(request, reply):
                await stream.send(())  # so that nothing but `end` writes meanwhile
                last = await _of(stream, in_thread(lambda: encode(streamer.end(reply))))
            else:
                last = encode(streamer.end(reply))
                await stream.send(())
            await wire.drained()
            exchange.commit()
            committed()
            await stream.end_with(last)
        except Refusal as refusal:
            if stream.is_open:
                await stream.fail(refusal)
            raise
        except ClientLeft:
            raise
        except Exception as error:
            if not stream.is_open:
                raise
            broken = internal(error, wire.request_id)
            await stream.fail(broken)
            raise broken from error


class Count:
    """The path of a dialect that counts a prompt's tokens and calls no engine."""

    def __init__(
        self, served: Served, count: Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> None:
        self._served, self._count = served, count

    async def __call__(self, wire: Wire, params: dict[str, str]) -> None:
        """Serve one request."""
        served = self._served
        session = served.find(params["key"])
        async with served.bodies.reading(wire.scope, wire.receive, wire.headers) as body:
            asked = await served.bodies.parse(body, dict)
        async with wire.watching():
            counted = await wire.until(_awaited(self._count(session, asked)))
        await wire.answer_json(200, counted)


def _is_long(request: ChatRequest, reply: ChatReply) -> bool:
    return request.log_probs and len(reply.ids) >= _THREADED_TOKENS


def _leave(exchange: Exchange) -> None:
    exchange.leave()


@contextlib.asynccontextmanager
async def _left_unless_committed(exchange: Exchange) -> AsyncIterator[Callable[[], None]]:
    """Leave an exchange on every way out that has not said that it committed."""
    done = False

    def committed() -> None:
        nonlocal done
        done = True

    try:
        yield committed
    finally:
        if not done:
            exchange.leave()


async def _watched(stream: EventStream, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    """Yield deltas as they come, with signs of life between them."""
    try:
        while (delta := await _of(stream, anext(deltas, None))) is not None:
            yield delta
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()


async def _of(stream: EventStream, coming: Awaitable[Any]) -> Any:
    task = asyncio.ensure_future(_awaited(coming))
    try:
        return await stream.wait(task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_S)
        if task.done() and not task.cancelled():
            task.exception()  # what broke while its client left is nobody's business


async def _awaited(coming: Any) -> Any:
    return await coming if isinstance(coming, Awaitable) else coming


def _pinned(request: ChatRequest) -> Headers:
    if not request.pinned:
        return ()
    return ((b"x-rollstream-pinned", ", ".join(request.pinned).encode("latin-1", "replace")),)


def _health(served: Served) -> Call:
    async def health(wire: Wire, _: dict[str, str]) -> None:
        sessions = served.sessions
        figures = {
            "status": "ok",
            "instance_id": served.instance_id,
            "sessions": sessions.num_open,
            "in_flight": sessions.num_in_flight,
        }
        await wire.answer_json(200, figures)

    return health


def _models(served: Served) -> Call:
    """Return what lists the one model; any name is that one, an agent calls it as it likes.

    The entries are what both OpenAI's and Anthropic's clients read.
    """

    def entry(name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "rollstream",
            "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z",
        }  # fmt: skip

    async def models(wire: Wire, params: dict[str, str]) -> None:
        served.find(params["key"])
        if "name" in params:
            await wire.answer_json(200, entry(params["name"]))
            return
        name = served.model
        ends = {"first_id": name, "last_id": name, "has_more": False}
        await wire.answer_json(200, {"object": "list", "data": [entry(name)], **ends})

    return models


class NoRoute:
    """Answers for paths and methods that are not served."""

    def __init__(self, served: Served, routes: Sequence[Route]) -> None:
        self._served, self._routes = served, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        wire = Wire(scope, receive, send, self._served.limits)
        dialect = self._served.dialect_of(scope["path"])
        if await answered(wire, dialect, self._answer(wire)) != "left":
            self._served.outcomes["refused"] += 1

    async def _answer(self, wire: Wire) -> None:
        path, method = wire.scope["path"], wire.scope["method"]
        allowed = sorted(
            {m for r in self._routes if r.path_regex.match(path) for m in r.methods or ()}
        )
        if not allowed:
            served = ", ".join(f"…/{p}" for d in self._served.dialects for p in d.paths)
            raise HttpRefusal(404, f"there is no {path[:_PATH_SHOWN]}; paths are {served}")
        allow = ((b"allow", ", ".join([*allowed, "OPTIONS"]).encode()),)
        if method == "OPTIONS":
            await wire.answer(204, b"", allow)
            return
        said = f"{method[:16]} is not served here; use {' or '.join(allowed)}"
        raise HttpRefusal(405, said, headers=allow)


def build_app(served: Served) -> Router:
    """Return the ASGI app of all paths."""
    routes = [
        Route(path, Endpoint(served, _health(served), None, counted=False), methods=["GET"])
        for path in ("/healthz", "/health")
    ]
    for version in ("/v1", ""):
        under = f"{PREFIX}{version}"
        models = Endpoint(served, _models(served), None, counted=False)
        routes += [
            Route(f"{under}/models", models, methods=["GET"]),
            Route(f"{under}/models/{{name:path}}", models, methods=["GET"]),
        ]
        for dialect in served.dialects:
            chat = Endpoint(served, Chat(served, dialect), dialect, counted=True)
            count = getattr(dialect, "count", None)
            for path in dialect.paths:
                routes.append(Route(f"{under}/{path}", chat, methods=["POST"]))
                if count is not None:
                    counting = Endpoint(served, Count(served, count), dialect, counted=False)
                    routes.append(Route(f"{under}/{path}/count_tokens", counting, methods=["POST"]))
    nowhere = NoRoute(served, tuple(routes))
    # Behind all others it also takes the methods that they do not.
    rest = Route("/{rest:path}", nowhere)
    return Router([*routes, rest], redirect_slashes=False, default=nowhere)
