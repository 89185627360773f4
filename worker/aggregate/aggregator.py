"""The aggregator: reads full groups, judges them, and says so to the queue.

Owns the reading, the take-over of what another aggregator left, and the batching of verdicts.
Never holds a group: until its verdict is answered, a group is pending in Redis and anybody may
judge it again. Invariants: a verdict is fenced by the entry it judged, so two aggregators never
decide twice; a group whose judgement was begun or broke three times is dropped as `filter_error`
rather than tried for ever; a group that ends aggregators ends alone, and one whose filter is slow
delays no other.

What an aggregator has in hand it keeps, as a worker keeps its leases: by saying so before a third
of the idle time has passed. So only what a dead or frozen one left is taken over, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from rollstream.errors import DropReason
from rollstream.link import Link
from rollstream.logs import group_id
from rollstream.queue import calls
from rollstream.queue.calls import ScriptCall
from rollstream.queue.queue import Queue
from rollstream.queue.reads import StreamEntry
from rollstream.sample import UNKNOWN_VERSION

from ..telemetry.metrics import Metrics
from .judge import EnvJudge
from .judging import TRIES, Judgement, Judging, reward_troubles

CONSUMER = "aggregator"
"""One fixed name for all aggregators: names per process would pile up for ever in Redis."""
BATCH = 32
BLOCK_S = 0.5
BUSY_GROUPS = 3
GATHER_S = 0.003
IDLE_LEASES = 2.0
KEEPS_AN_IDLE = 3
SLOW_S = 0.05
"""A judgement that takes longer goes on beside those behind it."""
MAX_SLOW = 32
"""Slow judgements at once; with so many, nothing more is read."""

log = structlog.get_logger("aggregator")


@dataclass(frozen=True, slots=True)
class AggregatorLimits:
    """The numbers of an aggregator."""

    claim_idle_s: float | None = None
    """An entry that nobody judged or kept for so long is taken over; None is two leases."""
    stop_on_filter_error: bool = False


_Judged = tuple[StreamEntry, Judgement]


class Aggregator:
    """Judges full groups until cancelled."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        envs: Mapping[str, EnvJudge],
        *,
        metrics: Metrics,
        limits: AggregatorLimits = AggregatorLimits(),
        lease_s: Callable[[], float] = lambda: 15.0,
        version: Callable[[], int] = lambda: UNKNOWN_VERSION,
    ) -> None:
        self._queue, self._link, self._version = queue, link, version
        self._judging = Judging(queue, link, envs, metrics)
        self._metrics, self._limits, self._lease_s = metrics, limits, lease_s
        self._stopping = False
        self._in_hand: set[str] = set()
        self._slow: set[asyncio.Task[None]] = set()

    @property
    def idle_s(self) -> float:
        """After how long an entry that nobody judged or kept is taken over."""
        own = self._limits.claim_idle_s
        return IDLE_LEASES * self._lease_s() if own is None else own

    async def run(self) -> None:
        """Read and judge until stopped or cancelled."""
        async with self._kept() as keeping:
            next_claim = 0.0
            while not self._stopping:
                if keeping.done():
                    keeping.result()
                if time.monotonic() >= next_claim:
                    await self._take_over()
                    next_claim = time.monotonic() + self.idle_s / 3
                entries = await self._link.answered(
                    lambda: self._queue.read_full(CONSUMER, count=BATCH, block_s=BLOCK_S)
                )
                if entries:
                    await self._judge(entries)
                await self._settle(MAX_SLOW)
                if len(entries) >= BUSY_GROUPS:
                    # Many end at once: a moment's wait makes one batch of what would be several.
                    await asyncio.sleep(GATHER_S)
            await self._settle(0)

    def stop(self) -> None:
        """Take nothing more in hand; what is, is judged, or it would idle until a takeover."""
        self._stopping = True

    @contextlib.asynccontextmanager
    async def _kept(self) -> AsyncIterator[asyncio.Task[None]]:
        """Keep what is in hand as long as the block runs, and end what it started with it."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield keeping
        finally:
            left = [keeping, *self._slow]
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            self._slow.clear()

    async def _keep(self) -> None:
        """Begin the idle time of what is in hand anew, before anybody takes it over."""
        while True:
            await asyncio.sleep(max(self.idle_s / KEEPS_AN_IDLE, SLOW_S))
            kept = sorted(self._in_hand)
            if kept:  # else nothing is asked, and no answer says that Redis is back
                await self._link.answered(functools.partial(self._queue.keep_full, CONSUMER, kept))

    async def _take_over(self) -> None:
        """Judge what a dead aggregator left.

        One at a time, and what was left twice already with nothing else in hand: where a group ends
        its aggregator again, only that group was handed out once more for it.
        """
        while not self._stopping:
            entries = await self._link.answered(
                lambda: self._queue.claim_full(CONSUMER, idle_s=self.idle_s, count=1)
            )
            if not entries:
                return
            (entry,) = entries
            if entry.message_id in self._in_hand:  # we were frozen for longer than the idle time
                continue
            log.info(
                "group_taken_over",
                group_index=group_id(entry.group_index),
                deliveries=entry.deliveries,
            )
            self._in_hand.add(entry.message_id)  # kept while it waits for its turn, too
            is_suspect = self._judging.runs_user_code and entry.deliveries >= TRIES
            if is_suspect:
                await self._settle(0)
            await self._judge(entries)
            await self._settle(0 if is_suspect else MAX_SLOW)

    # --- judging ---------------------------------------------------------------------------------
    async def judge_entries(self, entries: Sequence[StreamEntry]) -> None:
        """Judge these entries to the end."""
        await self._judge(entries)
        await self._settle(0)

    async def _judge(self, entries: Sequence[StreamEntry]) -> None:
        """Judge entries: one round trip for their headers, one for all quick verdicts."""
        self._in_hand.update(entry.message_id for entry in entries)
        stored = await self._link.answered(
            lambda: self._queue.headers(entries, prompts=self._judging.reads_prompts)
        )
        judged: list[_Judged] = []
        for entry, group in zip(entries, stored, strict=True):
            if not self._judging.runs_user_code:
                judged.append((entry, await self._judging.judge(entry, group)))
                continue
            judging = asyncio.create_task(
                self._judging.judge(entry, group), name=f"judge {entry.group_index}"
            )
            try:
                done, _ = await asyncio.wait((judging,), timeout=SLOW_S)
            except asyncio.CancelledError:
                judging.cancel()
                raise
            if done:
                judged.append((entry, judging.result()))
            else:
                self._slow.add(asyncio.create_task(self._judge_slowly(entry, judging)))
        await self._tell(judged)

    async def _judge_slowly(self, entry: StreamEntry, judging: asyncio.Task[Judgement]) -> None:
        await self._tell([(entry, await judging)])

    async def _settle(self, allowed: int) -> None:
        """Wait until at most `allowed` slow judgements are left; raise what broke one."""
        while self._slow:
            done = {task for task in self._slow if task.done()}
            self._slow -= done
            for task in done:
                task.result()
            if len(self._slow) <= allowed:
                return
            await asyncio.wait(self._slow, return_when=asyncio.FIRST_COMPLETED)

    async def _tell(self, judged: Sequence[_Judged]) -> None:
        """Send verdicts, in one round trip."""
        if not judged:
            return
        verdicts: list[ScriptCall[str]] = [
            calls.verdict(
                entry.group_index,
                entry.message_id,
                drop=judgement.verdict.drop,
                detail=judgement.verdict.detail,
                headers=judgement.headers,
            )
            for entry, judgement in judged
        ]
        answers = await self._link.answered(lambda: self._queue.call_many(verdicts))
        for (entry, judgement), answer in zip(judged, answers, strict=True):
            self._in_hand.discard(entry.message_id)
            if answer != "noop":
                self._metrics.guard.run(functools.partial(self._count, judgement))
        await self._stop_if_asked(judged)

    def _count(self, judgement: Judgement) -> None:
        self._metrics.group_judged(judgement.env, judgement.verdict.drop)
        if judgement.view is not None:
            is_kept = judgement.verdict.drop is None
            self._metrics.outcomes.members_judged(
                judgement.env, judgement.view.members, is_kept=is_kept, version=self._version()
            )
        for detail in reward_troubles(judgement):
            self._metrics.outcomes.reward_error(detail)

    async def _stop_if_asked(self, judged: Sequence[_Judged]) -> None:
        if not self._limits.stop_on_filter_error:
            return
        verdicts = [judgement.verdict for _, judgement in judged]
        broken = [v.detail for v in verdicts if v.drop is DropReason.FILTER_ERROR]
        if broken:
            failed = calls.fail_run(f"filter_error: {broken[0]}")
            await self._link.answered(lambda: self._queue.call(failed))
