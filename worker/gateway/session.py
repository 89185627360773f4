"""One agent's calls, from attach to commit, and what becomes of them as samples.

Owns the session of one attempt of one sample: its tree, the requests under way, their tries, and
its end. Knows no HTTP and no dialect; never renders by itself. Invariant: a reply is in the tree
exactly when it was given out; whatever is refused, breaks, or is left changes nothing; behind
`close` no engine call is made and the sample never changes.

How it is used (server: begin … leave; the generate function `agent`: the rest):

    session = book.open(given, SessionRules(prompter=Prompter(renderer)))
    exchange = await session.begin(request)     # a Refusal: what the client is told
    async for delta in exchange.deltas(): …     # where the client reads along
    reply = await exchange.reply()
    exchange.commit()                           # just before the last byte; else exchange.leave()
    await session.close()                       # once the agent is done with, however
    samples = await session.collect()           # Sample | list[Sample]; the same each time
    session.fault, session.ended_by             # why the agent may have ended badly
    session.stats                               # counts; they stand in metadata["agent"] already

A request passes three gates: it is attached to a node when it arrives (`placing`), its prompt is
rendered and has room for a token (`answering`, `calling`), and when its reply is given out a node
is appended behind the one that it was attached to. Nodes are never removed, so what others
committed meanwhile makes it a branch and never an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import structlog

from rollstream.errors import (
    STATUS_OF,
    ContractError,
    EngineFault,
    EnvFault,
    StopReason,
    Withheld,
)
from rollstream.group import Trajectory

from ..functions import describe
from ..types import DivergencePolicy, GenerateInput
from .answering import Answers
from .calling import Caller, NoRoom, Stats
from .collect import assemble
from .exchange import Job, SessionExchange, closed
from .picker import Picked, drop_retries
from .placing import Limited, Line, Place, Places
from .rules import SessionRules as SessionRules
from .tree import Echo, Node, Tree
from .troubles import Troubles
from .types import STATUS, ChatRequest, Delta, ErrorKind, Refusal

CLOSE_S = 10.0
"""How long calls may take to stop."""
MAX_NOTED = 1000
"""Divergences that are listed one by one in a sample's metadata."""
log = structlog.get_logger("gateway")


