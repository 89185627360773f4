"""The budgets that a run is opened with: how many groups may live, and how old they may get.

Owns the numbers and why they are what they are. Never talks to Redis, and is no part of the
fingerprint: a producer that starts again with other values sets them anew. Invariant: a run whose
trainer takes `groups_per_step` groups a step can always fill one, and none of the modes runs
without what it needs.

Capacity comes first among the bounds on staleness: with `groups_per_step * (1 + max_staleness)`
groups live, the youngest of them is at most `max_staleness` steps of the trainer away. What is
evicted beyond it (a group that took longer than its neighbours) is the exception then. Where
filters drop many groups, `over_sampling` times as many live, so that a step fills at once from what
they leave; of what they do not drop, more gets stale.

Unit: groups, and steps of the trainer, each of which is one weight version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollstream.errors import ConfigError
from rollstream.queue.calls import Arg
from rollstream.queue.keys import window_of
from rollstream.settings import Settings

UNBOUNDED = -1
"""As `max_staleness`: no version is too old."""
BY_STEPS = "weights.groups_per_step * (1 + weights.max_staleness)"
OVER = " * producer.over_sampling"


@dataclass(frozen=True, slots=True)
class Pace:
    """What bounds how far generation runs ahead of training."""

    capacity: int
    """Groups that may be live at once."""
    bound_by: str
    """What of the configuration says so, for the log."""
    groups_per_step: int | None
    max_staleness: int
    """-1 is unbounded."""
    max_drops: int
    """Groups in a row that verdicts may drop before the run fails; 0 is any number."""
    on_stale: str
    """`drop`, `requeue` or `deliver`."""

    @property
    def is_unpaced(self) -> bool:
        """Whether staleness is bounded by evictions alone: nothing says how long a step is."""
        return self.max_staleness != UNBOUNDED and self.groups_per_step is None


def pace_of(settings: Settings) -> Pace:
    """Return the pace that the configuration asks for.

    Raises:
        ConfigError: a mode lacks what it needs, or one step could never fill.
    """
    weights, most = settings.weights, settings.producer.capacity_groups
    is_strict, a_step = weights.mode != "async", weights.groups_per_step
    if is_strict and a_step is None:
        raise ConfigError(
            f"weights.mode = {weights.mode!r} needs weights.groups_per_step: how many groups one "
            "step of the trainer takes (the size of a batch). No more than those are generated "
            "before the next weights"
        )
    if a_step is not None and a_step > most:
        raise ConfigError(
            f"weights.groups_per_step = {a_step} is more than producer.capacity_groups = {most}: "
            "one step of the trainer could never fill; raise the capacity, or lower the step"
        )
    staleness = 0 if is_strict else weights.max_staleness
    on_stale = weights.on_stale or ("requeue" if is_strict else "drop")
    capacity, bound_by = most, "producer.capacity_groups"
    if a_step is not None and staleness != UNBOUNDED:
        over = settings.producer.over_sampling
        paced = math.ceil(round(a_step * (1 + staleness) * over, 6))
        if paced <= most:
            capacity, bound_by = paced, BY_STEPS + (OVER if over > 1 else "")
    max_drops = settings.aggregator.stop_after_dropped_batches * (a_step or capacity)
    return Pace(capacity, bound_by, a_step, staleness, max_drops, on_stale)


def budgets_of(settings: Settings) -> dict[str, Arg]:
    """Return the numbers that `open` sets, each under its name in the run's record.

    Raises:
        ConfigError: as `pace_of`.
    """
    worker, weights, pace = settings.worker, settings.weights, pace_of(settings)
    return {
        "lease_ms": int(worker.lease_s * 1000),
        "cap": pace.capacity,
        "W": window_of(pace.capacity),
        "max_attempts": worker.max_attempts,
        "max_crashes": worker.max_crashes,
        "max_requeues": weights.max_requeues,
        "max_stale": pace.max_staleness,
        "on_stale": pace.on_stale,
        "max_drops": pace.max_drops,
        "weights_mode": weights.mode,
        "max_body": worker.max_body_bytes,
    }
