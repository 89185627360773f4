"""The engines of a pool: which there are, how each is, and which of them take calls.

Owns membership (configuration, names, routers, a trainer's list), the looks at every engine, and
the state of each. Never sends a call and never chooses an engine for one: that is the pool's.
Invariants: an engine takes calls exactly while it is in `open`; one that joins gets there by an
answer of its own; one that leaves keeps the calls that it has until they end.

A look asks what an engine serves and whether it is paused, and never loads it (`client.look`). All
engines are looked at every `probe_interval_s`, and at once when something says that they changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from rollstream.errors import ConfigError, EngineFault
from rollstream.sample import UNKNOWN_VERSION

from .client import EngineClient, Look
from .discovery import Ask, NoAnswer, check_spec, engines_of, is_moving, unique
from .faults import Detail, fault, rule_of
from .logprob_mode import Mode, find_mode, raw_text
from .pooled import PoolCounters, PoolEngine, RetryPolicy
from .states import ALIVE, State
from .versions import VersionMap

FOLLOW_S = 0.05
"""First wait before an engine that is paused or behind is looked at again; it doubles up to:"""
FOLLOW_PAUSED_S = 0.5
LOOKS_BEFORE_DOWN = 3
"""So many looks in a row without an answer put an engine aside: it may just be slow to answer."""
MODE_TIMEOUT_S = 30.0
"""Of the questions about log-probs: an engine that is busy with others' calls queues them."""

log = structlog.get_logger("worker")


