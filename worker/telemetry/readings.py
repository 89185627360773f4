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
_BELOW_0 = -5e-324
"""The largest number below 0."""


class Readings:
    """Values of the children of one histogram since the last flush.

    Attributes:
        values: a list for each child, to be appended to; always the same lists.
    """

    __slots__ = ("_children", "_edges", "values")

    def __init__(self, children: Sequence[prom.Histogram], edges: Sequence[float]) -> None:
        # One edge more than it has: what is below that is negative, and goes to no bucket.
        self._edges = np.array((_BELOW_0, *edges), dtype=np.float64)
        # A histogram of prometheus-client keeps a count per bucket, not yet summed up.
        self._children = [(child._buckets, child._sum) for child in children]
        self.values: list[list[float]] = [[] for _ in children]

    def flush(self) -> None:
        """Observe all values at once, where `observe` costs 0.8 µs for each.

        Raises:
            TypeError: something among them is no number, and counts as 0; so ValueError, and
                OverflowError of an integer that no float holds, which counts as `MOST`.
        """
        failure: Exception | None = None
        for values, (buckets, total) in zip(self.values, self._children, strict=True):
            if not values:
                continue
            try:
                counts, seconds = self._counted(values)
            except (TypeError, ValueError, OverflowError) as error:
                failure = error
                counts, seconds = self._counted([_number(value) for value in values])
            finally:
                values.clear()
            for bucket, count in zip(buckets, counts, strict=False):
                if count:
                    bucket.inc(count)
            total.inc(seconds)
        if failure is not None:
            raise failure

    def _counted(self, values: Sequence[float]) -> tuple[list[int], float]:
        """Return how many values there are by bucket, as far as there are any, and their sum."""
        total = float(sum(values))
        array = np.fromiter(values, np.float64, len(values))
        counts = np.bincount(self._edges.searchsorted(array)).tolist()
        if counts[0] or not total <= MOST:  # which NaN is not either
            array = np.clip(np.nan_to_num(array, nan=0.0, posinf=MOST), 0.0, MOST)
            counts, total = np.bincount(self._edges.searchsorted(array)).tolist(), array.sum()
        return counts[1:], float(total)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        return 0.0
    return min(MOST, value)


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
