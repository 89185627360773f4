"""The gate: lets prompts into the queue as fast as there is room, and for as long as it takes.

Owns the loop of the producer and its share of the run's housekeeping (presence, sweeps). Never
decides what a group is (`Supply`) or whether there is room (the `enqueue` script does). Invariant:
it has no state of its own that matters: killed at any instant, another one scans from the
frontier and adds exactly what is missing.

A scan begins anew at the start, when the run's epoch changed (a trainer rewound), and when the
server is another one than before (its memory may be older). An outage of Redis is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from redis.exceptions import ResponseError

from rollstream.errors import RunFailed, RunLost
from rollstream.link import OUTAGE, Link
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.calls import ScriptCall, end_of_data, present, state, sweep
from rollstream.queue.queue import Queue

from .blocked import BlockedClock
from .frontier import Scan
from .identity import check_opened
from .sources import BadRow
from .supply import Supply

T = TypeVar("T")
BATCH = 16
"""Enqueues a round trip."""
WAIT_S = 0.5
"""Bound of one wait for room, and of hearing about a rewind."""
SERVER_CHECK_S = 1.0
SETTLED = frozenset({"new", "dup", "done", "skipped", "dropped", "held"})
"""Answers after which there is nothing to do for an index."""
WAITS = {"full": "capacity", "wait": "window"}
"""Answers after which there is something to wait for."""
DRAIN = "drain"
TAKES_GROUPS = frozenset({"running", "paused"})
log = structlog.get_logger("producer")


@dataclass(slots=True)
class Standing:
    """Where the producer is, for whoever shows it."""

    position: int = 0
    total: int = 0
    waiting_for: str = ""
    """`capacity`, `memory` (of Redis), `window`, `drain`, `rewind` (the data is exhausted), or
    nothing."""
    enqueued: int = 0
    """Groups that this process added."""


class Gate:
    """One producer of one run.

    Args:
        queue: the run.
        opening: the call that opens it; sent again when the server has lost it.
        fingerprint: what the call says the run is made of.
        supply: the calls of each group index.
        name: of this process, for presence.
        lease_s: somebody must sweep more often than half of it.
        stay: go on after the end of data, for rewinds.
    """

    def __init__(
        self,
        queue: Queue,
        opening: ScriptCall[list[str]],
        fingerprint: str,
        supply: Supply,
        *,
        name: str,
        lease_s: float,
        stay: bool = True,
    ) -> None:
        self.standing = Standing(total=supply.order.total)
        self._queue, self._opening, self._fingerprint = queue, opening, fingerprint
        self._supply, self._name, self._stay = supply, name, stay
        self._tend_s = min(WAIT_S, lease_s / 4)
        self._link = Link("producer")
        self._changed = asyncio.Event()
        """The scan no longer stands on what Redis has."""
        self._scan: Scan | None = None
        self._server = ""
        self._outages = 0
        self._room: int | None = None
        """Groups that would fit, as last read; None where none was refused yet."""
        self._doubt = False
        self._blocked = BlockedClock()
        self._full_since_mono_s: float | None = None
        """Since when prompts are refused for want of the server's memory."""

    async def open(self) -> str:
        """Open the run once, without patience; return its state.

        Raises:
            RunMismatch: another run has that name.
            redis.exceptions.RedisError: the server cannot be reached, or refuses.
        """
        answer = await self._queue.call(self._opening)
        return check_opened(answer, self._queue.run, self._fingerprint)

    async def run(self) -> None:
        """Produce until the run is over (or, without `stay`, until the end of data).

        Raises:
            BadRow: and bad rows are not skipped; everything before it is enqueued.
            RunFailed: somebody ended the run as failed.
            RunMismatch: the server lost the run, and another one took its name.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tending = tasks.create_task(self._tend())
                while not await self._step():
                    pass
                tending.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def leave(self, timeout_s: float = 1.0) -> None:
        """Say goodbye, if Redis hears it in time: a trainer that waits learns at once."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._blocked.report() is not None:
                    await self._say_present()
                await self._queue.call(present("producer", self._name, leaving=True))
        except OUTAGE as error:
            log.debug("goodbye_not_heard", error=repr(error))

    # --- the scan ------------------------------------------------------------------------------
    async def _step(self) -> bool:
        """Do one round trip's worth of work; return whether the producer is done."""
        if self._scan is None or self._changed.is_set() or self._link.outages != self._outages:
            return await self._begin_scan()
        if self._scan.finished:
            return await self._end_scan(self._scan)
        try:
            await self._send(self._scan)
        except OUTAGE as error:
            # Not tried again as it is: the server that answers next may remember less.
            await asyncio.sleep(self._link.failed(error))
        return False

    async def _begin_scan(self) -> bool:
        self._changed.clear()
        self._blocked.stop()
        self._outages = self._link.outages
        # The server's id first: a restart behind it is noticed as another id later.
        self._server = await self._ask(self._server_id)
        run_state = (await self._ask(self._say_present)).state
        if run_state == "lost":
            log.warning("run_lost", run=self._queue.run, action="opening it again")
            run_state = await self._ask(self.open)
        if run_state not in TAKES_GROUPS:
            return await self._over(run_state)
        try:
            frontier = await self._ask(lambda: self._queue.call(state()))
        except RunLost:
            self._changed.set()
            return False
        self._scan = Scan(self._supply.order.total, frontier)
        self._room, self._doubt = None, False
        log.info("scan_begins", frontier=frontier.frontier, epoch=frontier.epoch)
        return False

    async def _send(self, scan: Scan) -> None:
        """Offer the next groups; where there was no room lately, wait for some first."""
        if self._room == 0:
            await self._queue.wait_room(WAIT_S)
            self._room = await self._read_room(scan)
            self._note_room(self._room)
            if self._room == 0:
                return
        most = 1 if self._doubt else min(BATCH, BATCH if self._room is None else self._room)
        # In a thread: a procedural source may take long for a row, and leases want sweeps then.
        ids, offers = await asyncio.to_thread(self._offers, scan, most)
        if not ids:
            return
        answers = await self._queue.call_many(offers)
        scan.settle(ids, [answer in SETTLED for answer in answers])
        landed = answers.count("new")
        if any(answer in SETTLED for answer in answers):
            self._blocked.stop()
        other = next((answer for answer in answers if answer not in SETTLED), "")
        self.standing.position = scan.position
        self.standing.enqueued += landed
        self.standing.waiting_for = WAITS.get(other, "")
        if other == "full" and landed == 0 and self._room and await self._read_room(scan):
            self.standing.waiting_for = "memory"  # there is room, and still it is refused
            await self._say_memory_full()
        elif landed:
            self._say_memory_back()
        if other in WAITS:
            self._note_room(0)
            # Nothing fits although there seemed to be room: full memory, say. One at a time then,
            # because every prompt that is refused travels for nothing.
            self._room, self._doubt = 0, landed == 0
        elif other:
            self._changed.set()  # lost, or over: the next scan finds out
        else:
            self._doubt = False
            self._use_room(scan, landed)

    def _use_room(self, scan: Scan, landed: int) -> None:
        if self._room is None:
            return
        self._room = max(0, self._room - landed)
        if self._room == 0 and not scan.finished:
            self._note_room(0)  # full again, and there is more to enqueue

    def _note_room(self, room: int) -> None:
        if room > 0:
            self._blocked.room_seen()
        elif self.standing.waiting_for == DRAIN:
            self._blocked.stop()
        else:
            self._blocked.refused()

    async def _say_memory_full(self) -> None:
        """Say it once, with how full: only raising the limit, or acks, can end it."""
        if self._full_since_mono_s is not None:
            return
        self._full_since_mono_s = time.monotonic()
        try:
            about = await self._queue.client.info("memory")
        except (ResponseError, *OUTAGE):
            about = {}
        log.error(
            "redis_memory_full",
            used_bytes=about.get("used_memory"),
            max_bytes=about.get("maxmemory"),
            policy=about.get("maxmemory_policy"),
            action="raise maxmemory, lower producer.capacity_groups, or let the trainer ack; no "
            "prompt is added until then, what runs goes on",
        )

    def _say_memory_back(self) -> None:
        if self._full_since_mono_s is not None:
            full_s = round(time.monotonic() - self._full_since_mono_s, 3)
            log.info("redis_memory_back", full_s=full_s)
            self._full_since_mono_s = None

    def _offers(self, scan: Scan, most: int) -> tuple[list[int], list[ScriptCall[str]]]:
        """Return the next calls; a bad row raises once everything before it is enqueued."""
        ids: list[int] = []
        offers: list[ScriptCall[str]] = []
        for group_index in scan.next_ids(most):
            try:
                offers.append(self._supply.call(group_index))
            except BadRow:
                if not ids:
                    raise
                break
            ids.append(group_index)
        return ids, offers

    async def _end_scan(self, scan: Scan) -> bool:
        self.standing.position = scan.total
        answer = await self._ask(lambda: self._queue.call(end_of_data(scan.epoch)))
        if answer not in TAKES_GROUPS:
            self._changed.set()  # rewound meanwhile, lost, or over: the next scan finds out
            return False
        log.info("end_of_data", groups=scan.total, skipped=dict(self._supply.skipped))
        self.standing.waiting_for = "rewind"
        if self._stay:
            await self._changed.wait()  # `_tend` hears of a rewind, of the end, of another server
        return not self._stay

    async def _over(self, run_state: str) -> bool:
        """Help a run that takes no more groups to its end, or say why it failed."""
        while run_state == "aborting":
            if not (await self._ask(lambda: self._queue.call(sweep()))).more:
                await asyncio.sleep(self._tend_s / 4)
            run_state = (await self._ask(self._say_present)).state
        if run_state == "failed":
            info = await self._ask(self._queue.info)
            raise RunFailed(info.error if info is not None and info.error else "no reason given")
        log.info("run_over", state=run_state)
        return True

    # --- housekeeping --------------------------------------------------------------------------
    async def _tend(self) -> None:
        """Be present, sweep, and hear about rewinds, restarts and the end; for ever."""
        next_check = time.monotonic() + SERVER_CHECK_S
        while True:
            await asyncio.sleep(self._tend_s)
            control = await self._ask(self._say_present)
            while (await self._ask(lambda: self._queue.call(sweep()))).more:
                pass  # a page was full: the next one at once
            if self._scan is None:
                continue
            if control.state not in TAKES_GROUPS or control.epoch != self._scan.epoch:
                self._changed.set()
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + SERVER_CHECK_S
                if await self._ask(self._server_id) != self._server:
                    log.warning("server_changed", action="scanning from its frontier")
                    self._changed.set()

    async def _say_present(self) -> ControlAnswer:
        blocked = self._blocked.report()
        answer = await self._queue.call(present("producer", self._name, blocked=blocked))
        if answer.state != "lost":
            self._blocked.reported(blocked)
        return answer

    async def _read_room(self, scan: Scan) -> int:
        """Return how many groups would fit: below the capacity, inside the window, not drained."""
        prefix = self._queue.prefix
        async with self._queue.client.pipeline(transaction=False) as pipeline:
            pipeline.hmget(f"{prefix}m", "cap", "frontier", "W", "draining")
            pipeline.scard(f"{prefix}gs")
            (*run, draining), live = await pipeline.execute()
        if None in run:
            return 1  # the run is gone: the next offer hears it
        if draining == b"1":
            self.standing.waiting_for = DRAIN
            return 0
        capacity, frontier, window = (int(value) for value in run)
        free, ahead = capacity - int(live), frontier + window - scan.position
        if min(free, ahead) <= 0:
            self.standing.waiting_for = "capacity" if free <= 0 else "window"
        return max(0, min(free, ahead))

    async def _server_id(self) -> str:
        """Return the server's own id, new with every start; empty where it may not be asked."""
        try:
            return str((await self._queue.client.info("server")).get("run_id", ""))
        except ResponseError:
            return ""

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await self._link.answered(ask)
