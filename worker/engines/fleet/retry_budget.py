"""How many calls may be tried again: a share of all calls, over a sliding minute.

Owns the two sliding counts. Never waits and never decides whether a fault is worth a retry.
Invariant: over any minute at most `max(IN_HAND, share x calls)` retries are allowed, so that a
fleet in trouble gets little more than the load that troubles it.
"""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 60.0
IN_HAND = 10
"""Retries that a minute has however few its calls are: a worker that begins must not fail its first
call for want of earlier ones."""
_PARTS = 12


class RetryBudget:
    """The budget of one pool."""

    __slots__ = ("_calls", "_clock", "_num_calls", "_num_retries", "_part", "_retries", "_share")

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """Allow `share` retries a call, 0..1."""
        self._share, self._clock = share, clock
        self._part = self._now()
        self._calls, self._retries = [0] * _PARTS, [0] * _PARTS
        self._num_calls = self._num_retries = 0

    def _now(self) -> int:
        return int(self._clock() * _PARTS / WINDOW_S)

    def called(self) -> None:
        """Count one call (not its tries)."""
        part = self._now()
        if part != self._part:
            self._move(part)
        self._calls[part % _PARTS] += 1
        self._num_calls += 1

    def take(self) -> bool:
        """Take one retry; return whether there was one."""
        part = self._now()
        if part != self._part:
            self._move(part)
        if self._num_retries >= max(IN_HAND, int(self._share * self._num_calls)):
            return False
        self._retries[part % _PARTS] += 1
        self._num_retries += 1
        return True

    def _move(self, part: int) -> None:
        """Forget what is older than the window; the part that begins replaces the oldest."""
        for new in range(max(self._part + 1, part - _PARTS + 1), part + 1):
            at = new % _PARTS
            self._num_calls -= self._calls[at]
            self._num_retries -= self._retries[at]
            self._calls[at] = self._retries[at] = 0
        self._part = part
