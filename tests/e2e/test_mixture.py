"""A mixture as processes: shares that hold, and an environment that only fails beside others."""

from __future__ import annotations

import pytest

from benchmarks.mixture import WEIGHTS, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("failing", ["refused", "hangs"])
def test_an_environment_that_only_fails_costs_a_mixture_its_own_groups_alone(failing: str) -> None:
    found = measure(120, 1, failing)
    assert found["groups"] == 120
    assert found["enqueued"] == {name: weight / 10 for name, weight in WEIGHTS.items()}
    assert found["off_groups_max"] < 1
    assert found["off_window_groups_max"] < 2
    assert found["delivered"] == {"sums": 5 / 8, "words": 3 / 8, "failing": 0.0}
    assert found["samples_per_group"] == {"sums": [4], "words": [2]}
    # More in a row than worker.fail_after_groups allows the only environment.
    reason = "deadline" if failing == "hangs" else "short_group"
    assert found["dropped"] == {"failing": {reason: 24}}
    assert (found["told"], found["run_state"], found["unaccounted"]) == (1, "running", 0)
