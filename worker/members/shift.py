"""The shift: the long-lived coroutine that leases as many members as it has free slots.

Owns the slots, the lease call numbers, and one task per member. Never renders, generates or talks
to an engine: `rollout.py` does, and `reports.py` reports. Invariants: a slot is taken at the lease
and free when its report was answered, whatever its group does (but for `whole_groups`); call number
k+1 is used only after call k was answered; a member's fault, hang or cancellation changes no other
member.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from rollstream.errors import Report, StopReason
from rollstream.link import Link
from rollstream.logs import group_id
from rollstream.queue import calls
from rollstream.queue.answers import LeasedGroup, LeasedMember
from rollstream.queue.keys import MAX_LEASE
from rollstream.queue.queue import Queue

from ..functions import describe
from ..telemetry.metrics import Metrics
from .gate import Gate, Position
from .groups import GroupBook
from .reports import Health, Reporter, ReportLimits
from .rollout import Rollout
from .submit import DELIVERED, Submitter
from .view import LOST, OVER, PAUSED, RunView
from .work import Cause, Ending, Work, ending_of_cause

ABORTING = "aborting"
"""The state of a run whose groups are being dropped: nothing that it runs counts any more."""
GATHER_S = 0.002
"""How long free slots wait for more of them while results are on their way."""
BELL_WAIT_S = 0.5
IDLE_WAIT_S = 0.2
CLOSE_LOOK_S = 0.005
WATCH_INTERVAL_S = 0.1
STRAY_AFTER_S = 5.0
"""A cancelled attempt that still runs after this has ignored it: its slot is taken back."""

log = structlog.get_logger("worker")


def new_incarnation() -> str:
    """Return the identity of this process: 12 hex, new at every start, never reused."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    """The numbers of a shift."""

    slots: int
    sample_timeout_s: float
    retry_delay_s: float
    fail_after_groups: int
    whole_groups: bool = False
    """A slot is free only when all members of its group ended that this worker leased."""
    envs: tuple[str, ...] = ("default",)
    """Environments that get groups."""
    all_envs_come: bool = False
    """Each of them does, for certain: it has a source of its own."""


class Shift:
    """Leases members and runs them, until stopped or until the run is over."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        view: RunView,
        *,
        name: str,
        rollout: Rollout,
        book: GroupBook,
        health: Health,
        limits: ShiftLimits,
        metrics: Metrics,
        gate: Gate | None = None,
    ) -> None:
        """Begin with all slots free.

        Args:
            queue: of the run.
            link: to Redis.
            view: what is known of the run.
            name: of this worker.
            rollout: runs attempts.
            book: of the groups that members are here of.
            health: of the engines.
            limits: see `ShiftLimits`.
            metrics: counts.
            gate: in front of the engines; None is one that nobody moves.
        """
        self._queue, self._link, self._view, self._name = queue, link, view, name
        self._rollout, self._book, self._health = rollout, book, health
        self._limits, self._metrics = limits, metrics
        self._gate = gate or Gate()
        self.submitter = Submitter(queue, link, self._landed)
        self._reporter = Reporter(
            queue,
            link,
            view,
            self.submitter,
            gate=self._gate,
            health=health,
            limits=ReportLimits(
                limits.retry_delay_s,
                limits.fail_after_groups,
                limits.envs,
                limits.all_envs_come,
            ),
            metrics=metrics,
            left=self._leave,
        )
        self._works: dict[str, Work] = {}
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ringing: asyncio.Task[bool] | None = None
        self._call_no = 0
        self._num_waiting = 0
        """Slots of members that ended, in groups that have not (`whole_groups`)."""
        self._strays: set[asyncio.Task[None]] = set()
        self._said = ""
        self._worthwhile = min(32, limits.slots // 4)
        metrics.concurrency_limit.set(limits.slots)

    # --- leasing ---------------------------------------------------------------------------------
    @property
    def num_busy(self) -> int:
        """Slots that are taken."""
        return len(self._works) + self._num_waiting

    async def run(self) -> str:
        """Lease and run members; return the state in which the run is over, or "" if stopped."""
        while not self._stopping.is_set():
            if self._view.state in OVER:
                return self._view.state
            if self._view.state == ABORTING:
                self.cancel_all(Cause.RUN_ENDED)
            free = self._limits.slots - self.num_busy
            if 0 < free < self._worthwhile and self.submitter.num_unanswered > free:
                # More slots are about to come free: one call for them all.
                await self._wait(self._freed, GATHER_S)
                self._freed.clear()
                free = self._limits.slots - self.num_busy
            if free <= 0:
                await self._wait(self._freed, IDLE_WAIT_S)
                self._freed.clear()
            elif self._gate.position is not Position.OPEN:
                # What is leased now could make no call; the wait ends with the pause.
                await self._bounded(self._gate.opened(), IDLE_WAIT_S)
            elif not self._health.healthy():
                await self._wait_for_engine()
            else:
                await self._lease(min(free, MAX_LEASE))
        return ""

    def stop(self) -> None:
        """Lease nothing more."""
        self._stopping.set()
        if self._ringing is not None:
            self._ringing.cancel()

    async def _lease(self, limit: int) -> None:
        # A lost answer is asked for again under the same number: then it is the same answer.
        number = self._call_no + 1
        answer = await self._link.answered(
            lambda: self._queue.call(calls.lease(self._name, number, limit))
        )
        self._call_no = number
        self._view.saw(answer.state, answer.version, answer.control_seq)
        if answer.state != "running":
            await self._idle(answer.state)
            return
        self._said = ""
        if not answer.groups:
            await self._wait_for_work()
            return
        now_mono, now_unix = time.monotonic(), time.time()
        for group in answer.groups:
            self._take(group, now_mono, now_unix)

    async def _wait_for_work(self) -> None:
        """Wait for the bell; `stop` ends the wait."""
        self._ringing = asyncio.create_task(
            self._link.answered(lambda: self._queue.wait_bell(BELL_WAIT_S))
        )
        try:
            await asyncio.wait((self._ringing,))
            if not self._ringing.cancelled():
                self._ringing.result()
        finally:
            self._ringing.cancel()
            self._ringing = None

    async def _wait_for_engine(self) -> None:
        """Look closely: behind an update all engines are behind, until each was asked, for ms."""
        limit = time.monotonic() + IDLE_WAIT_S
        while not self._stopping.is_set() and time.monotonic() < limit:
            await self._wait(self._stopping, CLOSE_LOOK_S)
            if self._health.healthy():
                return
        if self._is_new("no_engine"):
            log.warning("no_engine", message="no healthy engine: nothing is leased")

    async def _idle(self, state: str) -> None:
        if state == LOST:
            if self._is_new("run_lost"):
                log.warning("run_lost", message="Redis does not know the run: waiting for `open`")
            self.cancel_all(Cause.LOST)
        if state == PAUSED:
            # The word is on its way here too: then the gate shuts, and opens with the pause's end.
            await self._bounded(self._gate.turned(), IDLE_WAIT_S)
        elif state not in OVER:
            await self._wait(self._stopping, IDLE_WAIT_S)

    def _take(self, leased: LeasedGroup, now_mono: float, now_unix: float) -> None:
        # The group's own deadline is the queue's business: its clock stands still in a pause and
        # in an outage. When it has passed, the next beat reports the group's members lost.
        group = self._book.join(leased)
        limit = now_mono + self._limits.sample_timeout_s
        for member in leased.members:
            work = Work(
                member.lease,
                group,
                member.attempts,
                now_unix,
                limit,
                parked_bytes=member.parked_bytes,
            )
            self._start(work, member)

    def _start(self, work: Work, member: LeasedMember) -> None:
        if work.lease.id in self._works:
            self._book.leave(work.group)
            return
        if member.crashes:
            log.info("suspect_leased", lease=work.lease.id, crashes=member.crashes)
        self._works[work.lease.id] = work
        # The name tells the watchdog which sample holds the loop.
        work.task = asyncio.create_task(self._run(work), name=work.lease.id)

    # --- one member ------------------------------------------------------------------------------
    async def _run(self, work: Work) -> None:
        """Run one member to its end; the task's own runner, so nothing but cancellation leaves."""
        work.started = True
        lease = work.lease
        structlog.contextvars.bind_contextvars(
            group_index=group_id(lease.group_index), member=lease.member
        )
        try:
            ending = await self._rollout.run(work)
            if work.cause in (Cause.LOST, Cause.RUN_ENDED, Cause.DEADLINE):
                # The function swallowed our cancellation; its result came too late.
                ending = ending_of_cause(work.cause)
            await self._reporter.report(work, ending)
        except asyncio.CancelledError:
            # Where none of us cancelled it user code did, or the loop is closing (then nothing
            # is reported, and the lease expires).
            ending = _CANCELLED_ITSELF if work.cause is None else ending_of_cause(work.cause)
            self._reporter.end(work, ending)
            raise
        except GeneratorExit:  # the process ends, and this attempt had ignored its cancellation
            raise
        except BaseException as error:
            log.exception("rollout_bug", lease=work.lease.id)
            self._reporter.end(
                work, Ending(Report.RETRY, StopReason.AGENT_ERROR, error=describe(error))
            )
        finally:
            if work.task is not None and work.task in self._strays:
                self._strays.discard(work.task)
                self._reporter.left_behind(work)

    # --- the queue's answers ---------------------------------------------------------------------
    def _landed(self, work: Work, outcome: str) -> None:
        """Free the slot of a member whose report was answered."""
        if not work.group.is_evaluation:
            self._metrics.span("submit", time.monotonic() - work.submitted_mono_s)
        if outcome == "dup":
            self._metrics.duplicate_results_total.inc()
        if outcome == "fenced":
            self._metrics.fenced_results_total.inc()
            log.debug("result_fenced", lease=work.lease.id)
        elif outcome == "too_large":
            log.warning("result_too_large", lease=work.lease.id)
        elif outcome in DELIVERED:
            self._said = ""
        self._leave(work)

    def _leave(self, work: Work) -> None:
        if self._works.pop(work.lease.id, None) is None:
            return
        group = work.group
        self._book.leave(group)
        if self._limits.whole_groups:
            group.num_waiting += 1
            self._num_waiting += 1
            if group.members > 0:
                return
            self._num_waiting -= group.num_waiting
            group.num_waiting = 0
        self._freed.set()

    def held(self) -> list[str]:
        """Return the leases to beat for: all whose result is not on its way."""
        return [lease_id for lease_id, work in self._works.items() if not work.sent]

    def lost(self, lease_ids: Sequence[str] | None) -> None:
        """Stop what the queue says is no longer ours (None: all of it).

        A result in the backlog is sent all the same: its answer says what became of it.
        """
        asked = list(self._works) if lease_ids is None else lease_ids
        lost = [w for w in map(self._works.get, asked) if w is not None and not w.ended]
        for work in lost:
            work.cancel(Cause.LOST)
        if lost:
            log.info("leases_lost", leases=len(lost), first=lost[0].lease.id)

    # --- time ------------------------------------------------------------------------------------
    async def watch(self) -> None:
        """Enforce timeouts, and take back the slots of attempts that ignore cancellation.

        While the run is paused no attempt's time goes on.
        """
        before = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            passed_s, before = now - before, now
            if self._view.state == PAUSED:
                for work in self._works.values():
                    work.postpone(passed_s)
            for work in list(self._works.values()):
                if work.ended:
                    continue
                if work.cause is None and now >= work.deadline_mono_s:
                    work.cancel(Cause.DEADLINE)
                elif work.cause is not None and now >= work.cancelled_mono_s + STRAY_AFTER_S:
                    self._abandon(work, work.cause)
            self._metrics.inflight.set(len(self._works))

    def _abandon(self, work: Work, cause: Cause) -> None:
        log.warning("attempt_ignores_cancellation", lease=work.lease.id, cause=cause.value)
        if work.task is not None:
            self._strays.add(work.task)
        self._reporter.end(work, ending_of_cause(cause))

    def cancel_all(self, cause: Cause) -> None:
        """Stop every attempt."""
        for work in list(self._works.values()):
            work.cancel(cause)

    async def drain(
        self,
        finish_s: float,
        report_s: float,
        now: asyncio.Event | None = None,
        park: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Let attempts finish for `finish_s` or until `now`, send back the rest, and report.

        Args:
            finish_s: for attempts to come to their end.
            report_s: for the queue to answer; and before that for what is parked.
            now: ends the wait for attempts.
            park: stops calls in flight, whose attempts then park their members; without it nothing
                is parked. An attempt that does not end by itself within `report_s` (its tool runs
                on) is given back.

        Returns:
            How many members could not be reported within `report_s`; their leases expire.
        """
        self.stop()
        await self._until_idle(finish_s, now)
        if park is not None and self._works:
            self._gate.stop()
            await park()
            await self._until_idle(report_s, None)
        self.cancel_all(Cause.SHUTDOWN)
        await self._until_idle(report_s, None)
        return len(self._works)

    async def _until_idle(self, seconds: float, now: asyncio.Event | None) -> None:
        limit = time.monotonic() + seconds
        while self._works and (left := limit - time.monotonic()) > 0:
            if now is not None and now.is_set():
                return
            self._freed.clear()
            await self._wait(self._freed, min(left, IDLE_WAIT_S))

    # --- small -----------------------------------------------------------------------------------
    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        await self._bounded(event.wait(), seconds)

    async def _bounded(self, wait: Awaitable[object], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wait

    def _is_new(self, event: str) -> bool:
        """Return whether this was not said last: things are said once until they change."""
        before, self._said = self._said, event
        return event != before


_CANCELLED_ITSELF = Ending(
    Report.RETRY, StopReason.AGENT_ERROR, error="user code cancelled the task that it ran in"
)
