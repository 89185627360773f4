"""How endings are reported: encoded, counted, delayed where another try should wait, and sent.

Owns the one decision about each member (result, park, give-back or failure) and what follows from
it for the run: refusals in a row, engines that stop everything. Never runs a member and never waits
for an answer: `submit.Submitter` carries reports. Invariant: a member is reported once, whatever
its task does afterwards, and what has no wire form fails that member alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from rollstream.errors import STATUS_OF, MemberReason, Report, Status, StopReason, WireError
from rollstream.group import Trajectory
from rollstream.link import Link
from rollstream.logs import group_id
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.sample import Sample
from rollstream.wire import encode_body, encode_header, encode_text

from ..bounded import in_thread
from ..telemetry.metrics import Metrics
from .failures import Failures
from .gate import Gate
from .parked import parked_body
from .submit import Submitter
from .view import RunView
from .work import MAX_ERROR_CHARS, Ending, Work, leaves_of, worst_leaf

LONG_TEXT_CHARS = 8192
"""Longer responses are compressed in a thread (zlib releases the GIL)."""
RETRY_DELAY_MAX_S = 60.0
NO_ENGINE_DELAY_S = 1.0
ABORT_DELAY_S = 0.1
ABORT_DELAY_MAX_S = 10.0
ABORT_SOON_S = 2.0
"""An attempt that ran for longer before it was stopped got somewhere: its wait begins anew."""
MAX_ABORTED = 8192
"""Members whose aborts in a row are remembered."""
_ENDED_WELL = (Status.COMPLETED, Status.TRUNCATED)

log = structlog.get_logger("worker")


class Health(Protocol):
    """What is asked of the engines."""

    def healthy(self) -> bool:
        """Return whether at least one engine takes requests."""
        ...


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """The numbers of reporting."""

    retry_delay_s: float
    fail_after_groups: int
    envs: tuple[str, ...] = ("default",)
    """Environments that get groups."""
    all_come: bool = False
    """Each of them does, for certain."""


class Reporter:
    """Reports the endings of a worker's members."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        view: RunView,
        submitter: Submitter,
        *,
        gate: Gate,
        health: Health,
        limits: ReportLimits,
        metrics: Metrics,
        left: Callable[[Work], None],
    ) -> None:
        """Begin with nothing reported; `left` is told of members that nobody is told of."""
        self._queue, self._link, self._view, self._submitter = queue, link, view, submitter
        self._gate, self._health, self._limits = gate, health, limits
        self._metrics, self._left = metrics, left
        self._failures = Failures(limits.envs, limits.fail_after_groups, all_come=limits.all_come)
        self._said_alike = False
        """A line a group would fill the log; the metric counts them all."""
        self._failing: asyncio.Task[None] | None = None
        self._aborted: dict[tuple[str, int], int] = {}
        """Members by how often in a row an engine stopped them, by itself, here."""

    async def report(self, work: Work, ending: Ending) -> None:
        """Report how an attempt ended."""
        trajectory = ending.trajectory
        if ending.report is Report.COMPLETE and trajectory is not None:
            await self._complete(work, ending, trajectory)
        elif ending.report is Report.PARK and isinstance(trajectory, Sample):
            self._park(work, ending, trajectory)
        else:
            self.end(work, ending)

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
            self.end(work, _unsendable(ending, f"the result has no wire form: {error}"))
            return
        size = len(header) + len(body) + len(text)
        if size > self._view.max_body_bytes:
            self.end(work, _too_large(ending, self._size_text(size)))
            return
        if self._close(work):
            self._count(work, ending, delivered=True)
            self._aborted.pop((work.group.key, work.lease.member), None)
            self._submitter.complete(work, header, body, text)

    def _park(self, work: Work, ending: Ending, sample: Sample) -> None:
        """Send a member back with what it has."""
        try:
            body = parked_body(sample, work.resumes)
        except (WireError, UnicodeError) as error:
            log.warning("result_has_no_wire_form", lease=work.lease.id, error=str(error))
            self.end(work, _unsendable(ending, f"what it has has no wire form: {error}"))
            return
        if len(body) > self._view.max_body_bytes:
            self.end(work, _too_large(ending, self._size_text(len(body))))
            return
        if self._close(work):
            # What it has now is counted where it ends, as a part of that.
            self._metrics.parked_samples_total.inc()
            self._submitter.park(work, body, self._abort_delay(work))

    def end(self, work: Work, ending: Ending) -> None:
        """Report an ending that is not a result."""
        if not self._close(work):
            return
        self._count(work, ending, delivered=False)
        if ending.report is None:
            self._left(work)
            return
        report, reason, delay_s = ending.report, ending.reason, ending.delay_s
        if report is Report.RETRY:
            delay_s = self._retry_delay(work.attempts)
            if self._is_outage(ending):
                # No engine is the engines' fault, not this member's: nothing is charged.
                report, reason = Report.BACK, MemberReason.NO_ENGINE
                delay_s = NO_ENGINE_DELAY_S * random.uniform(0.5, 1.5)
        elif report is Report.BACK and ending.stop_reason is StopReason.ABORT_WEIGHTS:
            delay_s = self._abort_delay(work)
            if self._gate.stopped:
                reason = MemberReason.SHUTDOWN
        error = ending.error[:MAX_ERROR_CHARS]
        self._submitter.fail(work, report, reason, error, delay_s, forget=ending.forget)

    def _retry_delay(self, attempts: int) -> float:
        first = self._limits.retry_delay_s
        longest = max(first, RETRY_DELAY_MAX_S)
        return float(min(first * 2 ** min(attempts, 16), longest) * random.uniform(0.5, 1.5))

    def _abort_delay(self, work: Work) -> float:
        """Return how long an aborted member waits: not at all where the run asked for it.

        An engine that stops everything by itself would else be asked again and again at once. The
        run asked where the gate was shut as the attempt was stopped, though it may be open by now.
        """
        if self._gate.was_shut_at(_stopped_unix_s(work)):
            return 0.0
        key = (work.group.key, work.lease.member)
        ran_s = time.time() - work.leased_unix_s
        times = self._aborted.pop(key, 0) if ran_s < ABORT_SOON_S else 0
        if len(self._aborted) >= MAX_ABORTED:
            self._aborted.pop(next(iter(self._aborted)))
        self._aborted[key] = times + 1
        nominal = min(ABORT_DELAY_S * 2 ** min(times, 16), ABORT_DELAY_MAX_S)
        return float(nominal * random.uniform(0.5, 1.5))

    def _size_text(self, size: int) -> str:
        return f"{size} bytes; worker.max_body_bytes is {self._view.max_body_bytes}"

    # --- once ------------------------------------------------------------------------------------
    def _close(self, work: Work) -> bool:
        """Decide a member's ending once; False where it was decided before."""
        if work.ended:
            return False
        work.ended = True
        if work.resumes:
            self._metrics.resumed_samples_total.inc()
        now = time.time()
        work.lifecycle.setdefault("attempt_start", work.leased_unix_s)
        work.lifecycle.setdefault("attempt_end", now)
        return True

    def _count(self, work: Work, ending: Ending, *, delivered: bool) -> None:
        leaves = leaves_of(ending.trajectory) if ending.trajectory is not None else []
        if work.group.is_evaluation:
            self._metrics.evaluation_ended(ending.stop_reason)
            return
        env = work.group.group.env
        if ending.forget:
            self._metrics.resumes_exhausted_total.inc()
        stays = work.resumes and ending.report in (Report.BACK, Report.RETRY) and not ending.forget
        if stays:
            leaves = []  # its tokens are still parked: they are counted where it ends
        self._metrics.sample_ended(
            env, ending.stop_reason, leaves, delivered=delivered, version=self._view.version
        )
        if not leaves or not leaves[0].spans:
            self._metrics.spans(work.spans.spans[work.num_earlier_spans if stays else 0 :])
        work.num_counted_spans = len(work.spans.spans)
        self._note_outcome(work, ending, delivered and any(leaf.calls for leaf in leaves))
        if delivered and self._all_alike(work, ending):
            self._metrics.group_alike(env)
            if not self._said_alike:
                self._said_alike = True
                log.warning("members_sampled_the_same", group_index=group_id(work.group.key))

    def left_behind(self, work: Work) -> None:
        """Count what an attempt still did behind its ending, which it had ignored."""
        if not work.group.is_evaluation:
            self._metrics.spans(work.spans.spans[work.num_counted_spans :])

    def _note_outcome(self, work: Work, ending: Ending, has_calls: bool) -> None:
        """Count what an ending says of its environment; nothing where it says nothing."""
        env = work.group.group.env
        ended_well = STATUS_OF[ending.stop_reason] in _ENDED_WELL
        if has_calls:
            self._failures.answered(env)
        if ending.report in (Report.RETRY, Report.FINAL) or (
            ending.report is Report.COMPLETE and not ended_well
        ):
            if not self._is_outage(ending):
                self._note_failure(work, ending)
        elif has_calls:
            self._failures.worked(env)

    def _all_alike(self, work: Work, ending: Ending) -> bool:
        if ending.trajectory is None or not any(
            leaf.calls for leaf in leaves_of(ending.trajectory)
        ):
            return False
        return work.group.all_alike(ending.trajectory)

    def _is_outage(self, ending: Ending) -> bool:
        is_tried_again = ending.report is Report.RETRY
        no_answer = ending.stop_reason is StopReason.ENGINE_ERROR
        return is_tried_again and no_answer and not self._health.healthy()

    def _note_failure(self, work: Work, ending: Ending) -> None:
        message = ending.error
        if not message and ending.trajectory is not None:
            worst = worst_leaf(ending.trajectory)
            message = str(worst.metadata.get("error", ending.stop_reason))[:MAX_ERROR_CHARS]
        why = self._failures.failed(
            work.group.group.env, work.group.key, message, refused=ending.refused
        )
        if why and self._failing is None:
            log.error("engine_refuses_everything", error=message)
            self._failing = asyncio.create_task(self._fail_run(why))

    async def _fail_run(self, why: str) -> None:
        await self._link.answered(lambda: self._queue.call(calls.fail_run(why)))


def _stopped_unix_s(work: Work) -> float:
    """Return when the attempt's last call ended, else the attempt: what followed took its time."""
    for span in reversed(work.spans.spans[work.num_earlier_spans :]):
        if span.name == "generate":
            return span.start_unix_s + span.duration_s
    return work.lifecycle["attempt_end"]


def _unsendable(ending: Ending, message: str) -> Ending:
    return Ending(
        Report.FINAL, StopReason.AGENT_ERROR, ending.trajectory, MemberReason.AGENT_ERROR, message
    )


def _too_large(ending: Ending, message: str) -> Ending:
    return Ending(
        Report.FINAL, ending.stop_reason, ending.trajectory, MemberReason.TOO_LARGE, message
    )
