"""What is known of the engines of a pool: when each is asked how it is, and what answers change.

Owns the looks under way, their intervals, the first questions about log-probs, what replies say of
their engine, and the faults in a row that put one aside. Never decides which engines there are, and
never sends a call. Invariants: an engine is looked at once at a time; what an answer says is
written into its record in one step, behind which states are worked out anew.

A look asks what an engine serves and whether it is paused, and never loads it (`client.look`). All
engines are looked at every `probe_interval_s`, and at once when something says that they changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from rollstream.errors import EngineFault, Withheld
from rollstream.sample import UNKNOWN_VERSION

from ..client import Look
from ..faults import Detail, fault, rule_of
from .background import Background
from .logprob_mode import Mode, find_mode, raw_text
from .pooled import PoolCounters, PoolEngine, RetryPolicy
from .states import State

FOLLOW_S = 0.05
"""First wait before an engine that is paused or behind is looked at again; it doubles up to:"""
FOLLOW_PAUSED_S = 0.5
LOOKS_BEFORE_DOWN = 3
"""So many looks in a row without an answer put an engine aside: it may just be slow to answer."""
MODE_TIMEOUT_S = 10.0
"""Of the questions about log-probs: an engine that is busy with others' calls queues them."""

_ACTIONS: dict[str, str] = {
    Detail.CONNECT: "start it, or correct engine.urls",
    Detail.REFUSED: "start it as the message says, or correct engine.kind",
}
_IDS = re.compile(r"[0-9a-f]{32}|\d+")

