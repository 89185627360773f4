"""What a worker believes of its run: its state, its version, its limits.

Owns the belief. Never asks Redis. Invariant: every answer of Redis renews it, and what an answer
cannot say (labels, engines, limits) is marked as to be read again (`reopened`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from rollstream.queue.reads import RunInfo

LOST = "lost"
"""The answer of a Redis that has no such run."""
PAUSED = "paused"
OVER = frozenset({"ended", "failed"})

log = structlog.get_logger("worker")


@dataclass(slots=True)
class RunView:
    """What this worker knows of its run; every answer of Redis renews it."""

    state: str = "unknown"
    version: int = 0
    control_seq: int = -1
    lease_s: float = 15.0
    max_body_bytes: int = 16 << 20
    pause_mode: str = ""
    """`keep` or `abort`; empty while the run is not paused, as the last `info` said."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """What engines call which weight version."""
    engines: tuple[str, ...] | None = None
    """The run's engines; None: those of the configuration."""
    reopened: bool = False
    """The run is there again, or was changed, perhaps with other numbers: `info` is to be read."""
    nudge: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where the next beat is due at once: control words have changed."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the run is `ended` or `failed`: nothing will ever be leased again."""

    def opened(self, info: RunInfo) -> None:
        """Take over what the run's record says."""
        self.lease_s, self.max_body_bytes = info.lease_s, info.max_body_bytes
        self.pause_mode, self.labels, self.engines = info.pause_mode, info.labels, info.engines
        self.saw(info.state, info.version, info.control_seq)
        self.reopened = False

    def saw(self, state: str, version: int, control_seq: int) -> None:
        """Take over what an answer said."""
        if state == "old":
            return
        if state != self.state:
            log.info("run_state", state=state, before=self.state)
            self.reopened = self.reopened or self.state == LOST
        self.state = state
        if state in OVER:
            self.over.set()
        if state != LOST:
            # A shorter lease that nobody here knows of would expire between two beats.
            if control_seq != self.control_seq:
                self.reopened = True
                self.nudge.set()
            self.version, self.control_seq = version, control_seq
