"""The queue's own accounts, taken again and again while everything moves.

Owns one thread with a connection of its own. Never judges. Invariant: a difference that was there
at any look is kept.
"""

from __future__ import annotations

import threading
from types import TracebackType

from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.runs import OUTAGES
from tests.e2e.weights.record import Dropped, Record

LOOK_S = 0.25


class Watch:
    """Audits until its context ends."""

    def __init__(self, url: str, record: Record) -> None:
        self.queue = BlockingQueue.connect(url, record.scene.name)
        self._record = record
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self.queue.close()

    def settle(self) -> None:
        """Take a last look, once nothing happens any more, at everything that was dropped too."""
        self._end()
        self._audit()
        record, queue = self._record, self.queue
        record.counters = queue.counters()
        record.drops = [
            Dropped(drop["group_index"], drop["reason"], f"{drop['detail']} {drop['errors']}")
            for drop in queue.past(1000)
        ]
        record.left = {name: count for name, count in queue.depths().items() if count}
        for key in queue.client.scan_iter(match=f"{queue.prefix}*", count=1000):
            if key.removeprefix(queue.prefix.encode())[:2] in (b"g:", b"b:"):
                record.findings.append(f"the key {key.decode()} is left")

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._audit()
            except OUTAGES as error:
                self._record.findings.append(f"an audit failed: {error}")

    def _audit(self) -> None:
        found = self.queue.call(calls.audit(deep=True))
        record = self._record
        difference = abs(found.enqueued - found.acked - found.dropped - found.live)
        record.accounting_difference = max(record.accounting_difference, difference)
        record.audit_problems += [p for p in found.problems if p not in record.audit_problems]
