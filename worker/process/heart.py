"""The heart of a worker: one call that keeps every lease alive, and the sweep of what came due.

Owns the rhythm (a third of a lease). Never decides what a lost lease means: it tells the shift.
Invariant: every held lease is extended in the same call, and a worker that lost touch with Redis
re-registers itself with its next beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any

import structlog

from rollstream import __version__
from rollstream.link import OUTAGE, Link
from rollstream.queue import calls
from rollstream.queue.answers import BeatAnswer, SweepAnswer
from rollstream.queue.calls import ScriptCall
from rollstream.queue.keys import SWEEP_PAGE
from rollstream.queue.queue import Queue
from rollstream.wire import WIRE_VERSION

from ..members.view import LOST, RunView
from ..telemetry.metrics import Metrics

BEATS_A_LEASE = 3
log = structlog.get_logger("worker")


class Role(StrEnum):
    """What a worker process does (`worker.role`)."""

    ALL = "all"
    ROLLOUT = "rollout"
    AGGREGATOR = "aggregator"


class Heart:
    """Beats for all leases of one worker, and says that it lives."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        view: RunView,
        *,
        name: str,
        role: Role = Role.ALL,
        held: Callable[[], Sequence[str]],
        lost: Callable[[Sequence[str] | None], None],
        metrics: Metrics,
        also: Callable[[], Sequence[ScriptCall[Any]]] = tuple,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Begin with no beat.

        Args:
            queue: of the run.
            link: to Redis.
            view: is renewed.
            name: of this worker.
            role: what it does.
            held: the leases to extend.
            lost: told of those that are not held any more; None is all.
            metrics: counts.
            also: calls that travel with every beat, behind it.
            look: reads the run's record and has it obeyed; without it the record is only read.
        """
        self._queue, self._link, self._view, self._name = queue, link, view, name
        self._role, self._also, self._look = role, also, look
        self._held, self._lost, self._metrics = held, lost, metrics
        self._about = (
            f"{socket.gethostname()} pid {os.getpid()}, rollstream {__version__}, "
            f"wire {WIRE_VERSION}"
        )

    def nudge(self) -> None:
        """Beat at once: control words have changed."""
        self._view.nudge.set()

    async def run(self) -> None:
        """Beat and sweep until cancelled."""
        while True:
            outage_s = math.inf
            try:
                await self.beat()
            except OUTAGE as error:
                self._metrics.heartbeat_failures_total.inc()
                outage_s = self._link.failed(error)
            else:
                self._link.worked()
            wait_s = min(self._view.lease_s / BEATS_A_LEASE, outage_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._view.nudge.wait()
            self._view.nudge.clear()

    async def beat(self) -> None:
        """Extend every held lease, tell what was lost, and sweep while a page is full."""
        asked: list[ScriptCall[Any]] = []
        if self._role is not Role.AGGREGATOR:
            # A beat counts as a worker's presence, and with it in how leases are shared out.
            asked.append(calls.beat(self._name, self._held()))
            asked += self._also()
        # Where it runs, for the records of members that it crashes with.
        role = "worker" if self._role is Role.ROLLOUT else "aggregator"
        asked.append(calls.present(role, self._name, about=self._about))
        # The sweep comes last: what was just extended does not expire in it.
        asked.append(calls.sweep(SWEEP_PAGE))
        seen, *_, swept = await self._queue.call_many(asked)
        self._view.saw(seen.state, seen.version, seen.control_seq)
        if isinstance(seen, BeatAnswer):
            if seen.state == LOST:
                self._lost(None)
            elif seen.lost:
                self._lost(seen.lost)
        if self._view.reopened:
            await self._look_at_record()
        await self._sweep_on(swept)

    async def _look_at_record(self) -> None:
        if self._look is not None:
            await self._look()
        elif (info := await self._queue.info()) is not None:
            self._view.opened(info)

    async def leave(self) -> None:
        """Say that this process is gone, so that nobody counts on it for four more leases."""
        gone: list[ScriptCall[Any]] = []
        if self._role is not Role.ROLLOUT:
            gone.append(calls.present("aggregator", self._name, leaving=True))
        if self._role is not Role.AGGREGATOR:
            gone.append(calls.present("worker", self._name, leaving=True))
        await self._queue.call_many(gone)

    async def _sweep_on(self, swept: SweepAnswer) -> None:
        while True:
            self._metrics.leases_reclaimed_total.inc(swept.expired)
            if swept.deadlines or swept.evicted or swept.aborted:
                # Groups ended: the next beat tells which of our own attempts are in vain.
                self._view.nudge.set()
            if not swept.more:
                return
            swept = await self._queue.call(calls.sweep(SWEEP_PAGE))
