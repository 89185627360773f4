"""One reply under way, and the requests of a client that wait for it.

Owns who still waits, and what of a reply may be read when. Never calls an engine, never touches the
tree. Invariant: a reply is committed once, by whoever gives it out first, however many requests
stand for it; one that nobody waits for is given up, and so is its engine call.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from rollstream.errors import ContractError, StopReason

from .context import Context
from .live import Growing, LiveReply
from .placing import Place
from .tree import Node
from .types import ChatReply, ChatRequest, Delta, ErrorKind, Refusal


class Job:
    """One reply, for one request of a client or for several tries of it.

    Attributes:
        id: of the reply.
        digest: the same for the same request.
        context: the tokens; None until they are rendered.
        reply: None until it is there.
        node: None until it was given out.
        refusal: why there is none.
        num_open: requests that wait for it.
    """

    __slots__ = (
        "_changed", "_deltas", "_live", "_prepared", "_timer", "context", "created_unix_s", "cut",
        "digest", "id", "node", "num_open", "place", "refusal", "reply", "request", "task",
    )  # fmt: skip

    def __init__(self, request: ChatRequest, place: Place | None, digest: bytes) -> None:
        self.id = uuid.uuid4().hex
        self.created_unix_s = time.time()
        self.request, self.place, self.digest = request, place, digest
        self.context: Context | None = None
        self.reply: ChatReply | None = None
        self.cut: StopReason | None = None
        """The limit that cut it."""
        self.node: Node | None = None
        self.refusal: Refusal | None = None
        self.num_open = 0
        self.task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._prepared = False
        self._deltas: list[Delta] = []
        self._live: LiveReply | None = None
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the reply is there, or never will be."""
        return self.reply is not None or self.refusal is not None

    @property
    def deltas(self) -> list[Delta]:
        """What of the reply may be read."""
        return self._deltas if self._live is None else self._live.deltas

    def read_along(self, grow: Callable[[], Growing]) -> LiveReply:
        """Begin to keep the reply in pieces, and return what is told of them."""
        self._live = LiveReply(grow, self.tell)
        return self._live

    def prepared(self) -> None:
        """Note that nothing is wrong with the request: its call is made."""
        self._prepared = True
        self.tell()

    def end(self, reply: ChatReply) -> None:
        """Note the reply."""
        self.reply = reply
        self._settle()

    def fail(self, refusal: Refusal) -> None:
        """Note that there is none; of a reply that is there, that it is not given out any more."""
        if self.refusal is None:
            # Without the frames that it came through, which hold this job.
            self.refusal = _again(refusal)
            self._settle()

    def tell(self) -> None:
        """Wake whoever waits for news."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until_prepared(self) -> None:
        """Return once the request was looked at.

        Raises:
            Refusal: something is wrong with it.
        """
        while not self._prepared and not self.is_over:
            await self._changed.wait()
        self.check()

    async def until_over(self) -> ChatReply:
        """Return the reply once it is there.

        Raises:
            Refusal: there is none.
        """
        while not self.is_over:
            await self._changed.wait()
        self.check()
        assert self.reply is not None
        return self.reply

    async def until_news(self) -> None:
        """Return once there is something new."""
        await self._changed.wait()

    def read(self, count: int) -> None:
        """Note that the first `count` deltas were read."""
        if self._live is not None:
            self._live.num_read = max(self._live.num_read, count)

    def check(self) -> None:
        """Raise why there is no reply, where there is none: a new error for everybody who asks.

        Raises:
            Refusal: so.
        """
        if self.refusal is not None:
            raise _again(self.refusal)

    def start_timer(self, delay_s: float, then: Callable[[Job], None]) -> None:
        """Have `then` called with this job, unless `stop_timer` comes first."""
        self.stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, then, self)

    def stop_timer(self) -> None:
        """Have nothing called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        """Keep what may be read, and let go of what made it."""
        if self._live is not None:
            self._deltas, self._live = self._live.deltas, None
        self.tell()


class Owner(Protocol):
    """Whom an exchange tells how it ended (the session)."""

    def commit(self, job: Job) -> None:
        """Make the reply part of the conversation; once.

        Raises:
            Refusal: the session was closed.
        """
        ...

    def left(self, job: Job, *, streamed: bool) -> None:
        """Take note that one fewer waits for the reply."""
        ...

    def whole(self, job: Job) -> list[Delta]:
        """Return a reply that is there as deltas."""
        ...


class SessionExchange:
    """One request of a client under way (`types.Exchange`)."""

    __slots__ = ("_is_open", "_job", "_owner", "_streams")

    def __init__(self, owner: Owner, job: Job, *, streams: bool) -> None:
        self._owner, self._job, self._streams = owner, job, streams
        self._is_open = True
        job.num_open += 1

    @property
    def reply_id(self) -> str:
        """Id that the reply will have."""
        return self._job.id if self._job.reply is None else self._job.reply.id

    async def prepared(self) -> None:
        """Return once the request was looked at.

        Raises:
            Refusal: something is wrong with it.
        """
        await self._job.until_prepared()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the reply as it is sampled; ends once all of it was yielded.

        Raises:
            Refusal: it broke.
        """
        job, at = self._job, 0
        while True:
            deltas = job.deltas
            while at < len(deltas):
                at += 1
                job.read(at)
                yield deltas[at - 1]
            job.check()
            if job.is_over:
                break
            await job.until_news()
        if at == 0:  # it was asked for without a stream, or is an earlier one
            for delta in self._owner.whole(job):
                yield delta

    async def reply(self) -> ChatReply:
        """Return the whole reply, as soon as it is there; not committed yet.

        Raises:
            Refusal: there is none.
        """
        return await self._job.until_over()

    def commit(self) -> None:
        """Make the reply part of the conversation: called just before its last byte is given out.

        Raises:
            Refusal: the session was closed meanwhile.
        """
        if not self._is_open:
            return
        if self._job.reply is None:
            self._job.check()
            raise ContractError("a reply is committed before it is there")
        self._is_open = False
        self._job.num_open -= 1
        self._owner.commit(self._job)

    def leave(self) -> None:
        """End without a commit: the client is gone before its reply was given out."""
        if not self._is_open:
            return
        self._is_open = False
        self._job.num_open -= 1
        self._owner.left(self._job, streamed=self._streams)


def closed() -> Refusal:
    """Return what a client of a closed session is told."""
    return Refusal(ErrorKind.GONE, "the session is closed; its sample is complete")


def _again(refusal: Refusal) -> Refusal:
    return Refusal(refusal.kind, refusal.message, param=refusal.param)
