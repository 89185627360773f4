"""The engines of a pool: which there are, how each is, and which of them take calls.

Owns membership (configuration, names, routers, a trainer's list), the state of each engine, and who
takes calls. Never sends a call, never chooses an engine for one (the pool does), and never asks one
how it is (`looks` does). Invariants: an engine takes calls exactly while it is in `open`; one that
joins gets there by an answer of its own; one that leaves keeps the calls that it has until they
end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import structlog

from rollstream.errors import ConfigError
from rollstream.sample import UNKNOWN_VERSION

from ..client import EngineClient
from ..protocol.versions import BETWEEN_VERSIONS, VersionMap
from .background import Background
from .discovery import Ask, NoAnswer, check_spec, engines_of, is_moving, unique
from .logprob_mode import Mode, raw_text
from .looks import LOOKS_BEFORE_DOWN, FirstQuestions, Looks
from .pooled import PoolCounters, PoolEngine, RetryPolicy
from .states import ALIVE, State

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
        looks: at them.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        new_client: Callable[[str], EngineClient],
        ask: Ask,
        policy: RetryPolicy,
        versions: VersionMap,
        questions: FirstQuestions | None,
        changed: Callable[[], None],
    ) -> None:
        """Take the engines that are named by their own URLs in at once; no I/O yet.

        Args:
            specs: of the configuration, `discovery`'s three kinds.
            new_client: makes the client of a URL; raises ConfigError where it is none.
            ask: GETs a URL for a router's list.
            policy: its intervals, and the bound of calls.
            versions: what labels mean.
            questions: that an engine answers before it takes calls; None asks none.
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
        self._scaled = questions is not None and questions.scaled
        self._changed = changed
        self._background = Background()
        self.looks = Looks(
            questions,
            policy=policy,
            background=self._background,
            counters=self.counters,
            version_of=lambda label: versions.of(label, self.version),
            refresh=self.refresh,
        )
        self._named_anew = asyncio.Event()
        self._is_labelled = False
        self._found: dict[str, list[str]] = {}
        self.started = False
        self._apply(known=questions is None)

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
            self.looks.soon(back)
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
        member.extend = lambda: self.looks.extension(member)
        self.members.append(member)
        if self.started:
            log.info("engine_joins", engine=url)
            self.looks.soon(member)

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
            self._background.spawn(member.client.aclose())

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
        if self.started and not self.looks.closed:
            for member in again:
                member.follow_s = 0.0
                self.looks.soon(member)

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
        if self._policy.require_version and member.version == BETWEEN_VERSIONS:
            return State.BEHIND  # a push is under way, or its trainer is gone
        if self._policy.require_version and self.version > 0:
            if member.version == UNKNOWN_VERSION:
                # Nobody labels weights here, or everybody but this one, which began anew then.
                return State.BEHIND if self._is_labelled else State.UP
            if member.version < self.version:
                return State.BEHIND
        return State.UP

    def _lag_of(self, member: PoolEngine, state: State) -> int:
        if member.version < 0:
            return self.version if state is State.BEHIND else 0
        return max(0, self.version - member.version)

    def alive(self) -> bool:
        """Return whether any member takes calls, or will again by itself."""
        return any(member.state in ALIVE for member in self.members)

    def said(self) -> str:
        """Return how every engine is, for people."""
        return ", ".join(member.said() for member in self.members) or "no address has named any"

    # --- begin and end ---------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to look at the engines at intervals."""
        self.started = True
        self._background.spawn(self.looks.watch(self.members))
        self._background.spawn(self._discover())
        for member in self.members:
            if not member.seen:
                self.looks.soon(member)

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
        await asyncio.gather(*(self.looks.look(member) for member in self.members))
        for member in self.members:
            if member.state is State.REFUSED:
                raise ConfigError(raw_text(member.client.url))
        return any(member.counters.up for member in self.members)

    async def aclose(self) -> None:
        """Stop looking; let aborts go out."""
        self.looks.closed = True
        for member in (*self.members, *self.leaving):
            if member.follow is not None:
                member.follow.cancel()
        await self._background.aclose()
        for member in (*self.members, *self.leaving):
            await member.client.aclose()
