"""The heart of a worker: one call that keeps every lease alive, and the sweep of what came due.

Owns the rhythm (a third of a lease) and what the worker believes about its run. Never decides
what a lost lease means: it tells the shift. Invariant: every held lease is extended in the same
call, and a worker that lost touch with Redis re-registers itself with its next beat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rollstream.queue import calls
from rollstream.queue.calls import ScriptCall, SweepAnswer
from rollstream.queue.keys import SWEEP_PAGE
from rollstream.queue.queue import Queue

from .link import OUTAGE, Link
from .telemetry.metrics import Metrics

BEATS_A_LEASE = 3
LOST = "lost"
"""The answer of a Redis that has no such run."""

log = structlog.get_logger("worker")


@dataclass(slots=True)
class RunView:
    """What this worker knows of its run; every answer of Redis renews it."""

    state: str = "unknown"
    version: int = 0
    control_seq: int = 0
    lease_s: float = 15.0
    max_body_bytes: int = 16 << 20

    def saw(self, state: str, version: int, control_seq: int) -> None:
        """Take over what an answer said."""
        if state in (LOST, "old"):
            self.state = LOST if state == LOST else self.state
            return
        if state != self.state:
            log.info("run_state", state=state, before=self.state)
        self.state, self.version, self.control_seq = state, version, control_seq


class Heart:
    """Beats for all leases of one worker."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        view: RunView,
        *,
        name: str,
        held: Callable[[], Sequence[str]],
        lost: Callable[[Sequence[str] | None], None],
        metrics: Metrics,
    ) -> None:
        self._queue, self._link, self._view, self._name = queue, link, view, name
        self._held, self._lost, self._metrics = held, lost, metrics
        self._nudge = asyncio.Event()

    def nudge(self) -> None:
        """Beat at once: control words have changed."""
        self._nudge.set()

    async def run(self) -> None:
        """Beat and sweep until cancelled."""
        while True:
            wait_s = self._view.lease_s / BEATS_A_LEASE
            try:
                await self.beat()
            except OUTAGE as error:
                self._metrics.heartbeat_failures_total.inc()
                wait_s = min(wait_s, self._link.failed(error))
            else:
                self._link.worked()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._nudge.wait()
            self._nudge.clear()

    async def beat(self) -> None:
        """Extend every held lease, tell what was lost, and sweep while a page is full."""
        asked: list[ScriptCall[Any]] = [
            calls.beat(self._name, self._held()),
            calls.sweep(SWEEP_PAGE),
        ]
        beat, sweep = await self._queue.call_many(asked)
        self._view.saw(beat.state, beat.version, beat.control_seq)
        if beat.state == LOST:
            self._lost(None)
        elif beat.lost:
            self._lost(beat.lost)
        await self._sweep_on(sweep)

    async def _sweep_on(self, swept: SweepAnswer) -> None:
        while True:
            self._metrics.leases_reclaimed_total.inc(swept.expired)
            if not swept.more:
                return
            swept = await self._queue.call(calls.sweep(SWEEP_PAGE))
