"""From endings to the queue: results, parked members and failures, batched, until answered.

Owns the backlog of reports and the calls that carry them. Never drops a report: an outage is waited
through (a repeated `complete` answers `dup`, a repeated `fail` or `park` answers `fenced`).
Invariant: a lease leaves the beat set when its result is written to Redis and not before; its
slot is free when the answer arrives; no rollout's cancellation reaches a result that is on its
way, because results travel in this module's own tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import ResponseError

from rollstream.errors import MemberReason, Report
from rollstream.link import OUTAGE, Link
from rollstream.queue import calls
from rollstream.queue.answers import CompleteAnswer
from rollstream.queue.calls import Completion, ScriptCall
from rollstream.queue.keys import MAX_COMPLETE_BYTES, MAX_MEMBERS_A_CALL
from rollstream.queue.queue import Queue

from .work import Work

DELIVERED = frozenset({"ok", "dup"})
GONE = "gone"
CALLS_IN_FLIGHT = 2
"""Calls on their way at once: while Redis stores one, the next is written (a sixth more samples/s;
a third brings nothing)."""
Landed = Callable[[Work, str], None]
"""Told once per report: `ok`, `dup`, `fenced`, `too_large` of a result; `parked` or `too_large` of
what is parked; `again`, `back`, `failed` of a failure; of the latter two also `gone` (the lease was
not ours any more, which is ignored)."""

log = structlog.get_logger("worker")


@dataclass(slots=True)
class _Result:
    work: Work
    completion: Completion | None
    other: ScriptCall[str] | None
    """A failure, or a park."""
    num_bytes: int = 0


class Submitter:
    """Carries results to Redis."""

    def __init__(self, queue: Queue, link: Link, landed: Landed) -> None:
        self._queue, self._link, self._landed = queue, link, landed
        self._backlog: deque[_Result] = deque()
        self._num_sent = 0
        self._some = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def complete(self, work: Work, header: bytes, body: bytes, text: bytes = b"") -> None:
        """Put one ended trajectory on its way."""
        completion = Completion(work.lease, header, body, text)
        self._put(_Result(work, completion, None, completion.num_bytes))

    def park(self, work: Work, body: bytes, delay_s: float = 0.0) -> None:
        """Put a member that goes on elsewhere on its way, with what it has."""
        call = calls.park(work.lease, body, delay_s=delay_s)
        self._put(_Result(work, None, call, len(body)))

    def fail(
        self,
        work: Work,
        report: Report,
        reason: MemberReason,
        error: str,
        delay_s: float = 0.0,
        *,
        forget: bool = False,
    ) -> None:
        """Put one failure or give-back on its way; `forget` what it has parked, too."""
        call = calls.fail(work.lease, report, reason, error, delay_s=delay_s, forget=forget)
        self._put(_Result(work, None, call))

    def _put(self, result: _Result) -> None:
        result.work.submitted_mono_s = time.monotonic()
        self._backlog.append(result)
        self._empty.clear()
        self._some.set()

    @property
    def num_unanswered(self) -> int:
        """Results that wait, or whose answer has not come yet."""
        return len(self._backlog) + self._num_sent

    async def drained(self) -> None:
        """Wait until every result was answered."""
        await self._empty.wait()

    async def run(self) -> None:
        """Carry results until cancelled."""
        async with asyncio.TaskGroup() as carriers:
            for _ in range(CALLS_IN_FLIGHT):
                carriers.create_task(self._carry())

    async def _carry(self) -> None:
        while True:
            # What ends in the same turn of the loop travels in the same call.
            await self._some.wait()
            while self._backlog:
                await self._send(self._take())
            self._some.clear()
            if not self._num_sent:
                self._empty.set()

    def _take(self) -> list[_Result]:
        """Take one call's worth: at most 128 results and 1 MB, but always one."""
        batch: list[_Result] = []
        num_bytes = 0
        while self._backlog and len(batch) < MAX_MEMBERS_A_CALL:
            size = self._backlog[0].num_bytes
            if batch and num_bytes + size > MAX_COMPLETE_BYTES:
                break
            num_bytes += size
            batch.append(self._backlog.popleft())
        return batch

    async def _send(self, batch: list[_Result]) -> None:
        """Send one batch until it is answered."""
        self._num_sent += len(batch)
        try:
            await self._until_answered(batch)
        finally:
            self._num_sent -= len(batch)

    async def _until_answered(self, batch: list[_Result]) -> None:
        while True:
            for result in batch:
                result.work.sent = True
            try:
                outcomes = await self._call(batch)
            except OUTAGE as error:
                # Whether it landed is unknown: beat on, so that the lease outlives the outage.
                for result in batch:
                    result.work.sent = False
                await asyncio.sleep(self._link.failed(error))
            except ResponseError as error:
                await self._send_apart(batch, error)
                return
            else:
                self._link.worked()
                for result, outcome in zip(batch, outcomes, strict=True):
                    self._landed(result.work, outcome)
                return

    async def _call(self, batch: list[_Result]) -> list[str]:
        completions = [r.completion for r in batch if r.completion is not None]
        asked: list[ScriptCall[Any]] = [r.other for r in batch if r.other is not None]
        if completions:
            asked.append(calls.complete(completions))
        answers: list[Any] = await self._queue.call_many(asked)
        landed = iter(answers.pop() if completions else ())
        others = iter(answers)
        return [
            _sent_back(next(others)) if r.completion is None else _outcome(next(landed))
            for r in batch
        ]

    async def _send_apart(self, batch: list[_Result], error: ResponseError) -> None:
        """Find the result that Redis cannot take, and fail that member alone."""
        if len(batch) > 1:
            for result in batch:
                await self._send([result])
            return
        result = batch[0]
        log.error("result_refused", lease=result.work.lease.id, error=str(error))
        if result.completion is None and not result.num_bytes:
            self._landed(result.work, GONE)
            return
        message = f"Redis refused the result: {error}"
        failure = calls.fail(result.work.lease, Report.FINAL, MemberReason.TOO_LARGE, message)
        await self._send([_Result(result.work, None, failure)])


def _sent_back(answer: str) -> str:
    # A failure or a park that comes too late says nothing that the queue does not know.
    return GONE if answer == "fenced" else answer


def _outcome(answer: CompleteAnswer) -> str:
    return answer.outcome
