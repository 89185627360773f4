"""What Redis says while chaos is on: drops as they happen, progress, entries delivered again.

Owns one thread with connections of its own, straight to the server. Never decides what is right:
the judge does. Invariant: every drop that the server remembers is known here, also after its own
list of the last thousand has forgotten it, and a drop that a crashed server forgot is marked so.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from rollstream.queue import calls
from rollstream.queue.answers import AuditAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import FULL_GROUP
from rollstream.runs import OUTAGES

POLL_S = 0.1
AUDIT_S = 1.0
PAGE = 500
StreamId = tuple[int, int]


@dataclass
class Drop:
    """One entry of the run's list of drops."""

    id: StreamId
    group: int
    reason: str
    detail: str
    forgotten_unix_s: float | None = None
    """When a server that crashed was found to know nothing of it any more."""

    @property
    def unix_s(self) -> float:
        """When it happened, on the server's clock."""
        return self.id[0] / 1000


class Observer:
    """Watches one run; a context manager around its thread.

    Attributes:
        drops: by id of their entry.
        num_ended: groups that ended, as far as was ever seen (a rolled-back server lowers nothing).
        replays: deliveries of entries of `full` beyond the first.
        longest_stall_s: the longest time in which nothing ended, while `timing`.
        accounting_difference: the largest one that any audit found.
        problems: what deep audits named, whenever it was.
    """

    def __init__(self, port: int, run: str) -> None:
        self.drops: dict[StreamId, Drop] = {}
        self.num_ended = 0
        self.longest_stall_s = 0.0
        self.accounting_difference = 0
        self.problems: set[str] = set()
        self.findings: list[str] = []
        self.is_done = False
        """The producer had nothing left to enqueue."""
        self.depths: dict[str, int] = {}
        """Of the run, when it was last seen."""
        self._run, self._port = run, port
        self._queue = BlockingQueue.connect(f"redis://127.0.0.1:{port}", run, connect_timeout_s=1.0)
        self._prefix = self._queue.prefix
        self._client = redis.Redis(port=port, socket_timeout=2.0, socket_connect_timeout=1.0)
        self._deliveries: Counter[str] = Counter()
        self._errands: queue.SimpleQueue[Callable[[BlockingQueue], None]] = queue.SimpleQueue()
        self._restarted = threading.Event()
        self._stop = threading.Event()
        self._last: StreamId = (0, 0)
        self._next_audit_mono_s = 0.0
        self._ended_now = 0
        self._moved_mono_s: float | None = None
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._join()
        self._client.close()
        self._queue.close()

    def settle(self) -> AuditAnswer:
        """End the watch with a last look, once nothing happens any more."""
        self._join()
        self.read_drops()
        self.reconcile()
        return self.audit()

    def _join(self) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def replays(self) -> int:
        """Deliveries of entries of `full` beyond the first."""
        return sum(count - 1 for count in list(self._deliveries.values()) if count > 1)

    def time_stalls(self, *, on: bool) -> None:
        """Begin, or end, to take the time between two ends of groups."""
        now = time.monotonic()
        if not on and self._moved_mono_s is not None:
            self.longest_stall_s = max(self.longest_stall_s, now - self._moved_mono_s)
        self._moved_mono_s = now if on else None

    def server_restarted(self) -> None:
        """Compare what is known with what the server still knows."""
        self._restarted.set()

    def run_errand(self, errand: Callable[[BlockingQueue], None]) -> None:
        """Have something done on this thread's connection, soon; an outage loses it."""
        self._errands.put(errand)

    # --- the thread ----------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except OUTAGES:
                self._stop.wait(POLL_S)
            except Exception as error:  # noqa: BLE001 - a thread's runner: the judge reads it
                self.findings.append(f"the observer stumbled: {type(error).__name__}: {error}")
                self._stop.wait(POLL_S)

    def _look(self) -> None:
        if self._restarted.is_set():
            self.reconcile()
            self._restarted.clear()
        self.read_drops(block_ms=int(POLL_S * 1000))
        counters, self.depths = self._queue.counters(), self._queue.depths()
        ended = sum(n for name, n in counters.items() if name == "acked" or name[:8] == "dropped:")
        if ended > self._ended_now:
            self._moved(ended - self._ended_now)
        self._ended_now = ended
        with contextlib.suppress(redis.ResponseError):  # before the run is open
            self._count_deliveries()
        if time.monotonic() >= self._next_audit_mono_s:
            self._next_audit_mono_s = time.monotonic() + AUDIT_S
            self.audit()
            info = self._queue.info()
            self.is_done = info is not None and info.done
        while not self._errands.empty():
            self._errands.get()(self._queue)

    def audit(self) -> AuditAnswer:
        """Have the queue prove its accounts, at this instant, and keep what is wrong."""
        found = self._queue.call(calls.audit(deep=True))
        difference = abs(found.enqueued - found.acked - found.dropped - found.live)
        self.accounting_difference = max(self.accounting_difference, difference)
        self.problems.update(found.problems)
        return found

    def _moved(self, count: int) -> None:
        self.num_ended += count
        now, before = time.monotonic(), self._moved_mono_s
        if before is not None:
            self.longest_stall_s = max(self.longest_stall_s, now - before)
            self._moved_mono_s = now

    def _count_deliveries(self) -> None:
        pending: Any = self._client.xpending_range(
            f"{self._prefix}full", FULL_GROUP, min="-", max="+", count=PAGE
        )
        for entry in pending:
            name = entry["message_id"].decode()
            self._deliveries[name] = max(self._deliveries[name], entry["times_delivered"])

    # --- drops ---------------------------------------------------------------------------------
    def read_drops(self, block_ms: int | None = None) -> None:
        """Read the drops since the last look."""
        name = f"{self._prefix}past"
        while True:
            after = "-".join(map(str, self._last))
            reply: Any = self._client.xread({name: after}, count=PAGE, block=block_ms)
            entries = reply[0][1] if reply else []
            for raw_id, fields in entries:
                self._keep(raw_id, fields)
            if len(entries) < PAGE:
                return

    def _keep(self, raw_id: bytes, fields: dict[bytes, bytes]) -> StreamId:
        ms, _, seq = raw_id.decode().partition("-")
        entry: StreamId = (int(ms), int(seq))
        self._last = max(self._last, entry)
        if entry not in self.drops:
            reason, detail = fields[b"reason"].decode(), fields[b"detail"].decode()
            self.drops[entry] = Drop(entry, int(fields[b"g"]), reason, detail)
        return entry

    def reconcile(self) -> None:
        """Mark the drops that a server, after its restart, knows nothing of."""
        reply: Any = self._client.xrange(f"{self._prefix}past")
        known = {self._keep(raw_id, fields) for raw_id, fields in reply}
        oldest = min(known, default=(0, 0))
        now = time.time()
        for entry, drop in self.drops.items():
            if drop.forgotten_unix_s is None and entry >= oldest and entry not in known:
                drop.forgotten_unix_s = now
