"""The model under hypothesis, short; longer by `machine.py` itself."""

from __future__ import annotations

import redis

from tests.integration.queue.machine import explore


def test_machine_finds_no_acts_that_break_an_invariant(client: redis.Redis) -> None:
    """What it finds, `python -m tests.integration.queue.machine` makes small."""
    did = explore(client, examples=5, steps=20, shrink=False)
    assert did["drained"] >= 5
    assert did["leased"]
    assert did["repeated"]
