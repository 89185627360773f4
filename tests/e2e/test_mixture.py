"""A mixture as processes: shares that hold, and an environment that only fails beside two others."""

from __future__ import annotations

import pytest

from benchmarks.mixture import WEIGHTS, measure

pytestmark = pytest.mark.slow


def test_an_environment_that_only_fails_costs_a_mixture_its_own_groups_alone() -> None:
    found = measure(240, 1)
    assert found["groups"] == 240
    assert found["enqueued"] == {name: weight / 10 for name, weight in WEIGHTS.items()}
    assert found["off_groups_max"] < 1
    assert found["off_window_groups_max"] < 2
    assert found["delivered"] == {"sums": 5 / 8, "words": 3 / 8, "refused": 0.0}
    # Refused far more often in a row than worker.fail_after_groups allows the only environment.
    assert found["dropped"] == {"refused": {"short_group": 48}}
    assert (found["told"], found["run_state"], found["unaccounted"]) == (1, "running", 0)
