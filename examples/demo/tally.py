"""What the trainer of the demo saw: its own log of groups, and sums over their samples.

Owns the trainer's side of the accounting. Never asks Redis: `lost` and `twice` compare this log
with what Redis says. Invariant: one entry of `trained` per group handed to training, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rollstream import FinishedGroup


class SpanFigures(TypedDict):
    """Figures of one span over all samples that were trained on."""

    count: int
    p50_s: float
    p95_s: float


@dataclass
class Tally:
    """Sums over everything that was handed to training."""

    trained: list[int] = field(default_factory=list)
    """`group_index` of every group, in the order in which it was trained on."""
    batches: int = 0
    samples: int = 0
    """Trajectories; the leaves of one count once."""
    lists: int = 0
    """Trajectories that came as lists of leaves."""
    turns: int = 0
    """Engine calls whose tokens were delivered, each once."""
    tokens: int = 0
    """Sampled tokens, each once: leaves share the calls of their common prefix."""
    rewards: list[float] = field(default_factory=list)
    durations: dict[str, list[float]] = field(default_factory=dict)

    def add(self, groups: Sequence[FinishedGroup]) -> None:
        """Count one batch."""
        self.batches += 1
        for group in groups:
            self.trained.append(group.group_index)
            for name, seconds in group.spans.items():
                self.durations.setdefault(name, []).extend(seconds)
            for trajectory in group.samples:
                self.samples += 1
                leaves = trajectory if isinstance(trajectory, list) else [trajectory]
                self.lists += isinstance(trajectory, list)
                calls = {call.rid: call for leaf in leaves for call in leaf.calls}
                self.turns += len(calls)
                self.tokens += sum(call.end - call.start for call in calls.values())
                if isinstance(leaves[0].reward, int | float):
                    self.rewards.append(float(leaves[0].reward))
                # Leaves share the spans of their common prefix.
                spans = {(s.name, s.turn, s.start_unix_s): s for leaf in leaves for s in leaf.spans}
                for span in spans.values():
                    self.durations.setdefault(span.name, []).append(span.duration_s)

    @property
    def twice(self) -> list[int]:
        """Groups that were handed to training more than once."""
        return sorted(g for g, times in Counter(self.trained).items() if times > 1)

    def spans(self) -> dict[str, SpanFigures]:
        """Return count, median and 95th percentile of every span."""
        return {
            name: SpanFigures(
                count=len(seconds),
                p50_s=percentile(seconds, 0.5),
                p95_s=percentile(seconds, 0.95),
            )
            for name, seconds in sorted(self.durations.items())
        }


def percentile(values: Iterable[float], share: float) -> float:
    """Return the nearest-rank percentile, rounded to 0.1 ms; 0.0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 4)
