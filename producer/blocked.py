"""How long a producer was blocked: it held a prompt, and the run had no room for it.

Owns the clock of one process. Never asks Redis: the gate says what it heard, and reports the sum
with every sign of life. Invariant: time counts from the answer that refused a prompt until room was
seen for the next one that was taken; what room was seen for and was refused all the same (the
server's memory is full) counts on. An outage does not count, and neither does an operator's drain.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from rollstream.queue.calls import BlockedTime


class BlockedClock:
    """Sums up the blocked time of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process = secrets.token_hex(6)
        self._total_s = 0.0
        self._since_mono_s: float | None = None
        self._room_mono_s: float | None = None
        self._reported_ms = 0

    @property
    def total_s(self) -> float:
        """Blocked since the start; what is under way is in it."""
        under_way_s = 0.0 if self._since_mono_s is None else self._end() - self._since_mono_s
        return self._total_s + under_way_s

    def refused(self) -> None:
        """Note that a prompt found no room."""
        self._room_mono_s = None
        if self._since_mono_s is None:
            self._since_mono_s = self._clock()

    def room_seen(self) -> None:
        """Note that there is room; whether that is so, the next prompt shows."""
        if self._room_mono_s is None:
            self._room_mono_s = self._clock()

    def stop(self) -> None:
        """End what is under way: a prompt was taken, or nobody knows whether there is room."""
        self._total_s, self._since_mono_s, self._room_mono_s = self.total_s, None, None

    def _end(self) -> float:
        return self._clock() if self._room_mono_s is None else self._room_mono_s

    def report(self) -> BlockedTime | None:
        """Return what to say of it now; None where there is nothing new."""
        now_ms = int(self.total_s * 1000)
        if now_ms <= self._reported_ms:
            return None
        return BlockedTime(self._process, self._reported_ms, now_ms)

    def reported(self, report: BlockedTime | None) -> None:
        """Note that the run has heard it."""
        if report is not None:
            self._reported_ms = max(self._reported_ms, report.to_ms)
