"""When Python's cyclic garbage collector runs in a worker, so that it never stalls a turn.

Owns the collector's settings of this process. Never changes what is collected, only when.
Invariant: what start-up made is frozen out of every collection; young objects are collected often
and briefly; a full collection runs on a slow timer, or when the worker is idle, and its length is
recorded.

Why: a full collection walks every list and dictionary of every trajectory in flight. By default it
runs whenever enough objects were made, at 2,048 trajectories for up to 190 ms; with this policy the
99th percentile of what a worker adds to a turn is 6 ms. A larger first threshold is worse: each
young collection then takes longer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

YOUNG_THRESHOLD = 1000
NEVER = 10**6
"""Collections of a generation before the next older one is collected: the timer does that."""
FULL_EVERY_S = 120.0
IDLE_EVERY_S = 10.0
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class GcPauses:
    """How long collections stopped the process since the last `take`."""

    num: int = 0
    num_full: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


class GcPolicy:
    """Installs the settings and puts the old ones back.

    Attributes:
        pauses: what was measured since the last `take`.
    """

    def __init__(self) -> None:
        self.pauses = GcPauses()
        self._before: tuple[int, int, int] | None = None
        self._started_s = 0.0

    def install(self) -> None:
        """Freeze what is alive now and set the thresholds; call it once start-up is done."""
        if self._before is not None:
            return
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_THRESHOLD, NEVER, NEVER)
        gc.callbacks.append(self._observe)

    def uninstall(self) -> None:
        """Put the settings back as `install` found them."""
        if self._before is None:
            return
        gc.callbacks.remove(self._observe)
        gc.set_threshold(*self._before)
        gc.unfreeze()
        self._before = None

    def take(self) -> GcPauses:
        """Return the pauses since the last call, and begin anew."""
        pauses, self.pauses = self.pauses, GcPauses()
        return pauses

    async def run(
        self,
        idle: Callable[[], bool],
        *,
        full_every_s: float = FULL_EVERY_S,
        idle_every_s: float = IDLE_EVERY_S,
    ) -> None:
        """Collect fully on a slow timer, and on a quicker one while idle; until cancelled.

        Args:
            idle: no trajectory is in flight, so that a pause delays nothing.
            full_every_s: how long cyclic garbage may lie at most while there is work.
            idle_every_s: and while there is none.
        """
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, full_every_s, idle_every_s))
            since_s = time.monotonic() - last_s
            if since_s >= full_every_s or (since_s >= idle_every_s and idle()):
                gc.collect()
                last_s = time.monotonic()

    def _observe(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._started_s = time.perf_counter()
            return
        pause_s = time.perf_counter() - self._started_s
        pauses = self.pauses
        pauses.num += 1
        pauses.num_full += info["generation"] == 2
        pauses.total_s += pause_s
        pauses.longest_s = max(pauses.longest_s, pause_s)