class Fleet:
    """The engines of one pool.

    Attributes:
        members: all that calls may be sent to, now or later.
        leaving: those that take nothing new and still have calls.
        open: the members that take calls now.
        version: the run's weight version.
        generation: how often `members` changed.
        has_raw: a member's log-probs are those of T = 1 whatever T it samples at.
        is_held: nobody is to sample anything now: an engine that is new counts as paused.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        new_client: Callable[[str], EngineClient],
        ask: Ask,
        policy: RetryPolicy,
        versions: VersionMap,
        max_token_id: int,
        check_logprobs: bool,
        scaled: bool,
        scaled_name: str,
        changed: Callable[[], None],
    ) -> None:
        """Take the engines that are named by their own URLs in at once; no I/O yet.

        Args:
            specs: of the configuration, `discovery`'s three kinds.
            new_client: makes the client of a URL; raises ConfigError where it is none.
            ask: GETs a URL for a router's list.
            policy: its intervals, and the bound of calls.
            versions: what labels mean.
            max_token_id: of the vocabulary.
            check_logprobs: ask every engine what its log-probs are before it takes calls.
            scaled: this worker samples at other temperatures than 1, so raw log-probs are no use.
            scaled_name: what those are called that follow the temperature (`logprob_mode`).
            changed: called after every change of `open`.
        """
        self.members: list[PoolEngine] = []
        self.leaving: list[PoolEngine] = []
        self.open: list[PoolEngine] = []
        self.version, self.has_raw, self.generation = 0, False, 0
        self.counters = PoolCounters([])
        self._configured = tuple(map(check_spec, specs))
        self._specs = self._configured
        self._new_client, self._ask, self._policy = new_client, ask, policy
        self._versions, self._labels = versions, dict[str, int]()
        self._max_token_id, self._scaled = max_token_id, scaled
        self._check_logprobs, self._scaled_name = check_logprobs, scaled_name
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._named_anew = asyncio.Event()
        self._is_labelled = False
        self._found: dict[str, list[str]] = {}
        self.started = self._closed = self.is_held = False
        self._apply(known=not check_logprobs)

    # --- which there are -------------------------------------------------------------------------
    def set_members(self, urls: Sequence[str] | None) -> None:
        """Take over what the trainer named; None is the configuration."""
        specs = self._configured if urls is None else tuple(self._usable(urls))
        if specs == self._specs:
            return
        if not self.started:
            self.start()
        self._specs = specs
        self._found = {spec: found for spec, found in self._found.items() if spec in specs}
        self._named_anew.set()
        self._apply()

    def _usable(self, urls: Sequence[str]) -> list[str]:
        specs = []
        for url in urls:
            try:
                specs.append(check_spec(url))
            except ConfigError as error:
                log.error("engine_url_refused", url=url, message=str(error))
        return unique(specs)

    def _apply(self, *, known: bool = False) -> None:
        """Let those leave that are named no more, and those join that are new."""
        wanted = unique(
            url
            for spec in self._specs
            for url in (self._found.get(spec, ()) if is_moving(spec) else (spec,))
        )
        here = {member.client.url: member for member in self.members}
        for url in here.keys() - set(wanted):
            self._leave(here.pop(url))
        for url in wanted:
            if url not in here:
                self._join(url, known=known)
        self.generation += 1
        order = {url: place for place, url in enumerate(wanted)}
        self.members.sort(key=lambda member: order[member.client.url])
        self.counters.engines[:] = [member.counters for member in self.members]
        self.refresh()

    def _join(self, url: str, *, known: bool) -> None:
        taken = {member.counters.slot for member in self.members}
        slot = next(i for i in range(len(taken) + 1) if i not in taken)
        back = next((member for member in self.leaving if member.client.url == url), None)
        if back is not None:
            self.leaving.remove(back)
            back.leaving, back.counters.slot = False, slot
            self.members.append(back)
            self.look_soon(back)
            return
        try:
            client = self._new_client(url)
        except ConfigError as error:
            if not self.started:
                raise
            log.error("engine_url_refused", url=url, message=str(error))
            return
        member = PoolEngine(
            client, max_in_flight=self._policy.max_in_flight, slot=slot, known=known
        )
        member.extend = lambda: self._extension(member)
        self.members.append(member)
        if self.started:
            log.info("engine_joins", engine=url)
            self.look_soon(member)

    def _leave(self, member: PoolEngine) -> None:
        self.members.remove(member)
        member.leaving = True
        if self.started:
            log.info("engine_leaves", engine=member.client.url, in_flight=len(member.flights))
        if member.counters.in_flight:
            self.leaving.append(member)
        else:
            self._close(member)

    def ended(self, member: PoolEngine) -> None:
        """Note that the last call of an engine that is leaving ended."""
        if member in self.leaving:
            self.leaving.remove(member)
            self._close(member)

    def _close(self, member: PoolEngine) -> None:
        if member.follow is not None:
            member.follow.cancel()
        if member.looking is not None:
            member.looking.cancel()
        if self.started:
            self._spawn(member.client.aclose())

    async def _discover(self) -> None:
        """Ask names and routers again and again; what gives no answer keeps the engines it had."""
        while True:
            await self.discover()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._policy.discover_interval_s):
                    await self._named_anew.wait()
            self._named_anew.clear()

    async def discover(self) -> None:
        """Ask every name and router of the present addresses once."""
        for spec in filter(is_moving, self._specs):
            try:
                urls = await engines_of(spec, self._ask)
            except NoAnswer as error:
                kept = len(self._found.get(spec, ()))
                log.warning("no_engines_found", address=spec, kept=kept, message=str(error))
                continue
            if spec in self._specs and urls != self._found.get(spec):
                self._found[spec] = urls
                self._apply()

    # --- how each is -----------------------------------------------------------------------------
    def set_version(self, version: int, labels: Mapping[str, int]) -> None:
        """Take over the run's version; a change has every engine looked at at once."""
        if version == self.version and labels == self._labels:
            again = [member for member in self.members if member.state is not State.UP]
        else:
            again = self.members
            self.version, self._labels = version, dict(labels)
            self._versions.set(labels)
            for member in self.members:
                member.counters.version = self._versions.of(member.label, version)
            self.refresh()
        if self.started and not self._closed:
            for member in again:
                member.follow_s = 0.0
                self.look_soon(member)

    def refresh(self) -> None:
        """Work out every member's state from the facts, and who takes calls."""
        # For good: the last engine that names them may go, or not have been asked since the version
        # moved, and those that began anew without weights must not take its calls.
        if self.version > 0:
            self._is_labelled |= any(member.version >= self.version for member in self.members)
        self.open = []
        self.has_raw = any(member.mode is Mode.RAW for member in self.members)
        for member in self.members:
            state, before = self._state_of(member), member.state
            counters = member.counters
            counters.state = state
            counters.lag = self._lag_of(member, state)
            if state is State.UP:
                self.open.append(member)
                member.follow_s = 0.0
            if state is not before:
                # Every update of weights leaves all engines behind for a moment.
                say = log.debug if {state, before} == {State.UP, State.BEHIND} else log.info
                say(
                    "engine_state",
                    engine=counters.url,
                    state=state.value,
                    before=before.value,
                    version=counters.version,
                    run_version=self.version,
                )
        self._changed()

    def _state_of(self, member: PoolEngine) -> State:
        if not member.counters.up:
            return State.DOWN
        if member.mode is Mode.RAW and self._scaled:
            return State.REFUSED
        if member.paused:
            return State.PAUSED
        if self._policy.require_version and self.version > 0:
            if member.version == UNKNOWN_VERSION:
                # Nobody labels weights here, or everybody but this one, which began anew then.
                return State.BEHIND if self._is_labelled else State.UP
            if member.version < self.version:
                return State.BEHIND
        return State.UP

    def _lag_of(self, member: PoolEngine, state: State) -> int:
        if member.version == UNKNOWN_VERSION:
            return self.version if state is State.BEHIND else 0
        return max(0, self.version - member.version)

    def alive(self) -> bool:
        """Return whether any member takes calls, or will again by itself."""
        return any(member.state in ALIVE for member in self.members)

    def saw_version(self, member: PoolEngine, version: int, sent: int) -> None:
        """Take the newest version of a reply: a newer one is known at once, only a look lowers it.

        A call may end with older weights than its engine has by now. With older ones than the
        engine had when the call was sent, the engine began anew.

        Args:
            member: who replied.
            version: the newest in the reply.
            sent: the run's version when the call was sent.
        """
        known = member.version
        if version > known:
            member.counters.version = version
            self.refresh()
        elif 0 <= version < sent <= known:
            self.look_soon(member)

    def check_named(
        self, member: PoolEngine, versions: Sequence[tuple[int, int, int]], sent: int
    ) -> None:
        """Refuse (`bad_reply`) a reply of weights that nobody named, where replies name theirs.

        The engine began anew: such tokens would be recorded as of the version at dispatch.
        """
        if all(version != UNKNOWN_VERSION for version, _, _ in versions):
            # `default` names version 0 of a fleet in which nobody may ever name another.
            member.names_replies |= any(version > 0 for version, _, _ in versions)
        elif self._policy.require_version and sent > 0 and member.names_replies:
            member.label, member.counters.version = None, UNKNOWN_VERSION
            self.refresh()
            self.look_soon(member)
            raise fault(Detail.BAD_REPLY, f"{member.client.url}: weights that nobody named")

    def failed(self, member: PoolEngine, error: EngineFault) -> None:
        """Count a fault against an engine; enough in a row put it aside."""
        rule = rule_of(error)
        if rule.eject_after == 0:
            return
        member.failures_in_row += 1
        if member.failures_in_row >= rule.eject_after:
            self.eject(member)

    def eject(self, member: PoolEngine) -> None:
        """Put an engine aside until it answers."""
        if not member.counters.up:
            return
        member.counters.up = False
        member.counters.ejections += 1
        member.mode, member.mode_name = None, ""  # it may come back started in another way
        self.refresh()
        if not self._closed:
            self.look_soon(member)

    # --- looks -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to look at the engines at intervals."""
        self.started = True
        self._spawn(self._watch())
        self._spawn(self._discover())
        for member in self.members:
            if not member.seen:
                self.look_soon(member)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._policy.probe_interval_s)
            for member in self.members:
                if member.looking is None:
                    self.look_soon(member)

    def look_soon(self, member: PoolEngine) -> asyncio.Task[None]:
        """Look at an engine, or once more behind the look that is under way; never two at once."""
        if member.looking is not None:
            member.look_again = True
            return member.looking
        member.looking = self._spawn(self._look(member))
        return member.looking

    async def look(self, member: PoolEngine) -> None:
        """Look at an engine and return when that is done; who is cancelled leaves it going."""
        is_late = member.looking is not None
        await asyncio.wait((self.look_soon(member),))
        # The look behind it, but no later one: who is slow may be asked again and again meanwhile.
        if is_late and member.looking is not None:
            await asyncio.wait((member.looking,))

    async def _look(self, member: PoolEngine) -> None:
        member.look_again = False
        try:
            await self._looked(member, await member.client.look())
        except EngineFault as error:
            self._unanswered(member, error)
        finally:
            member.looking = None
        if member.look_again:
            self.look_soon(member)

    async def _looked(self, member: PoolEngine, look: Look) -> None:
        """Take over what an engine said of itself."""
        if self._is_to_learn(member) and not look.paused and not self.is_held:
            await self._learn_mode(member)
            look = await member.client.look()  # that may have taken long
        look = Look(look.version, paused=look.paused or self._is_to_learn(member))
        counters = member.counters
        was = (counters.up, member.paused, counters.version)
        if look.paused and not member.paused:
            self.counters.pauses += 1
        if member.paused and not look.paused:
            member.pause_ended_at = asyncio.get_running_loop().time()
        member.paused, member.label, member.looks_failed = look.paused, look.version, 0
        counters.version = self._versions.of(look.version, self.version)
        if not counters.up:
            counters.up, member.failures_in_row = True, 0
            counters.returns += member.seen
            member.seen = True
        if was != (counters.up, member.paused, counters.version):
            self.refresh()
        self._follow(member)

    def _is_to_learn(self, member: PoolEngine) -> bool:
        return self._check_logprobs and member.mode is None

    async def _learn_mode(self, member: PoolEngine) -> None:
        """Find out what its log-probs are.

        Raises:
            EngineFault: it answered none of the questions: it is paused by now, or ill, and the
                next look says which.
        """
        client, limit_s = member.client, min(MODE_TIMEOUT_S, self._policy.request_timeout_s)
        mode = await find_mode(client, self._max_token_id, timeout_s=limit_s)
        names = {Mode.SCALED: self._scaled_name, Mode.RAW: "raw", Mode.UNDECIDED: ""}
        member.mode, member.mode_name = mode, names[mode]
        if mode is Mode.RAW and self._scaled:
            log.error("engine_refused", engine=client.url, message=raw_text(client.url))
        elif mode is Mode.UNDECIDED:
            log.warning(
                "logprob_mode_unknown",
                engine=client.url,
                message="its log-probs say nothing of the distribution they are of; it is used",
            )

    def _unanswered(self, member: PoolEngine, error: EngineFault) -> None:
        member.looks_failed += 1
        if error.detail == Detail.CONNECT or member.looks_failed >= LOOKS_BEFORE_DOWN:
            self.eject(member)

    def _follow(self, member: PoolEngine) -> None:
        """Look again soon at one that will change by itself: its calls wait for that."""
        if member.state not in (State.PAUSED, State.BEHIND) or member.leaving:
            return
        longest = self._policy.probe_interval_s
        if member.state is State.PAUSED:
            longest = min(longest, FOLLOW_PAUSED_S)
        member.follow_s = min(max(FOLLOW_S, 2 * member.follow_s), longest)
        if member.follow is not None:
            member.follow.cancel()
        member.follow = asyncio.get_running_loop().call_later(
            member.follow_s, self.look_soon, member
        )

    async def _extension(self, member: PoolEngine) -> float:
        """Return how many seconds more a call has whose time ran out: those of a pause.

        It ran out no earlier than a whole `request_timeout_s` behind the last pause.
        """
        if not member.paused:
            await self.look(member)
        if member.paused:
            return self._policy.probe_interval_s
        now = asyncio.get_running_loop().time()
        return member.pause_ended_at + self._policy.request_timeout_s - now

    async def look_at_all(self) -> bool:
        """Look at every engine at once; who does not answer is put aside. Whether any answered.

        Raises:
            ConfigError: log-probs are raw where temperatures are not 1.
        """
        if not self.started:
            if any(map(is_moving, self._specs)):
                await self.discover()
            self.start()
        for member in self.members:
            member.looks_failed = LOOKS_BEFORE_DOWN - 1
        await asyncio.gather(*(self.look(member) for member in self.members))
        for member in self.members:
            if member.state is State.REFUSED:
                raise ConfigError(raw_text(member.client.url))
        return any(member.counters.up for member in self.members)

    # --- tasks -----------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine_watch_broke", exc_info=error)

    async def aclose(self) -> None:
        """Stop looking; let aborts go out."""
        self._closed = True
        for member in (*self.members, *self.leaving):
            if member.follow is not None:
                member.follow.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in (*self.members, *self.leaving):
            await member.client.aclose()