Passage: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""What is at an engine within it counts as a call in flight; raises Withheld where none may be."""

log = structlog.get_logger("worker")


@dataclass(frozen=True, slots=True)
class FirstQuestions:
    """What an engine is asked before it takes calls: which log-probs it reports."""

    max_token_id: int
    """Of the vocabulary."""
    scaled: bool
    """This worker samples at other temperatures than 1, so raw log-probs are no use."""
    scaled_name: str
    """What those are called that follow the temperature (`logprob_mode`)."""


class Looks:
    """The looks at the engines of one fleet.

    Attributes:
        is_held: nobody is to sample anything now: an engine that is new counts as paused.
        closed: no further look begins.
        passage: the questions of one engine are asked within it.
    """

    def __init__(
        self,
        questions: FirstQuestions | None,
        *,
        policy: RetryPolicy,
        background: Background,
        counters: PoolCounters,
        version_of: Callable[[str | int | None], int],
        refresh: Callable[[], None],
    ) -> None:
        """Look at nothing yet.

        Args:
            questions: None takes engines without any.
            policy: its intervals.
            background: runs the looks.
            counters: of the pool.
            version_of: what a label means now.
            refresh: called when what is known of an engine changed.
        """
        self.is_held = self.closed = False
        self.passage: Passage = contextlib.nullcontext
        self._questions, self._policy, self._background = questions, policy, background
        self._counters, self._version_of, self._refresh = counters, version_of, refresh

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
        if version > max(known, UNKNOWN_VERSION):
            member.counters.version = version
            self._refresh()
        elif 0 <= version < sent <= known:
            self.soon(member)

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
            self._refresh()
            self.soon(member)
            raise fault(Detail.BAD_REPLY, f"{member.client.url}: weights that nobody named")

    def failed(self, member: PoolEngine, error: EngineFault) -> None:
        """Count a fault against an engine; enough in a row put it aside."""
        rule = rule_of(error)
        if rule.eject_after == 0:
            return
        member.failures_in_row += 1
        if member.failures_in_row >= rule.eject_after and member.counters.up:
            self._say_why(member, error)
            self.eject(member)

    def eject(self, member: PoolEngine) -> None:
        """Put an engine aside until it answers."""
        if not member.counters.up:
            return
        member.counters.up = False
        self._counters.ejections += 1
        member.mode, member.mode_name = None, ""  # it may come back started in another way
        self._refresh()
        if not self.closed:
            self.soon(member)

    async def watch(self, members: Sequence[PoolEngine]) -> None:
        """Look at every engine at intervals, until cancelled; the list may change meanwhile."""
        while True:
            await asyncio.sleep(self._policy.probe_interval_s)
            for member in members:
                if member.looking is None:
                    self.soon(member)

    def soon(self, member: PoolEngine) -> asyncio.Task[None]:
        """Look at an engine, or once more behind the look that is under way; never two at once."""
        if member.looking is not None:
            member.look_again = True
            return member.looking
        member.looking = self._background.spawn(self._look(member))
        return member.looking

    async def look(self, member: PoolEngine) -> None:
        """Look at an engine and return when that is done; who is cancelled leaves it going."""
        is_late = member.looking is not None
        await asyncio.wait((self.soon(member),))
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
            self.soon(member)

    async def _looked(self, member: PoolEngine, look: Look) -> None:
        """Take over what an engine said of itself."""
        questions = self._questions
        if (
            questions is not None
            and self._is_to_learn(member)
            and not (look.paused or self.is_held)
        ):
            with contextlib.suppress(Withheld):  # it is asked anew when the pause is over
                await self._learn_mode(member, questions)
            look = await member.client.look()  # that may have taken long
        look = Look(look.version, paused=look.paused or self._is_to_learn(member))
        counters = member.counters
        was = (counters.up, member.paused, counters.version)
        if look.paused and not member.paused:
            self._counters.pauses += 1
        if member.paused and not look.paused:
            member.pause_ended_at = asyncio.get_running_loop().time()
        member.paused, member.label, member.looks_failed = look.paused, look.version, 0
        counters.version = self._version_of(look.version)
        if not counters.up:
            counters.up, member.failures_in_row, member.trouble = True, 0, ""
            member.seen = True
        if was != (counters.up, member.paused, counters.version):
            self._refresh()
        self._follow(member)

    def _is_to_learn(self, member: PoolEngine) -> bool:
        return self._questions is not None and member.mode is None

    async def _learn_mode(self, member: PoolEngine, questions: FirstQuestions) -> None:
        """Find out what its log-probs are.

        Raises:
            EngineFault: it answered none of the questions: it is paused by now, or ill, and the
                next look says which.
            Withheld: nothing is to be sampled by now.
        """
        client, limit_s = member.client, min(MODE_TIMEOUT_S, self._policy.request_timeout_s)
        try:
            async with self.passage():
                mode = await find_mode(
                    client, questions.max_token_id, timeout_s=limit_s, flights=member.flights
                )
        except EngineFault as error:
            # Who answers looks and is not paused is busy: its queue may be longer than that, and a
            # fleet at full load would take no worker more.
            if error.detail != Detail.TIMEOUT or (await client.look()).paused:
                raise
            mode = Mode.UNDECIDED
        names = {Mode.SCALED: questions.scaled_name, Mode.RAW: "raw", Mode.UNDECIDED: ""}
        member.mode, member.mode_name = mode, names[mode]
        if mode is Mode.RAW and questions.scaled:
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
        if not member.counters.up:
            self._say_why(member, error)

    def _say_why(self, member: PoolEngine, error: EngineFault) -> None:
        """Keep why an engine is down, and log it where that is another reason than before."""
        before, member.trouble = member.trouble, error.message
        if _without_ids(before) != _without_ids(error.message):
            log.warning(
                "engine_is_down",
                engine=member.client.url,
                message=error.message,
                action=_ACTIONS.get(error.detail, "see what its own log says"),
            )

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
        member.follow = asyncio.get_running_loop().call_later(member.follow_s, self.soon, member)

    async def extension(self, member: PoolEngine) -> float:
        """Return how many seconds more a call has whose time ran out: those of a pause.

        It ran out no earlier than a whole `request_timeout_s` behind the last pause.
        """
        if not member.paused:
            await self.look(member)
        if member.paused:
            return self._policy.probe_interval_s
        now = asyncio.get_running_loop().time()
        return member.pause_ended_at + self._policy.request_timeout_s - now


def _without_ids(message: str) -> str:
    """Return what two faults of one kind have in common: no request's id, and no number."""
    return _IDS.sub("#", message)
