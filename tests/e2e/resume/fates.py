"""Where in its loop a trainer of this harness dies or freezes.

Owns the points, by name, and the signal that a process sends itself there: an outside kill would
hit the short ones once in a thousand runs. Never decides which fate a trainer gets.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Point(StrEnum):
    """Places in the trainer's loop, in its order."""

    CONNECTED = "connected"
    HANDED_OUT = "handed_out"
    """A batch is in hand, nothing is learned of it."""
    TRAINED = "trained"
    """The model has learned it, the ack is not sent."""
    ACKED = "acked"
    STATE_TAKEN = "state_taken"
    """`state_dict()` returned, nothing is written."""
    WRITTEN = "written"
    """The checkpoint is on disk under a name that nobody reads."""
    SAVED = "saved"


class Way(StrEnum):
    """What happens there."""

    DIE = "die"
    FREEZE = "freeze"


_SIGNALS = {Way.DIE: signal.SIGKILL, Way.FREEZE: signal.SIGSTOP}


@dataclass
class Fate:
    """The n-th time that a trainer passes a point is its last, or for long."""

    point: Point
    way: Way
    passes: int = 1

    def meet(self, point: Point) -> None:
        """Pass a point."""
        if point is not self.point:
            return
        self.passes -= 1
        if self.passes == 0:
            os.kill(os.getpid(), _SIGNALS[self.way])

    def to_plain(self) -> dict[str, Any]:
        """Return what `from_plain` reads, for a command line."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Fate:
        """Read what `to_plain` returned."""
        return cls(Point(data["point"]), Way(data["way"]), int(data["passes"]))
