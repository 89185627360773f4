"""Random walks over the whole life of a run, on a real server; longer ones by `walk.py` itself."""

from __future__ import annotations

from collections import Counter

import pytest
import redis

from tests.integration.queue.walk import take_walk

WALKS, STEPS = 2, 300
DID = ("leased", "expired", "drained", "trainer restarts", "rollbacks", "zombie fenced", "outage",
       "park parked", "requeue requeued", "taken over", "frozen", "memory full")  # fmt: skip


@pytest.mark.parametrize("first", [1, 1001, 2001])
def test_walk_breaks_no_invariant_and_drains(client: redis.Redis, first: int) -> None:
    did: Counter[str] = Counter()
    for seed in range(first, first + WALKS):
        did += take_walk(client, seed, STEPS)
    assert [name for name in DID if not did[name]] == []
