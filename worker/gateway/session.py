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

A request passes three gates: it is attached to a node when it arrives (`tree`), its prompt is
rendered and has room for a token, and when its reply is given out the node is appended behind the
one that it was attached to. Nodes are never removed, so what others committed meanwhile makes it a
branch and never an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, Protocol

import numpy as np
import structlog

from rollstream.errors import STATUS_OF, ContractError, EngineFault, StopReason, Withheld
from rollstream.group import Trajectory
from rollstream.sample import Message, TokenIds

from ..functions import describe
from ..offload import call
from ..tito.tokenizer import LONG_IDS
from ..types import DivergencePolicy, Finish, GenerateInput, PromptIds
from .calling import Caller, NoRoom, Sampled, Stats
from .collect import assemble
from .context import Context
from .exchange import Job, Place, SessionExchange, closed
from .growing import GrowingReply
from .live import Growing
from .matchers import Matcher, first_difference, rendered
from .picker import DROP_RETRIES, Picked, Picker, drop_retries
from .reply import call_rule, finish_word, reply_message
from .tree import Echo, Node, Tree
from .types import STATUS, ChatReply, ChatRequest, Delta, ErrorKind, Refusal

REJOIN_S = 5.0
"""How long a request without a stream, whose client is gone, goes on for its retry."""
CLOSE_S = 10.0
"""How long calls may take to stop."""
MAX_NOTED = 1000
"""Divergences that are listed one by one in a sample's metadata."""
log = structlog.get_logger("gateway")


class Prompting(Protocol):
    """What makes prompts of messages (`prompting.Prompter`)."""

    def tools_key(self, tools: list[Message] | None) -> bytes:
        """Return what is the same for tools that mean the same."""
        ...

    async def first(self, messages: list[Message], tools: list[Message] | None) -> PromptIds:
        """Return the ids of a conversation that begins."""
        ...

    async def append(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: list[Message],
        tools: list[Message] | None,
        *,
        reply: Message | None = None,
        first_place: int = 0,
    ) -> TokenIds:
        """Return only the ids to append behind `completion`."""
        ...


@dataclass(frozen=True, slots=True)
class SessionRules:
    """What all sessions of one environment share."""

    prompter: Prompting
    kind: Literal["linear", "tree"] = "linear"
    on_divergence: DivergencePolicy = DivergencePolicy.KEEP_PREFIX
    matcher: Matcher = rendered
    picker: Picker = field(default_factory=lambda: Picker(DROP_RETRIES))
    """Of trees."""
    max_turns: int = 1024
    """Calls of one line."""
    max_in_flight: int = 32
    """Requests at once."""
    rejoin_s: float = REJOIN_S


class Line(Enum):
    """What a request of a linear session is to its newest reply."""

    GOES_ON = "goes_on"
    AGAIN = "again"
    """Its turn again, as it was or edited; or going on from an earlier try of it."""
    DIVERGES = "diverges"


