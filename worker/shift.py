"""The shift: the long-lived coroutine that leases as many members as it has free slots.

Owns the slots, the lease call numbers, and one task per member. Never renders, generates or talks
to an engine: `rollout.py` does, and `submit.py` reports. Invariants: a slot is taken at the lease
and free when its report was answered, whatever its group does; call number k+1 is used only after
call k was answered; a member's fault, hang or cancellation changes no other member.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from rollstream.errors import MemberReason, Report, StopReason, WireError
from rollstream.group import Trajectory
from rollstream.link import Link
from rollstream.queue import calls
from rollstream.queue.answers import LeasedGroup, LeasedMember
from rollstream.queue.keys import MAX_LEASE
from rollstream.queue.queue import Queue
from rollstream.wire import encode_body, encode_header, encode_text

from .bounded import in_thread
from .functions import describe
from .groups import GroupBook
from .heart import LOST, OVER, RunView
from .rollout import Rollout
from .submit import DELIVERED, Submitter
from .telemetry.metrics import Metrics
from .work import (
    MAX_ERROR_CHARS,
    Cause,
    Ending,
    Work,
    ending_of_cause,
    leaves_of,
)

ABORTING = "aborting"
"""The state of a run whose groups are being dropped: nothing that it runs counts any more."""
PAUSED = "paused"
GATHER_S = 0.002
"""How long free slots wait for more of them while results are on their way."""
BELL_WAIT_S = 0.5
IDLE_WAIT_S = 0.2
WATCH_INTERVAL_S = 0.1
STRAY_AFTER_S = 5.0
"""A cancelled attempt that still runs after this has ignored it: its slot is taken back."""
LONG_TEXT_CHARS = 8192
"""Longer responses are compressed in a thread (zlib releases the GIL)."""
RETRY_DELAY_MAX_S = 60.0
NO_ENGINE_DELAY_S = 1.0

log = structlog.get_logger("worker")


def new_incarnation() -> str:
    """Return the identity of this process: 12 hex, new at every start, never reused."""
    return secrets.token_hex(6)


class Health(Protocol):
    """What the shift asks of the engines."""

    def healthy(self) -> bool:
        """Return whether at least one engine takes requests."""
        ...


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    """The numbers of a shift."""

    slots: int
    sample_timeout_s: float
    retry_delay_s: float
    fail_after_groups: int


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
    ) -> None:
        self._queue, self._link, self._view, self._name = queue, link, view, name
        self._rollout, self._book, self._health = rollout, book, health
        self._limits, self._metrics = limits, metrics
        self.submitter = Submitter(queue, link, self._landed)
        self._works: dict[str, Work] = {}
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ringing: asyncio.Task[bool] | None = None
        self._call_no = 0
        self._refused: set[str] = set()
        self._said_alike = False
        """A line a group would fill the log; the metric counts them all."""
        self._failing: asyncio.Task[None] | None = None
        self._strays: set[asyncio.Task[None]] = set()
        self._said = ""
        self._worthwhile = min(32, limits.slots // 4)
        metrics.concurrency_limit.set(limits.slots)

    # --- leasing ---------------------------------------------------------------------------------
    @property
    def num_busy(self) -> int:
        """Slots that are taken."""
        return len(self._works)

    async def run(self) -> str:
        """Lease and run members; return the state in which the run is over, or "" if stopped."""
        while not self._stopping.is_set():
            if self._view.state in OVER:
                return self._view.state
            if self._view.state == ABORTING:
                self.cancel_all(Cause.RUN_ENDED)
            free = self._limits.slots - len(self._works)
            if 0 < free < self._worthwhile and self.submitter.num_unanswered > free:
                # More slots are about to come free: one call for them all.
                await self._wait(self._freed, GATHER_S)
                self._freed.clear()
                free = self._limits.slots - len(self._works)
            if free <= 0:
                await self._wait(self._freed, IDLE_WAIT_S)
                self._freed.clear()
            elif not self._health.healthy():
                self._say("no_engine", "no healthy engine: nothing is leased")
                await self._wait(self._stopping, IDLE_WAIT_S)
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

    async def _idle(self, state: str) -> None:
        if state == LOST:
            self._say("run_lost", "Redis does not know the run (any more): waiting for `open`")
            self.cancel_all(Cause.LOST)
        if state not in OVER:
            await self._wait(self._stopping, IDLE_WAIT_S)

    def _take(self, leased: LeasedGroup, now_mono: float, now_unix: float) -> None:
        # The group's own deadline is the queue's business: its clock stands still in a pause and
        # in an outage. When it has passed, the next beat reports the group's members lost.
        group = self._book.join(leased)
        limit = now_mono + self._limits.sample_timeout_s
        for member in leased.members:
            self._start(Work(member.lease, group, member.attempts, now_unix, limit), member)

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
        try:
            ending = await self._rollout.run(work)
            if work.cause in (Cause.LOST, Cause.RUN_ENDED, Cause.DEADLINE):
                # The function swallowed our cancellation; its result came too late.
                ending = ending_of_cause(work.cause)
            if ending.report is Report.COMPLETE and ending.trajectory is not None:
                await self._complete(work, ending, ending.trajectory)
            else:
                self._end(work, ending)
        except asyncio.CancelledError:
            # Where none of us cancelled it user code did, or the loop is closing (then nothing
            # is reported, and the lease expires).
            ending = _CANCELLED_ITSELF if work.cause is None else ending_of_cause(work.cause)
            self._end(work, ending)
            raise
        except BaseException as error:
            log.exception("rollout_bug", lease=work.lease.id)
            self._end(work, Ending(Report.RETRY, StopReason.AGENT_ERROR, error=describe(error)))
        finally:
            if work.task is not None:
                self._strays.discard(work.task)

    async def _complete(self, work: Work, ending: Ending, trajectory: Trajectory) -> None:
        leaves = leaves_of(trajectory)
        text = b""
        try:
            if sum(len(leaf.response) for leaf in leaves) > LONG_TEXT_CHARS:
                text = await in_thread(encode_text, trajectory)
            else:
                text = encode_text(trajectory)
            body = encode_body(trajectory)
            header = encode_header(
                trajectory,
                num_turns=sum(len(leaf.calls) for leaf in leaves),
                done_unix_s=time.time(),
                attempts=work.attempts,
            )
        except (WireError, UnicodeError) as error:
            log.warning("result_has_no_wire_form", lease=work.lease.id, error=str(error))
            self._end(work, _unsendable(ending, f"the result has no wire form: {error}"))
            return
        size = len(header) + len(body) + len(text)
        if size > self._view.max_body_bytes:
            message = f"{size} bytes; worker.max_body_bytes is {self._view.max_body_bytes}"
            self._end(work, _too_large(ending, message))
            return
        if self._close(work):
            self._count(work, ending, delivered=True)
            self.submitter.complete(work, header, body, text)

    def _end(self, work: Work, ending: Ending) -> None:
        """Report an ending that is not a result."""
        if not self._close(work):
            return
        self._count(work, ending, delivered=False)
        if ending.report is None:
            self._leave(work)
            return
        report, reason, delay_s = ending.report, ending.reason, ending.delay_s
        if report is Report.RETRY:
            delay_s = self._retry_delay(work.attempts)
            if ending.stop_reason is StopReason.ENGINE_ERROR and not self._health.healthy():
                # No engine is the engines' fault, not this member's: nothing is charged.
                report, reason = Report.BACK, MemberReason.NO_ENGINE
                delay_s = NO_ENGINE_DELAY_S * random.uniform(0.5, 1.5)
        self.submitter.fail(work, report, reason, ending.error[:MAX_ERROR_CHARS], delay_s)

    def _retry_delay(self, attempts: int) -> float:
        first = self._limits.retry_delay_s
        longest = max(first, RETRY_DELAY_MAX_S)
        return float(min(first * 2 ** min(attempts, 16), longest) * random.uniform(0.5, 1.5))

    def _close(self, work: Work) -> bool:
        """Decide a member's ending once; False where it was decided before."""
        if work.ended:
            return False
        work.ended = True
        now = time.time()
        work.lifecycle.setdefault("attempt_start", work.leased_unix_s)
        work.lifecycle.setdefault("attempt_end", now)
        return True

    def _count(self, work: Work, ending: Ending, *, delivered: bool) -> None:
        env = work.group.group.env
        leaves = leaves_of(ending.trajectory) if ending.trajectory is not None else []
        self._metrics.sample_ended(env, ending.stop_reason, leaves, delivered=delivered)
        if not leaves or not leaves[0].spans:
            for span in work.spans.spans:
                self._metrics.span(span.name, span.duration_s)
        if ending.refused:
            self._note_refusal(work.group.key, ending.error)
        elif delivered and any(leaf.calls for leaf in leaves):
            self._refused.clear()
            if ending.trajectory is not None and work.group.all_alike(ending.trajectory):
                self._metrics.group_alike(env)
                if not self._said_alike:
                    self._said_alike = True
                    log.warning("members_sampled_the_same", group=work.group.key)

    def _note_refusal(self, key: str, message: str) -> None:
        self._refused.add(key)
        if len(self._refused) == self._limits.fail_after_groups:
            log.error("engine_refuses_everything", groups=len(self._refused), error=message)
            self._failing = asyncio.create_task(self._fail_run(message))

    async def _fail_run(self, message: str) -> None:
        reason = f"{len(self._refused)} groups in a row were refused, the last one: {message}"
        await self._link.answered(lambda: self._queue.call(calls.fail_run(reason)))

    # --- the queue's answers ---------------------------------------------------------------------
    def _landed(self, work: Work, outcome: str) -> None:
        """Free the slot of a member whose report was answered."""
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
        if self._works.pop(work.lease.id, None) is not None:
            self._book.leave(work.group)
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
        self._end(work, ending_of_cause(cause))

    def cancel_all(self, cause: Cause) -> None:
        """Stop every attempt."""
        for work in list(self._works.values()):
            work.cancel(cause)

    async def drain(
        self, finish_s: float, report_s: float, now: asyncio.Event | None = None
    ) -> int:
        """Let attempts finish for `finish_s` or until `now`, give back the rest, and report.

        Returns:
            How many members could not be reported within `report_s`; their leases expire.
        """
        self.stop()
        await self._until_idle(finish_s, now)
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def _say(self, event: str, message: str) -> None:
        """Say something once until it changes."""
        if self._said != event:
            self._said = event
            log.warning(event, message=message)


_CANCELLED_ITSELF = Ending(
    Report.RETRY, StopReason.AGENT_ERROR, error="user code cancelled the task that it ran in"
)


def _unsendable(ending: Ending, message: str) -> Ending:
    return Ending(
        Report.FINAL, StopReason.AGENT_ERROR, ending.trajectory, MemberReason.AGENT_ERROR, message
    )


def _too_large(ending: Ending, message: str) -> Ending:
    return Ending(
        Report.FINAL, ending.stop_reason, ending.trajectory, MemberReason.TOO_LARGE, message
    )
