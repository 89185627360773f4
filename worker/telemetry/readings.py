"""What is kept on the loop until the next flush, and how it reaches Prometheus.

Owns the accumulators of one metric each. Never raises for a value: what is no sensible number
counts as the nearest one. Invariant: a flush empties an accumulator whatever becomes of it, so
nothing grows while telemetry is broken.
"""

from __future__ import annotations

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
        values: to be appended to. Always the same list.
    """

    __slots__ = ("_buckets", "_child", "values")

    def __init__(self, child: prom.Histogram, buckets: Sequence[float]) -> None:
        self._child, self._buckets = child, np.array(buckets, dtype=np.float64)
        self.values: list[float] = []

    def flush(self) -> None:
        """Observe all values at once: one search, where `observe` costs 0.8 µs for each.

        A histogram of prometheus-client keeps a count per bucket, not yet summed up.

        Raises:
            TypeError: something among them is no number at all; so ValueError.
        """
        if not self.values:
            return
        kept = self.values.copy()
        self.values.clear()
        values = np.array(kept, dtype=np.float64)
        total = float(values.sum())
        if not (total <= MOST and values.min() >= 0.0):  # of NaN neither is true
            values = np.clip(np.nan_to_num(values, nan=0.0, posinf=MOST), 0.0, MOST)
            total = float(values.sum())
        found = np.searchsorted(self._buckets, values)
        counts = np.bincount(found, minlength=len(self._buckets) + 1)
        for bucket, count in zip(self._child._buckets, counts.tolist(), strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(total)


def tally_of(children: Mapping[K, prom.Counter]) -> dict[K, int]:
    """Return a tally for counters: plain numbers, all there, which are the quickest to add to."""
    return dict.fromkeys(children, 0)


def move(tally: dict[K, int], children: Mapping[K, prom.Counter]) -> None:
    """Add what was tallied to its counters, and begin the tally anew."""
    for key, count in tally.items():
        if count:
            tally[key] = 0
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
