"""How many groups may live, by the step of the trainer and the staleness that is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from producer.budgets import BY_STEPS, OVER, budgets_of, pace_of
from rollstream.errors import ConfigError
from rollstream.settings import AggregatorTable, ProducerTable, Settings, WeightsTable

BY_CAPACITY = "producer.capacity_groups"


def configured(capacity: int = 512, **weights: Any) -> Settings:
    """Return settings with this capacity and these weights."""
    return Settings(
        producer=ProducerTable(capacity_groups=capacity), weights=WeightsTable(**weights)
    )


@pytest.mark.parametrize(
    ("weights", "capacity", "bound"),
    [
        ({}, 512, BY_CAPACITY),
        ({"groups_per_step": 32}, 512, BY_CAPACITY),  # unbounded staleness
        ({"groups_per_step": 32, "max_staleness": 0}, 32, BY_STEPS),
        ({"groups_per_step": 32, "max_staleness": 1}, 64, BY_STEPS),
        ({"groups_per_step": 32, "max_staleness": 15}, 512, BY_STEPS),  # exactly both
        ({"groups_per_step": 32, "max_staleness": 16}, 512, BY_CAPACITY),
        ({"max_staleness": 1}, 512, BY_CAPACITY),
        ({"groups_per_step": 32, "mode": "on_policy"}, 32, BY_STEPS),
        ({"groups_per_step": 32, "mode": "colocated", "max_staleness": 4}, 32, BY_STEPS),
        ({"groups_per_step": 512, "mode": "on_policy"}, 512, BY_STEPS),
    ],
)
def test_capacity_is_what_so_many_steps_take_and_never_more_than_is_allowed(
    weights: dict[str, Any], capacity: int, bound: str
) -> None:
    pace = pace_of(configured(**weights))
    assert (pace.capacity, pace.bound_by) == (capacity, bound)


@pytest.mark.parametrize("mode", ["on_policy", "colocated"])
def test_a_mode_without_staleness_needs_the_size_of_a_step(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"needs weights\.groups_per_step") as caught:
        pace_of(configured(mode=mode))
    assert repr(mode) in str(caught.value)


@pytest.mark.parametrize("weights", [{}, {"mode": "on_policy"}, {"max_staleness": 3}])
def test_a_step_that_could_never_fill_is_refused(weights: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"= 9 is more than producer\.capacity_groups = 8"):
        pace_of(configured(8, groups_per_step=9, **weights))
    assert pace_of(configured(8, groups_per_step=8, **weights)).capacity == 8


@pytest.mark.parametrize(
    ("weights", "on_stale", "max_stale"),
    [
        ({}, "drop", -1),
        ({"max_staleness": 2}, "drop", 2),
        ({"max_staleness": 2, "on_stale": "deliver"}, "deliver", 2),
        ({"mode": "on_policy", "groups_per_step": 4}, "requeue", 0),
        ({"mode": "colocated", "groups_per_step": 4, "max_staleness": 7}, "requeue", 0),
        ({"mode": "on_policy", "groups_per_step": 4, "on_stale": "drop"}, "drop", 0),
    ],
)
def test_what_is_too_old_and_what_becomes_of_it_are_of_the_mode_unless_they_are_given(
    weights: dict[str, Any], on_stale: str, max_stale: int
) -> None:
    budgets = budgets_of(configured(**weights, max_requeues=5))
    assert (budgets["on_stale"], budgets["max_stale"]) == (on_stale, max_stale)
    assert (budgets["max_requeues"], budgets["weights_mode"]) == (5, weights.get("mode", "async"))


@pytest.mark.parametrize(
    ("weights", "unpaced"),
    [
        ({}, False),
        ({"max_staleness": 1}, True),
        ({"max_staleness": 1, "groups_per_step": 4}, False),
        ({"max_staleness": 1, "groups_per_step": 300}, False),
    ],
)
def test_a_bounded_staleness_without_a_step_is_unpaced(
    weights: dict[str, Any], unpaced: bool
) -> None:
    assert pace_of(configured(**weights)).is_unpaced is unpaced


def with_more(over: float, capacity: int = 512, *, stop: int = 10, **weights: Any) -> Settings:
    """Return settings with this over-sampling, and this many batches of drops."""
    return Settings(
        producer=ProducerTable(capacity_groups=capacity, over_sampling=over),
        aggregator=AggregatorTable(stop_after_dropped_batches=stop),
        weights=WeightsTable(**weights),
    )


@pytest.mark.parametrize(
    ("over", "weights", "capacity", "bound"),
    [
        (4.0, {"groups_per_step": 1, "max_staleness": 0}, 4, BY_STEPS + OVER),
        (4.0, {"groups_per_step": 2, "mode": "on_policy"}, 8, BY_STEPS + OVER),
        (1.5, {"groups_per_step": 3, "max_staleness": 1}, 9, BY_STEPS + OVER),
        (1.5, {"groups_per_step": 3, "max_staleness": 0}, 5, BY_STEPS + OVER),
        (1.1, {"groups_per_step": 10, "max_staleness": 0}, 11, BY_STEPS + OVER),
        (1.0, {"groups_per_step": 3, "max_staleness": 0}, 3, BY_STEPS),
        (4.0, {"groups_per_step": 256, "max_staleness": 0}, 512, BY_CAPACITY),
        (4.0, {"groups_per_step": 8}, 512, BY_CAPACITY),  # unbounded staleness
        (4.0, {}, 512, BY_CAPACITY),
    ],
)
def test_144_over_sampling_multiplies_the_groups_of_the_steps_and_no_other_capacity(
    over: float, weights: dict[str, Any], capacity: int, bound: str
) -> None:
    pace = pace_of(with_more(over, **weights))
    assert (pace.capacity, pace.bound_by) == (capacity, bound)


@pytest.mark.parametrize(
    ("stop", "weights", "drops"),
    [
        (10, {"groups_per_step": 32}, 320),
        (10, {"groups_per_step": 32, "mode": "on_policy"}, 320),
        (3, {}, 1536),
        (0, {"groups_per_step": 32}, 0),
    ],
)
def test_batches_of_drops_are_counted_in_steps_or_else_in_capacities(
    stop: int, weights: dict[str, Any], drops: int
) -> None:
    assert budgets_of(with_more(2.0, stop=stop, **weights))["max_drops"] == drops
