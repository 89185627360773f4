"""What becomes of a failure of telemetry: it is counted, said now and then, and survived.

Owns the one broad `except` around what rollouts tell the metrics. Never lets a failure of a figure
out, never hides it: `rollout_telemetry_failures_total` counts each, and the log shows the first of
every minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

SAID_EVERY_S = 60.0

log = structlog.get_logger("worker")


class Guard:
    """Counts failures of telemetry.

    Attributes:
        num_failures: since the start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures = 0
        self._clock, self._next_s = clock, float("-inf")

    def failed(self, error: Exception) -> None:
        """Count what broke, and log it unless something was logged just now."""
        self.num_failures += 1
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + SAID_EVERY_S
            log.error("telemetry_failed", failures=self.num_failures, exc_info=error)

    def run(self, part: Callable[[], None]) -> None:
        """Do a part of the telemetry, whatever comes of it."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever it is, rollouts go on
            self.failed(error)
