"""What is kept on the loop until the next flush, and how it reaches Prometheus.

Owns the accumulators of one metric each. Never raises for a value: what is no sensible number
counts as the nearest one. Invariant: a flush empties an accumulator whatever becomes of it, so
nothing grows while telemetry is broken.
"""

from __future__ import annotations

from array import array
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import prometheus_client as prom

K = TypeVar("K")

MOST = 1e12
"""A value beyond it is counted as this: a sum of infinity would stay one."""


class Readings:
    """Values of one histogram since the last flush.

    Attributes:
        add: keeps one value. TypeError where it is no number.
    """

    __slots__ = ("_buckets", "_child", "_values", "add")

    def __init__(self, child: prom.Histogram, buckets: Sequence[float]) -> None:
        self._child, self._buckets = child, np.array(buckets, dtype=np.float64)
        self._values = array("d")
        self.add = self._values.append

    def flush(self) -> None:
        """Observe all values at once: one search, where `observe` costs 0.8 µs for each.

        A histogram of prometheus-client keeps a count per bucket, not yet summed up.
        """
        if not self._values:
            return
        values = np.array(self._values, dtype=np.float64)
        del self._values[:]
        values = np.clip(np.nan_to_num(values, nan=0.0, posinf=MOST), 0.0, MOST)
        found = np.searchsorted(self._buckets, values)
        counts = np.bincount(found, minlength=len(self._buckets) + 1)
        for bucket, count in zip(self._child._buckets, counts.tolist(), strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(float(values.sum()))


def move(tally: Tally[K], children: Mapping[K, prom.Counter]) -> None:
    """Add what was tallied to its counters, and empty the tally."""
    counts = list(tally.items())
    tally.clear()
    for key, count in counts:
        children[key].inc(count)


class Totals:
    """Counters that follow running totals kept elsewhere."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[prom.Counter, int] = {}

    def follow(self, child: prom.Counter, total: int) -> None:
        """Bring a counter up to a total; one that fell back begins anew when it is passed."""
        new = total - self._seen.get(child, 0)
        if new > 0:
            child.inc(new)
            self._seen[child] = total

    def follow_all(
        self, children: Mapping[str, prom.Counter], totals: Mapping[str, int], rest: str = ""
    ) -> None:
        """Follow totals by label; those of no label of their own count as `rest`."""
        unknown = sum(total for label, total in totals.items() if label not in children)
        for label, child in children.items():
            self.follow(child, totals.get(label, 0) + (unknown if label == rest else 0))
