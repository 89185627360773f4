"""The pulse of the event loop: how late it runs, and the one place that flushes telemetry.

Owns the timer. Never touches a rollout. Invariant: a failure of telemetry is survived (`guard`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .metrics import Metrics

INTERVAL_S = 0.1
FLUSH_EVERY = 10


class Pulse:
    """Measures the loop's lag ten times a second and flushes once a second."""

    def __init__(self, metrics: Metrics, before_flush: Callable[[], None]) -> None:
        self._metrics, self._before_flush = metrics, before_flush
        self.lag_s = 0.0
        """The worst lag of the last second."""

    async def run(self) -> None:
        """Measure and flush until cancelled."""
        loop = asyncio.get_running_loop()
        worst, ticks = 0.0, 0
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            lag = max(0.0, loop.time() - due)
            self._metrics.lag(lag)
            worst, ticks = max(worst, lag), ticks + 1
            if ticks >= FLUSH_EVERY:
                self.lag_s, worst, ticks = worst, 0.0, 0
                self.flush()

    def flush(self) -> None:
        """Publish what was accumulated, also where what comes before it breaks."""
        self._metrics.guard.run(self._before_flush)
        self._metrics.guard.run(self._metrics.flush)