class Session:
    """One attempt of one sample.

    Attributes:
        key: names it in its URL.
        fault: what broke the last request, where that was infrastructure and nothing succeeded
            since.
        over: set once its sample begins anew whatever comes: nothing is answered any more.
    """

    def __init__(
        self,
        key: str,
        given: GenerateInput,
        rules: SessionRules,
        on_closed: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.key, self._given, self._rules = key, given, rules
        self._on_closed = on_closed
        self._tree = Tree(rules.matcher)
        self._stats = Stats()
        self._caller = Caller(given, self._stats)
        self._jobs: set[Job] = set()
        """Under way, or there and not given out yet."""
        self._tries: dict[bytes, Job | Node] = {}
        """The last request of each digest, for its retries."""
        self._divergences: list[dict[str, Any]] = []
        self.fault: EngineFault | None = None
        self._limit: StopReason | None = None
        self._withheld: Withheld | None = None
        self.over = asyncio.Event()
        self._closed = False
        self._collecting = asyncio.Lock()
        self._collected: Trajectory | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests under way; a reply that waits for its retry is one."""
        return sum(max(1, job.num_open) for job in self._jobs)

    @property
    def ended_by(self) -> StopReason | None:
        """The limit that refused the last request, or cut the newest reply; None for neither.

        `abort_weights` where the weights change, and what is stopped begins anew.
        """
        if self._withheld is not None:
            return StopReason.ABORT_WEIGHTS
        if self._limit is not None:
            return self._limit
        newest = self._tree.newest
        return None if newest is None else newest.cut

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
            job = self._job_of(request)
        except Refusal as refusal:
            self._count_refusal(refusal)
            raise
        exchange = SessionExchange(self, job, streams=request.stream)
        try:
            await exchange.prepared()
        except BaseException:
            exchange.leave()
            raise
        return exchange

    async def count(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a request has; nothing is called or kept.

        Raises:
            Refusal: as for `begin`.
        """
        self._check_open()
        try:
            place = self._place_of(request, Echo(request.messages))
        except RecursionError:
            raise _too_deep() from None
        return (await self._render(request, place)).num_tokens

    def _job_of(self, request: ChatRequest) -> Job:
        """Return the job that answers a request: a new one, or that of an earlier try."""
        self._check_open()
        is_full = self.num_in_flight >= self._rules.max_in_flight
        is_again = request.retry > 0 or bool(request.retry_key)
        if is_full and not is_again:
            raise self._busy()
        echo = Echo(request.messages)
        try:
            digest = self._digest(request, echo)
            earlier = self._earlier(request, digest) if is_again else None
            if isinstance(earlier, Node):
                self._stats.replayed += 1
                return self._replayed(request, earlier, digest)
            if is_full and (earlier is None or earlier.num_open > 0):
                raise self._busy()
            if earlier is not None:
                self._stats.joined += 1
                if earlier.timer is not None:
                    earlier.timer.cancel()
                return earlier
            place = self._place_of(request, echo)
        except RecursionError:
            raise _too_deep() from None
        self._check_limits(place)
        job = Job(request, place, digest)
        self._jobs.add(job)
        self._tries[digest] = job
        job.task = asyncio.create_task(self._run(job), name=f"reply {job.id}")
        return job

    def _digest(self, request: ChatRequest, echo: Echo) -> bytes:
        """Return what is the same for all tries of one request; its key too, where it has one."""
        words = (
            request.max_tokens, request.call_rule, request.max_calls, request.continues,
            request.log_probs, request.retry_key,
        )  # fmt: skip
        text = blake2b(repr(words).encode("utf-8", "surrogatepass"), digest_size=16)
        text.update(self._rules.prompter.tools_key(request.tools))
        text.update(echo.key(0, len(echo.messages)))
        return text.digest()

    def _earlier(self, request: ChatRequest, digest: bytes) -> Job | Node | None:
        """Return the try that a request repeats.

        Of several without a key: one that nobody waits for, since its client is gone.
        """
        if not request.retry_key:
            for job in self._jobs:
                if job.digest == digest and job.num_open == 0 and job.refusal is None:
                    return job
        return self._tries.get(digest)

    def _replayed(self, request: ChatRequest, node: Node, digest: bytes) -> Job:
        """Return a job whose reply was given out already."""
        job = Job(request, None, digest)
        job.context, job.node = node.context, node
        job.prepared()
        reply = node.reply
        if request.log_probs:
            reply = replace(reply, pieces=self._given.renderer.pieces(reply.ids))
        job.end(reply)
        return job

    def _place_of(self, request: ChatRequest, echo: Echo) -> Place:
        """Return where a request stands.

        Raises:
            Refusal: it has nothing new, or continues what nobody knows.
        """
        tools_key = self._rules.prompter.tools_key(request.tools)
        if not request.messages:
            raise Refusal(ErrorKind.INVALID, "messages is empty; send at least one message",
                          param="messages")  # fmt: skip
        if request.continues:
            node = self._tree.of_reply(request.continues)
            if node is None:
                raise Refusal(
                    ErrorKind.NOT_FOUND,
                    f"this session gave no reply {request.continues[:64]!r} to go on from",
                )
            place = Place(echo, node, 0, node.num_messages, tools_key)
            if place.rewritten or node.tools_key != tools_key:
                whole = Echo([*node.conversation(), *request.messages])
                place = self._attach(whole, tools_key)
        else:
            place = self._attach(echo, tools_key)
        place.version = self._tree.version
        return place

    def _attach(self, echo: Echo, tools_key: bytes) -> Place:
        attached = self._tree.attach(echo, tools_key)
        if attached.num_known == len(echo.messages):
            raise Refusal(
                ErrorKind.INVALID,
                f"message {attached.num_known - 1} is this session's own reply and nothing follows "
                "it; add what the model is to answer",
                param="messages",
            )
        return Place(echo, attached.node, attached.num_known, attached.overlap, tools_key)

    def _check_limits(self, place: Place) -> None:
        """Check that the reply that a request goes on from can be gone on from.

        Raises:
            Refusal: it cannot.
        """
        parent, most = place.parent, self._rules.max_turns
        if parent is not None and parent.cut is not None:
            self._limit = parent.cut
            raise Refusal(
                ErrorKind.CONFLICT,
                f"the reply before message {place.start} was cut ({parent.cut.value}) and cannot "
                "be gone on from; ask for it again, or end here",
                param="messages",
            )
        if parent is not None and parent.depth >= most:
            self._limit = StopReason.MAX_TURNS
            raise Refusal(
                ErrorKind.INVALID, f"this conversation has {parent.depth} replies and may have "
                f"{most}; end here", param="messages",
            )  # fmt: skip
        if self._rules.kind != "linear" or self._line(place) is not Line.DIVERGES:
            return
        if self._rules.on_divergence is DivergencePolicy.REJECT:
            self._stats.divergences += 1
            raise self._diverged(place)

    def _line(self, place: Place) -> Line:
        """Return what a request is to the newest reply, as it is now."""
        newest, parent = self._tree.newest, place.parent
        if newest is None or (parent is newest and not place.rewritten):
            return Line.GOES_ON
        twin = self._tree.twin(parent, place.echo, place.start, place.tools_key)
        if twin is not None and twin.twins == newest.twins:
            return Line.AGAIN
        if place.rewritten or parent is None:
            return Line.DIVERGES
        if parent is newest.parent:
            return Line.AGAIN
        is_twin = parent.parent is newest.parent and parent.twins == newest.twins
        return Line.AGAIN if is_twin else Line.DIVERGES

    def _diverged(self, place: Place) -> Refusal:
        newest = self._tree.newest
        assert newest is not None
        found = first_difference(self._rules.matcher, newest.conversation(), place.echo.messages)
        what = "the tools are not those of its first request"
        if found is not None:
            what = f"message {found[0]} is not the one that it knows ({found[1]})"
        return Refusal(
            ErrorKind.INVALID,
            f"history was rewritten: {what}; this session goes on from its last reply or repeats "
            'its last turn, and nothing else (gateway.on_divergence = "reject")',
            param="messages" if found is not None else "tools",
        )

    def _check_open(self) -> None:
        if self._closed:
            raise closed()
        if self._withheld is not None:
            raise Refusal(
                ErrorKind.GONE, "the session is over: the model's weights are about to change and "
                "its sample begins anew"
            )  # fmt: skip

    def _busy(self) -> Refusal:
        return Refusal(
            ErrorKind.BUSY, f"{self._rules.max_in_flight} requests of this session are under way; "
            "wait for one of them (gateway.max_in_flight)"
        )  # fmt: skip

    # --- one reply -------------------------------------------------------------------------------
    async def _run(self, job: Job) -> None:
        """Get one reply; whatever goes wrong is what its clients are told."""
        try:
            await self._sample(job)
        except Refusal as refusal:
            self._fail(job, refusal)
        except NoRoom as full:
            self._fail(job, self._too_long(full))
        except Withheld as withheld:
            self._withheld = self._withheld or withheld
            self.over.set()
            self._fail(job, Refusal(ErrorKind.ENGINE, str(withheld)))
        except EngineFault as fault:
            self.fault = fault
            self._fail(job, Refusal(ErrorKind.ENGINE, f"no engine answered: {fault.message}"))
        except asyncio.CancelledError:
            self._fail(job, closed() if self._closed else _left())
            raise
        except Exception as error:  # the runner of a reply: one is not the session
            log.error("gateway_bug", session=self.key[:8], exc_info=error)
            self._fail(job, Refusal(ErrorKind.INTERNAL, f"the gateway failed: {describe(error)}"))
        finally:
            job.task = None

    async def _sample(self, job: Job) -> None:
        request, place = job.request, job.place
        assert place is not None
        job.context = context = await self._render(request, place)
        self._check_open()
        self._caller.check_room(context, request.max_tokens)
        self._limit = None
        live = None
        if request.stream:
            live = job.read_along(partial(self._grow, context))
        job.prepared()
        sampled = await self._caller.sample(context, request.max_tokens, live)
        reply = await self._reply(job, context, sampled)
        self._check_open()
        self.fault = None
        if live is not None:
            live.finish(reply.message)
        job.end(reply)

    async def _render(self, request: ChatRequest, place: Place) -> Context:
        """Return the tokens in front of a reply.

        Raises:
            Refusal: the messages cannot be rendered.
        """
        prompter, parent = self._rules.prompter, place.parent
        messages = list(place.echo.messages[place.start :])
        if parent is None:
            prompt = await prompter.first(messages, request.tools)
            known = self._given.prompt
            # Mostly the prompt of the group, which all members hold once.
            return Context(None, known if np.array_equal(known.ids, prompt.ids) else prompt)
        window = parent.context.window(self._given.renderer.stop_token_ids)
        appended = await prompter.append(
            window, parent.context.sampled(), messages, request.tools,
            reply=parent.message, first_place=place.start,
        )  # fmt: skip
        return Context.behind(parent.context, appended)

    def _grow(self, context: Context) -> Growing:
        renderer = self._given.renderer
        return GrowingReply(renderer, context.window(renderer.stop_token_ids))

    async def _reply(self, job: Job, context: Context, sampled: Sampled) -> ChatReply:
        """Return what a client is told of what was sampled."""
        request, renderer = job.request, self._given.renderer
        ids = context.sampled()
        window = context.window(renderer.stop_token_ids)
        long = len(ids) > LONG_IDS
        parsed = await call(long, renderer.parse, ids, window, request.tools)
        is_cut = sampled.cut is not None
        message = reply_message(parsed, call_rule(request, is_cut=is_cut), request.max_calls)
        pieces = await call(long, renderer.pieces, ids) if request.log_probs else ()
        answers = [answer.completion.log_probs for answer in context.answers]
        job.cut = sampled.cut
        return ChatReply(
            id=job.id,
            message=message,
            finish=finish_word(Finish.LENGTH if is_cut else Finish.STOP, message),
            ids=ids,
            log_probs=answers[0] if len(answers) == 1 else np.concatenate(answers),
            pieces=pieces,
            num_prompt=sampled.num_prompt,
            num_cached=sampled.num_cached,
            created_unix_s=job.created_unix_s,
            stop_text=sampled.stop_text,
        )

    def _too_long(self, full: NoRoom) -> Refusal:
        """Return what a client is told of a prompt without room, in words that SDKs know."""
        is_first = self._tree.newest is None and full.bound is StopReason.CONTEXT_LENGTH
        self._limit = StopReason.PROMPT_TOO_LONG if is_first else full.bound
        limits = self._given.limits
        most = min(limits.max_context, limits.max_seq_len or limits.max_context)
        whose = ""
        if full.bound is StopReason.RESPONSE_LENGTH:
            whose = f", of which {limits.max_response} behind the first prompt"
        return Refusal(
            ErrorKind.TOO_LONG,
            f"This model's maximum context length is {most} tokens{whose}. However, your messages "
            f"resulted in {full.num_tokens} tokens: the prompt is too long. Please reduce the "
            "length of the messages.",
            param="messages",
        )

    def _fail(self, job: Job, refusal: Refusal) -> None:
        """End a job without a reply."""
        if job.refusal is not None or job.reply is not None:
            return
        self._count_refusal(refusal)
        job.fail(refusal)
        self._drop(job)

    def _count_refusal(self, refusal: Refusal) -> None:
        if STATUS[refusal.kind] >= 500:
            self._stats.failed += 1
        else:
            self._stats.refused += 1

    def _drop(self, job: Job) -> None:
        """Forget a job that becomes no node, and count what was sampled for it."""
        if job not in self._jobs:
            return
        self._jobs.discard(job)
        if self._tries.get(job.digest) is job:
            del self._tries[job.digest]
        if job.timer is not None:
            job.timer.cancel()
        if job.context is not None:
            self._stats.dropped_tokens += job.context.num_sampled

    # --- how an exchange ends --------------------------------------------------------------------
    def commit(self, job: Job) -> None:
        """Make a reply part of the conversation; once (`exchange.Owner`)."""
        if job.node is not None:
            return
        if self._closed:
            raise closed()
        place, reply, context = job.place, job.reply, job.context
        assert place is not None
        assert reply is not None
        assert context is not None
        newest = self._tree.newest
        line = self._line(place)
        is_raced = self._tree.version != place.version
        node = self._tree.add(
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
        self._stats.raced += is_raced
        if self._rules.kind == "linear" and newest is not None:
            self._note_line(line, node, newest, place)
        job.node = node
        self._jobs.discard(job)
        self._tries[job.digest] = node
        if job.timer is not None:
            job.timer.cancel()

    def _note_line(self, line: Line, node: Node, newest: Node, place: Place) -> None:
        """Note what a reply of a linear session does to the one before it."""
        above = node.parent
        while above is not None and above.superseded:  # somebody goes on from it
            above.superseded = False
            self._stats.superseded -= 1
            above = above.parent
        # An edit of a turn that its client did not know of is another line, not a repetition.
        is_known = newest.id < place.version or newest.twins in (node.twins, _twins(node.parent))
        if line is Line.AGAIN and is_known:
            newest.superseded = True
            self._stats.superseded += 1
        elif line is Line.DIVERGES and newest.id < place.version:
            self._stats.divergences += 1
            if len(self._divergences) < MAX_NOTED:
                policy = self._rules.on_divergence
                self._divergences.append(
                    {"turn": node.id, "index": place.overlap, "policy": policy.value,
                     "dropped_tokens": 0}
                )  # fmt: skip

    def left(self, job: Job, *, streamed: bool) -> None:
        """Take note that one fewer waits for a reply (`exchange.Owner`)."""
        if job.num_open > 0 or job not in self._jobs:
            return
        if streamed or self._closed or self._rules.rejoin_s <= 0:
            self._abandon(job)
            return
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(self._rules.rejoin_s, self._abandon, job)

    def whole(self, job: Job) -> list[Delta]:
        """Return a reply that is there as deltas (`exchange.Owner`)."""
        assert job.reply is not None
        assert job.context is not None
        return self._grow(job.context).finish(job.reply.message)

    def _abandon(self, job: Job) -> None:
        """Give up a reply that nobody waits for."""
        if job not in self._jobs or job.num_open > 0:
            return
        self._stats.left += 1
        job.fail(_left())
        self._drop(job)
        self._stop(job)

    def _stop(self, job: Job) -> None:
        if job.task is not None and not job.is_stopped:
            job.is_stopped = True
            job.task.cancel()

    # --- the end ---------------------------------------------------------------------------------
    async def close(self) -> None:
        """End the session: calls in flight are stopped, later requests refused; again: wait."""
        if not self._closed:
            self._closed = True
            self._on_closed(self.key)
        running = [job.task for job in self._jobs if job.task is not None]
        for job in list(self._jobs):
            self._stop(job)
            if job.reply is not None:
                self._stats.left += 1
                self._drop(job)
        if running:
            _, left = await asyncio.wait(running, timeout=CLOSE_S)
            if left:
                log.warning("calls_not_stopped", session=self.key[:8], count=len(left))

    async def collect(self) -> Trajectory:
        """Return what the session came to: the same objects each time.

        Raises:
            ContractError: it is not closed.
            AgentFault: the picker.
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
        self._stats.dropped_tokens += sum(
            node.num_sampled for node in self._tree.nodes if node.id not in kept
        )
        is_list = self._rules.kind == "tree" or len(picked.leaves) > 1
        samples = await assemble(self._given, self._tree, picked, is_list=is_list)
        first = samples[0]
        first.metadata["agent"] = self.stats
        if self._divergences:
            first.metadata["divergences"] = self._divergences
        if self._withheld is not None:
            for sample in samples:
                sample.finish(StopReason.ABORT_WEIGHTS, STATUS_OF[StopReason.ABORT_WEIGHTS])
        return samples if is_list else first

    async def _picked(self) -> Picked:
        newest = self._tree.newest
        if newest is None:
            return Picked([])
        if self._rules.kind == "tree":
            return await self._rules.picker.pick(self._tree)
        if self._rules.on_divergence is DivergencePolicy.FORK:
            picked = drop_retries(self._tree)
            return Picked([n for n in picked.leaves if not n.superseded], picked.warnings)
        return Picked([newest])


def _twins(node: Node | None) -> int:
    return -1 if node is None else node.twins


def _left() -> Refusal:
    return Refusal(ErrorKind.GONE, "nobody waited for this reply any more")


def _too_deep() -> Refusal:
    return Refusal(
        ErrorKind.INVALID, "JSON of too many levels in a message or a tool", param="messages"
    )
