"""Counts that somebody else keeps, published as Prometheus counters are: they never go down.

Owns the rule. Never reads anything. Invariant: a counter shows the highest count that its run ever
had. Redis forgets its last second when it crashes, and what ended in it ends once more: shown as it
is, the count would go down, which Prometheus takes for a restart from 0, and `increase` would jump
by everything that was ever counted. A new run does begin at 0, and so do its counters.
"""

from __future__ import annotations

from collections.abc import Hashable

import prometheus_client as prom


class Rising:
    """Keeps counters at the highest of their counts."""

    def __init__(self) -> None:
        self._shown: dict[Hashable, float] = {}

    def show(self, child: prom.Counter, key: Hashable, count: float) -> None:
        """Publish a count; `key` names the child."""
        more = count - self._shown.get(key, 0.0)
        if more > 0:
            child.inc(more)
            self._shown[key] = count
