"""What happens to engines that nobody asked the service about: aborts, pauses, every second or so.

Owns one thread. Never touches weights, a worker or Redis. Invariant: when it has stopped, every
engine goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from tests.e2e.weights import posts
from tests.e2e.weights.scenes import Protocol

PEACE_S = (0.6, 1.6)
"""Between two disturbances."""
PAUSE_S = (0.15, 0.6)
ABORTS = 0.65
"""Share of disturbances that are aborts; the others are pauses."""


class Disturber:
    """Disturbs until its context ends.

    Attributes:
        done: how often it did what, as far as an engine took it.
        stood_still: from when to when an engine was paused.
        findings: what an engine refused.
    """

    def __init__(self, protocol: Protocol, urls: Sequence[str], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.findings: list[str] = []
        self.stood_still: list[tuple[float, float]] = []
        self._protocol, self._urls = protocol, list(urls)
        self._draw = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disturber", daemon=True)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the engines be; repeatable."""
        self._stop.set()
        self._thread.join(posts.POST_S)

    def _run(self) -> None:
        draw = self._draw
        while not self._stop.wait(draw.uniform(*PEACE_S)):
            url = draw.choice(self._urls)
            if draw.random() < ABORTS:
                self.note("abort_all", posts.abort_everything(self._protocol, url))
                continue
            mode, since = draw.choice(posts.PAUSES[self._protocol]), time.time()
            self.note(f"pause_{mode}", posts.pause(self._protocol, url, mode))
            self._stop.wait(draw.uniform(*PAUSE_S))
            posts.go_on(self._protocol, url)
            self.stood_still.append((since, time.time()))

    def note(self, what: str, status: int) -> None:
        """Count what an engine was asked for, or keep that it refused."""
        if status == 200:
            self.done[what] += 1
        else:
            self.findings.append(f"an engine answered HTTP {status} to {what}")
