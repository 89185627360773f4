"""The aggregator: reads full groups, judges them, and says so to the queue.

Owns the reading, the take-over of what another aggregator left, and the batching of verdicts.
Never holds a group: until its verdict is answered, a group is pending in Redis and anybody may
judge it again. Invariants: a verdict is fenced by the entry it judged, so two aggregators never
decide twice; a group whose judgement was begun or broke three times is dropped as `filter_error`
rather than tried for ever.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
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

from ..telemetry.metrics import Metrics
from .judge import KEEP, EnvJudge, FilterError, Verdict, judge, view_of

CONSUMER = "aggregator"
"""One fixed name for all aggregators: names per process would pile up for ever in Redis."""
BATCH = 32
BLOCK_S = 0.5
BUSY_GROUPS = 3
GATHER_S = 0.003
TRIES = 3

log = structlog.get_logger("aggregator")


@dataclass(frozen=True, slots=True)
class AggregatorLimits:
    """The numbers of an aggregator."""

    claim_idle_s: float = 30.0
    """An entry that nobody judged for so long is taken over."""
    stop_on_filter_error: bool = False


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
    ) -> None:
        self._queue, self._link, self._envs = queue, link, envs
        self._metrics, self._limits = metrics, limits
        self._stopping = False
        # One environment whose filters look at headers only needs no prompt at all.
        self._only = next(iter(envs.values())) if len(envs) == 1 else None
        self._reads_prompts = self._only is None or not all(f.built_in for f in self._only.filters)

    async def run(self) -> None:
        """Read and judge until stopped or cancelled."""
        next_claim = 0.0
        while not self._stopping:
            if time.monotonic() >= next_claim:
                await self._take_over()
                next_claim = time.monotonic() + self._limits.claim_idle_s / 3
            entries = await self._link.answered(
                lambda: self._queue.read_full(CONSUMER, count=BATCH, block_s=BLOCK_S)
            )
            if entries:
                await self.judge_entries(entries)
            if len(entries) >= BUSY_GROUPS:
                # Many end at once: a moment's wait makes one batch of what would be several.
                await asyncio.sleep(GATHER_S)

    def stop(self) -> None:
        """Take nothing more in hand; what is, is judged, or it would idle until a takeover."""
        self._stopping = True

    async def _take_over(self) -> None:
        while True:
            entries = await self._link.answered(
                lambda: self._queue.claim_full(
                    CONSUMER, idle_s=self._limits.claim_idle_s, count=BATCH
                )
            )
            if entries:
                log.info("groups_taken_over", groups=len(entries))
                await self.judge_entries(entries)
            if len(entries) < BATCH:
                return

    async def judge_entries(self, entries: Sequence[StreamEntry]) -> None:
        """Judge these entries: one round trip for their headers, one for all verdicts."""
        stored = await self._link.answered(
            lambda: self._queue.headers(entries, prompts=self._reads_prompts)
        )
        verdicts: list[ScriptCall[str]] = []
        judged: list[tuple[str, Verdict]] = []
        for entry, group in zip(entries, stored, strict=True):
            env_name, verdict = await self._judge_one(entry, group)
            judged.append((env_name, verdict))
            verdicts.append(
                calls.verdict(
                    entry.group_index, entry.message_id, drop=verdict.drop, detail=verdict.detail
                )
            )
        answers = await self._link.answered(lambda: self._queue.call_many(verdicts))
        for (env_name, verdict), answer in zip(judged, answers, strict=True):
            if answer != "noop":
                self._metrics.group_judged(env_name, verdict.drop)
        await self._stop_if_asked(judged)

    async def _judge_one(self, entry: StreamEntry, stored: StoredGroup) -> tuple[str, Verdict]:
        if not stored.n or not stored.headers:
            return "", KEEP  # it is gone: the verdict deletes the entry and changes nothing
        if entry.deliveries > TRIES:
            return "", self._filter_error(entry, "its judgement never ended: tried three times")
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
        prompt = decode_prompt(stored.prompt, int(stored.group_index), stored.n)
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
        for member, body, text in zip(view.members, full.bodies, full.texts, strict=True):
            if body is not None:
                member.trajectory = decode_body(body, prompt, text)

    def _filter_error(self, entry: StreamEntry, error: str) -> Verdict:
        log.error("filter_error", group_index=entry.group_index, error=error)
        return Verdict(DropReason.FILTER_ERROR, error)

    async def _stop_if_asked(self, judged: Sequence[tuple[str, Verdict]]) -> None:
        if not self._limits.stop_on_filter_error:
            return
        broken = [v.detail for _, v in judged if v.drop is DropReason.FILTER_ERROR]
        if broken:
            failed = calls.fail_run(f"filter_error: {broken[0]}")
            await self._link.answered(lambda: self._queue.call(failed))