class Session:
    """One attempt of one sample.

    Attributes:
        key: names it in its URL.
        over: set once the sample begins anew whatever its agent still does.
    """

    def __init__(
        self,
        key: str,
        given: GenerateInput,
        rules: SessionRules,
        on_closed: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Begin without a call; `on_closed` is told the key, once."""
        self.key, self._given, self._rules = key, given, rules
        self._on_closed = on_closed
        self._tree = Tree(rules.matcher)
        self._places = Places(self._tree, rules)
        self._answers = Answers(given, rules.prompter)
        self._stats = Stats()
        self._caller = Caller(given, self._stats)
        self._jobs: set[Job] = set()
        """Under way, or there and not given out yet."""
        self._tries: dict[bytes, Job | Node] = {}
        """The last request of each digest, for its retries."""
        self._tasks: set[asyncio.Task[None]] = set()
        """All that run, those that were told to stop too."""
        self._divergences: list[dict[str, Any]] = []
        self._troubles = Troubles()
        self.over = asyncio.Event()
        self._limit: StopReason | None = None
        self._closed = False
        self._collecting = asyncio.Lock()
        self._collected: Trajectory | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests under way; a reply that waits for its retry is one."""
        return sum(max(1, job.num_open) for job in self._jobs)

    @property
    def fault(self) -> EngineFault | EnvFault | None:
        """What broke a request and was not made good since: infrastructure, or a bug of ours."""
        return self._troubles.newest

    @property
    def ended_by(self) -> StopReason | None:
        """The limit that refused the last request, or cut the newest reply; None for neither.

        `abort_weights` where the weights change and what is stopped begins anew.
        """
        if self.over.is_set():
            return StopReason.ABORT_WEIGHTS
        if self._limit is not None:
            return self._limit
        newest = self._tree.newest
        return None if newest is None else newest.cut

    @property
    def refused_by(self) -> StopReason | None:
        """The limit that refused the last request; None where it had room, cut or not."""
        return self._limit

    @property
    def stats(self) -> dict[str, int]:
        """Counts so far (`calling.Stats`)."""
        return self._stats.to_dict()

    # --- requests --------------------------------------------------------------------------------
    async def begin(self, request: ChatRequest) -> SessionExchange:
        """Begin one request: attached, rendered, with room for a token.

        Raises:
            Refusal: why it is not answered.
        """
        self._stats.requests += 1
        try:
            job = await self._job_of(request)
        except RecursionError:
            self._stats.refused += 1
            raise _too_deep() from None
        except Refusal as refusal:
            self._note_refusal(refusal)
            raise
        except Exception as error:
            self._stats.failed += 1
            self.broke(error)
            raise
        exchange = SessionExchange(self, job, streams=request.stream)
        try:
            await exchange.prepared()
        except BaseException:
            exchange.leave()
            raise
        return exchange

    def broke(self, error: Exception) -> None:
        """Take note that a request met a bug of ours, here or in front of the session.

        Its sample is tried again, whatever the agent makes of the answer.
        """
        self._troubles.note_bug(EnvFault(f"the gateway failed: {describe(error)}", retryable=True))

    async def count(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a request has; nothing is called or kept.

        Of messages that end with a reply of this session: those up to its end.

        Raises:
            Refusal: as for `begin`.
        """
        self._check_open()
        echo = Echo(request.messages)
        try:
            tools_key = self._rules.prompter.tools_key(request.tools)
            known = None if request.continues else self._places.known(echo, tools_key)
            if known is not None:
                return known.context.num_tokens
            place = self._places.of(request, echo, tools_key)
        except RecursionError:
            raise _too_deep() from None
        return (await self._answers.render(request, place)).num_tokens

    async def _job_of(self, request: ChatRequest) -> Job:
        """Return the job that answers a request: a new one, or that of an earlier try.

        It waits for nothing unless what it returns is there already.

        Raises:
            Refusal: why there is none.
        """
        self._check_open()
        is_full = self.num_in_flight >= self._rules.max_in_flight
        is_again = request.retry > 0 or bool(request.retry_key)
        if is_full and not is_again:
            raise self._busy()
        echo = Echo(request.messages)
        tools_key = self._rules.prompter.tools_key(request.tools)
        digest = _digest(request, echo, tools_key)
        earlier = self._earlier(request, digest) if is_again else None
        if isinstance(earlier, Node):
            return await self._replayed(request, earlier, digest)
        if is_full and (earlier is None or earlier.num_open > 0):
            raise self._busy()
        if earlier is not None:
            self._stats.joined += 1
            return earlier
        place = self._places.of(request, echo, tools_key)
        self._places.check(place)
        job = Job(request, place, digest)
        self._jobs.add(job)
        self._tries[digest] = job
        job.task = asyncio.create_task(self._run(job), name=f"reply {job.id}")
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        return job

    def _earlier(self, request: ChatRequest, digest: bytes) -> Job | Node | None:
        """Return the try that a request repeats.

        Of several without a key: one that nobody waits for, since its client is gone.
        """
        if not request.retry_key:
            for job in self._jobs:
                if job.digest == digest and job.num_open == 0:
                    return job
        return self._tries.get(digest)

    async def _replayed(self, request: ChatRequest, node: Node, digest: bytes) -> Job:
        """Return a job whose reply was given out already."""
        self._stats.replayed += 1
        job = Job(request, None, digest)
        job.context, job.node = node.context, node
        reply = node.reply
        if request.log_probs:
            reply = replace(reply, pieces=await self._answers.pieces(reply.ids))
        job.end(reply)
        return job

    def _check_open(self) -> None:
        if self._closed:
            raise closed()
        if self.over.is_set():
            raise Refusal(
                ErrorKind.GONE,
                "the session is over: the model's weights are about to change, and its sample "
                "begins anew",
            )

    def _busy(self) -> Refusal:
        return Refusal(
            ErrorKind.BUSY,
            f"{self._rules.max_in_flight} requests of this session are under way; wait for one of "
            "them (gateway.max_in_flight)",
        )

    def _note_refusal(self, refusal: Refusal) -> None:
        if isinstance(refusal, Limited):
            self._limit = refusal.limit
        if STATUS[refusal.kind] >= 500:
            self._stats.failed += 1
        else:
            self._stats.refused += 1

    # --- one reply -------------------------------------------------------------------------------
    async def _run(self, job: Job) -> None:
        """Get one reply; whatever goes wrong is what its clients are told."""
        try:
            await self._sample(job)
        except Refusal as refusal:
            self._fail(job, refusal)
        except NoRoom as full:
            is_first = self._tree.newest is None and full.bound is StopReason.CONTEXT_LENGTH
            self._limit = StopReason.PROMPT_TOO_LONG if is_first else full.bound
            self._fail(job, self._answers.too_long(full))
        except Withheld as withheld:
            self.over.set()
            self._fail(job, Refusal(ErrorKind.ENGINE, str(withheld)))
        except EngineFault as fault:
            # Without the frames that it came through, which hold this session.
            assert job.place is not None
            self._troubles.note(job.place, fault.with_traceback(None))
            self._fail(job, Refusal(ErrorKind.ENGINE, f"no engine answered: {fault.message}"))
        except asyncio.CancelledError:
            self._fail(job, Refusal(ErrorKind.ENGINE, "the engine call was cancelled"))
            raise
        except Exception as error:  # the runner of a reply: one is not the session
            log.error("gateway_bug", session=self.key[:8], exc_info=error)
            self.broke(error)
            self._fail(job, Refusal(ErrorKind.INTERNAL, f"the gateway failed: {describe(error)}"))
        finally:
            job.task = None

    async def _sample(self, job: Job) -> None:
        request, place = job.request, job.place
        assert place is not None
        job.context = context = await self._answers.render(request, place)
        self._check_open()
        self._caller.check_room(context, request.max_tokens)
        self._limit = None
        live = None
        if request.stream:
            live = job.read_along(partial(self._answers.growing, context))
        job.prepared()
        sampled = await self._caller.sample(context, request.max_tokens, live)
        job.cut = sampled.cut
        reply = await self._answers.reply(
            request, context, sampled, reply_id=job.id, created_unix_s=job.created_unix_s
        )
        self._check_open()
        if live is not None:
            live.finish(reply.message)
        self._troubles.heal(place)
        job.end(reply)

    def _fail(self, job: Job, refusal: Refusal) -> None:
        """End a job without a reply."""
        if not job.is_over:
            self._note_refusal(refusal)
            job.fail(refusal)
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Forget a job that becomes no node, stop it, and count what was sampled for it."""
        if job not in self._jobs:
            return
        self._jobs.discard(job)
        if self._tries.get(job.digest) is job:
            del self._tries[job.digest]
        job.stop_timer()
        if job.context is not None:
            self._stats.dropped_tokens += job.context.num_sampled
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()  # once: its engine is told, and that must not be cut short

    # --- how an exchange ends (`exchange.Owner`) --------------------------------------------------
    def commit(self, job: Job) -> None:
        """Make a reply part of the conversation; once.

        Raises:
            Refusal: the session was closed.
        """
        if job.node is not None:
            return
        if self._closed:
            raise closed()
        place, reply, context = job.place, job.reply, job.context
        assert place is not None
        assert reply is not None
        assert context is not None
        newest, line = self._tree.newest, self._places.line(place)
        self._stats.raced += self._tree.version != place.version
        job.node = node = self._tree.add(
            place.parent,
            place.echo,
            place.start,
            replace(reply, pieces=()),
            context,
            tools=job.request.tools,
            tools_key=place.tools_key,
            cut=job.cut,
            now_unix_s=time.time(),
        )
        self._stats.committed += 1
        if self._rules.kind == "linear" and newest is not None:
            self._note_line(line, node, newest, place)
        self._jobs.discard(job)
        self._tries[job.digest] = node
        job.stop_timer()

    def _note_line(self, line: Line, node: Node, newest: Node, place: Place) -> None:
        """Note what a reply of a linear session does to the one that was newest before it."""
        parent = node.parent
        if parent is not None and parent.superseded:  # somebody goes on from it
            parent.superseded = False
            self._stats.superseded -= 1
        is_known = newest.id < place.version
        is_twin = newest.twins in (node.twins, -1 if parent is None else parent.twins)
        if line is Line.AGAIN and (is_known or is_twin):
            # An edit of a turn that its client did not know of is a line of its own.
            newest.superseded = True
            self._stats.superseded += 1
        elif line is Line.DIVERGES and is_known:
            self._stats.divergences += 1
            if len(self._divergences) < MAX_NOTED:
                policy = self._rules.on_divergence.value
                self._divergences.append(
                    {"turn": node.id, "index": place.overlap, "policy": policy, "dropped_tokens": 0}
                )

    def left(self, job: Job, *, streamed: bool) -> None:
        """Take note that one fewer waits for a reply."""
        if job.num_open > 0 or job not in self._jobs:
            return
        if streamed or self._rules.rejoin_s <= 0:
            self._abandon(job)
            return
        job.start_timer(self._rules.rejoin_s, self._abandon)

    def whole(self, job: Job) -> list[Delta]:
        """Return a reply that is there as deltas."""
        assert job.reply is not None
        assert job.context is not None
        return self._answers.growing(job.context).finish(job.reply.message)

    def _abandon(self, job: Job) -> None:
        """Give up a reply that nobody waits for."""
        if job not in self._jobs or job.num_open > 0:
            return
        self._stats.left += 1
        job.fail(Refusal(ErrorKind.GONE, "nobody waited for this reply any more"))
        self._drop(job)

    # --- the end ---------------------------------------------------------------------------------
    async def close(self) -> None:
        """End the session: calls in flight are stopped, later requests refused; again: wait."""
        if not self._closed:
            self._closed = True
            self._on_closed(self.key)
            for job in list(self._jobs):
                self._stats.left += 1
                job.fail(closed())
                self._drop(job)
        if self._tasks:
            _, running = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            if running:
                log.warning("calls_not_stopped", session=self.key[:8], count=len(running))

    async def collect(self) -> Trajectory:
        """Return what the session came to: the same objects each time.

        Raises:
            ContractError: it is not closed.
            MergeFault: `replay`: rows of an engine that do not join.
        """
        if not self._closed:
            raise ContractError("a session is collected before it is closed")
        async with self._collecting:
            if self._collected is None:
                self._collected = await self._assemble()
                self._tries.clear()
        return self._collected

    async def _assemble(self) -> Trajectory:
        picked = await self._picked()
        kept = {node.id for leaf in picked.leaves for node in leaf.path()}
        is_list = self._rules.kind == "tree" or len(picked.leaves) > 1
        samples = await assemble(self._given, self._tree, picked, is_list=is_list)
        self._stats.dropped_tokens += sum(
            node.num_sampled for node in self._tree.nodes if node.id not in kept
        )
        samples[0].metadata["agent"] = self.stats
        if self._divergences:
            samples[0].metadata["divergences"] = self._divergences
        if self.over.is_set():
            for sample in samples:
                sample.finish(StopReason.ABORT_WEIGHTS, STATUS_OF[StopReason.ABORT_WEIGHTS])
        return samples if is_list else samples[0]

    async def _picked(self) -> Picked:
        newest = self._tree.newest
        if newest is None:
            return Picked([])
        if self._rules.kind == "tree":
            return await self._rules.picker.pick(self._tree)
        if self._rules.on_divergence is not DivergencePolicy.FORK:
            return Picked([newest])
        picked = drop_retries(self._tree)
        return Picked([leaf for leaf in picked.leaves if not leaf.superseded], picked.warnings)


def _digest(request: ChatRequest, echo: Echo, tools_key: bytes) -> bytes:
    """Return what is the same for all tries of one request; its key too, where it has one."""
    words = (
        request.max_tokens, str(request.call_rule), request.max_calls, request.continues,
        request.log_probs, request.retry_key,
    )  # fmt: skip
    text = blake2b(repr(words).encode("utf-8", "surrogatepass"), digest_size=16)
    text.update(tools_key.rjust(16, b"\0"))
    text.update(echo.key(0, len(echo.messages)))
    return text.digest()


def _too_deep() -> Refusal:
    return Refusal(
        ErrorKind.INVALID, "JSON of too many levels in a message or a tool", param="messages"
    )
