"""How many calls one engine gets at once: fewer when it says that it is full, more as it answers.

Owns the limit of one engine (additive increase, multiplicative decrease), and what is no overload:
engines and routers fail single requests at any load, and a limit that halves for each of those ends
far below what the engine takes. Never counts calls and never makes anyone wait: the pool does.
Invariant: 1 <= limit <= cap, one round trip lowers it once, however many of its calls came back
with the same complaint, and complaints of less than a tenth of the calls never lower it for long.
"""

from __future__ import annotations

_STEPS = 16
"""Round trips from half of what an engine took back to all of it. Steps of one call would need as
many round trips as it had calls, and a restart's burst of 503 would starve a large fleet for an
hour."""
_UNBOUNDED = float("inf")
_FORGIVEN = 0.1
"""Complaints that one answer makes up for: so large a share of them is the engine's everyday."""
_PATIENCE = 3.0
"""Complaints beyond that which are borne before the limit goes down."""


class Limiter:
    """The limit of one engine.

    Attributes:
        limit: the most calls at once; infinite where nothing bounds it yet.
    """

    __slots__ = (
        "_answers",
        "_cap",
        "_complaints",
        "_goal",
        "_lowered_at",
        "_peak",
        "_step",
        "limit",
    )

    def __init__(self, max_in_flight: int = 0) -> None:
        """Start at `max_in_flight`; 0 is no bound until the engine complains."""
        self._cap = float(max_in_flight) if max_in_flight else _UNBOUNDED
        self.limit = self._cap
        self._step = self._goal = 1.0
        self._answers = True
        """It answered since the last decrease."""
        self._lowered_at = -_UNBOUNDED
        self._complaints = self._peak = 0.0
        """Complaints in a row, nearly; the most that was in flight when one of them came."""

    def has_room(self, in_flight: int) -> bool:
        """Return whether one more call may go there."""
        return in_flight + 1 <= self.limit

    def overloaded(self, in_flight: int, sent_at: float, now: float) -> bool:
        """Take a complaint; halve what is in flight where they are many. Whether that happened.

        Args:
            in_flight: calls at the engine, the one that was turned away included.
            sent_at: when that one was sent. Sent before the last decrease, it says nothing new.
            now: the same clock.
        """
        if sent_at <= self._lowered_at:
            return False
        self._complaints += 1.0
        self._peak = max(self._peak, float(in_flight))
        if self._complaints <= _PATIENCE:
            return False
        held = min(self.limit, self._peak)
        self._complaints = self._peak = 0.0
        # An engine that turns everything away (it starts) says nothing of how much it takes: it
        # will be as much as before.
        self._goal = held if self._answers else max(self._goal, held)
        self._answers = False
        self.limit = max(1.0, held / 2)
        self._step = max(1.0, (self._goal - self.limit) / _STEPS)
        self._lowered_at = now
        return True

    def answered(self, in_flight: int) -> None:
        """Allow a step more per round trip, where the limit is what holds calls back.

        Args:
            in_flight: calls at the engine, the one that was answered included.
        """
        self._answers = True
        if self._complaints:
            self._complaints = max(0.0, self._complaints - _FORGIVEN)
            self._peak = self._peak if self._complaints else 0.0
        if self.limit < self._cap and in_flight + 1 > self.limit:
            self.limit = min(self._cap, self.limit + self._step / self.limit)

    @property
    def shown(self) -> int:
        """Return the limit as a number for people and metrics; 0 is none."""
        return 0 if self.limit == _UNBOUNDED else int(self.limit)
