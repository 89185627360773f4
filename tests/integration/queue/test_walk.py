"""Random walks over the whole life of a run, on a real server; longer ones by `walk.py` itself."""

from __future__ import annotations

import pytest
import redis

from tests.integration.queue.walk import ACTIONS, take_walk

STEPS = 200


@pytest.mark.parametrize("seed", range(1, 7))
def test_walk_breaks_no_invariant_and_drains(client: redis.Redis, seed: int) -> None:
    did = take_walk(client, seed, STEPS, sizes=(14, 30))
    assert [name for name in ACTIONS if not did[f"act {name}"]] == []
    assert did["drained"] >= 1
    assert did["leased"] > 20
    assert did["repeated"] > 50
