"""Kills workers of the demo on purpose.

Owns the choice of the victim. Never kills the last ready worker, and never anything but a worker.
Invariant: whoever is killed is started again at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.demo.children import Child


@dataclass
class Killer:
    """SIGKILLs a random ready worker every `every_s`, where another one is ready too."""

    workers: Sequence[Child]
    every_s: float
    seed: int = 0
    kills: int = 0
    skipped: int = 0
    """Times at which fewer than two workers were ready."""
    _next_s: float = field(init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._next_s = time.monotonic() + self.every_s
        self._random = random.Random(self.seed)

    def tick(self) -> str | None:
        """Kill and restart one worker if it is time; return its name."""
        if time.monotonic() < self._next_s:
            return None
        ready = [worker for worker in self.workers if worker.ready()]
        if len(ready) < 2:
            # One of them is still starting: look again soon, kill as soon as it is ready.
            self.skipped += 1
            self._next_s = time.monotonic() + 0.1
            return None
        victim = self._random.choice(ready)
        victim.kill()
        victim.start()
        self.kills += 1
        self._next_s = time.monotonic() + self.every_s
        return victim.name
