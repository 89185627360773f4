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

from rollstream.errors import DropReason, RolloutFault, WireError
from rollstream.group import GroupView, PromptGroup
from rollstream.link import Link
from rollstream.queue import calls
from rollstream.queue.calls import ScriptCall
from rollstream.queue.queue import Queue
from rollstream.queue.reads import StoredGroup, StreamEntry
from rollstream.wire import decode_body, decode_prompt

from ..members.work import place_of
from ..telemetry.metrics import Metrics
from .judge import KEEP, EnvJudge, FilterError, FilterHung, Verdict, judge, view_of

CONSUMER = "aggregator"
"""One fixed name for all aggregators: names per process would pile up for ever in Redis."""
BATCH = 32
BLOCK_S = 0.5
BUSY_GROUPS = 3
GATHER_S = 0.003
TRIES = 3
IDLE_LEASES = 2.0
KEEPS_AN_IDLE = 3
SLOW_S = 0.05
"""A judgement that takes longer goes on beside those behind it."""
MAX_SLOW = 32
"""Slow judgements at once; with so many, nothing more is read."""

log = structlog.get_logger("aggregator")


class _MovedOn(Exception):
    """The group was ended or requeued while it was judged."""


def _is_entry_of(stored: StoredGroup, entry: StreamEntry) -> bool:
    return stored.state == "full" and stored.full_id == entry.message_id


@dataclass(frozen=True, slots=True)
class AggregatorLimits:
    """The numbers of an aggregator."""

    claim_idle_s: float | None = None
    """An entry that nobody judged or kept for so long is taken over; None is two leases."""
    stop_on_filter_error: bool = False


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was decided on one entry."""

    entry: StreamEntry
    env: str
    verdict: Verdict


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
    ) -> None:
        self._queue, self._link, self._envs = queue, link, envs
        self._metrics, self._limits, self._lease_s = metrics, limits, lease_s
        self._stopping = False
        self._in_hand: set[str] = set()
        self._slow: set[asyncio.Task[None]] = set()
        self._runs_user_code = any(env.runs_user_code for env in envs.values())
        # One environment whose filters look at headers only needs no prompt at all.
        self._only = next(iter(envs.values())) if len(envs) == 1 else None
        self._reads_prompts = self._only is None or self._runs_user_code

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
            log.info("group_taken_over", group=entry.group_index, deliveries=entry.deliveries)
            is_suspect = self._runs_user_code and entry.deliveries >= TRIES
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
            lambda: self._queue.headers(entries, prompts=self._reads_prompts)
        )
        judged: list[_Judged] = []
        for entry, group in zip(entries, stored, strict=True):
            if not self._runs_user_code:
                judged.append(_Judged(entry, *await self._judge_one(entry, group)))
                continue
            judging = asyncio.create_task(
                self._judge_one(entry, group), name=f"judge {entry.group_index}"
            )
            try:
                done, _ = await asyncio.wait((judging,), timeout=SLOW_S)
            except asyncio.CancelledError:
                judging.cancel()
                raise
            if done:
                judged.append(_Judged(entry, *judging.result()))
            else:
                self._slow.add(asyncio.create_task(self._judge_slowly(entry, judging)))
        await self._tell(judged)

    async def _judge_slowly(
        self, entry: StreamEntry, judging: asyncio.Task[tuple[str, Verdict]]
    ) -> None:
        await self._tell([_Judged(entry, *await judging)])

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
                one.entry.group_index,
                one.entry.message_id,
                drop=one.verdict.drop,
                detail=one.verdict.detail,
            )
            for one in judged
        ]
        answers = await self._link.answered(lambda: self._queue.call_many(verdicts))
        for one, answer in zip(judged, answers, strict=True):
            self._in_hand.discard(one.entry.message_id)
            if answer != "noop":
                self._metrics.group_judged(one.env, one.verdict.drop)
        await self._stop_if_asked(judged)

    async def _judge_one(self, entry: StreamEntry, stored: StoredGroup) -> tuple[str, Verdict]:
        if not _is_entry_of(stored, entry):
            return "", KEEP  # it moved on: the verdict deletes the entry and changes nothing
        if entry.deliveries > TRIES:
            return "", self._filter_error(
                entry,
                f"its judgement never ended: {TRIES} aggregators had it and died or stood still",
            )
        error = ""
        env_name = ""
        for _ in range(TRIES):
            try:
                env, prompt = self._env_of(stored)
                env_name = env.name
                view = view_of(stored, env, prompt.metadata if prompt is not None else {})
                fill = functools.partial(self._fill, view, stored, prompt)
                verdict = await judge(view, env, stored.why, fill)
                self._note_waits(entry, view)
                return env_name, verdict
            except _MovedOn:
                return env_name, KEEP
            except FilterHung as raised:
                error = str(raised)
                break
            except (FilterError, WireError, RolloutFault, LookupError) as raised:
                error = str(raised)
        return env_name, self._filter_error(entry, error)

    def _note_waits(self, entry: StreamEntry, view: GroupView) -> None:
        for member in view.members:
            if member.header is not None and member.header.done_unix_s:
                waited_s = entry.unix_s - member.header.done_unix_s
                self._metrics.span("group_wait", max(0.0, waited_s))

    def _env_of(self, stored: StoredGroup) -> tuple[EnvJudge, PromptGroup | None]:
        if not self._reads_prompts and self._only is not None:
            return self._only, None
        if stored.prompt is None:
            raise WireError(f"group {stored.group_index} has no prompt record")
        prompt = decode_prompt(stored.prompt, place_of(stored.group_index), stored.n)
        env = self._envs.get(prompt.env)
        if env is None:
            raise LookupError(
                f"environment {prompt.env!r} is not configured here; known: {sorted(self._envs)}"
            )
        return env, prompt

    async def _fill(self, view: GroupView, stored: StoredGroup, prompt: PromptGroup | None) -> None:
        """Give a filter that asked for bodies the members' trajectories."""
        if prompt is None:
            raise WireError(f"group {stored.group_index} has no prompt record")
        ids = [(stored.group_index, stored.n)]
        (full,) = await self._link.answered(lambda: self._queue.groups(ids, text=True))
        # Their state is read behind the bodies.
        if (full.state, full.full_id) != (stored.state, stored.full_id):
            raise _MovedOn
        for member, body, text in zip(view.members, full.bodies, full.texts, strict=True):
            if body is not None:
                member.trajectory = decode_body(body, prompt, text)

    def _filter_error(self, entry: StreamEntry, error: str) -> Verdict:
        log.error("filter_error", group_index=entry.group_index, error=error)
        return Verdict(DropReason.FILTER_ERROR, error)

    async def _stop_if_asked(self, judged: Sequence[_Judged]) -> None:
        if not self._limits.stop_on_filter_error:
            return
        broken = [j.verdict.detail for j in judged if j.verdict.drop is DropReason.FILTER_ERROR]
        if broken:
            failed = calls.fail_run(f"filter_error: {broken[0]}")
            await self._link.answered(lambda: self._queue.call(failed))
