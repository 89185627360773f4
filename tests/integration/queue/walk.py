"""Weighted random walks over everything that can happen to a run, checked after every step.

Owns how likely each act is, and the notes of a walk that broke. Longer walks than the test's:

    python -m tests.integration.queue.walk SEED WALKS STEPS
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import redis

from rollstream.queue.scripts import Script
from tests.integration.queue.acts import Walk
from tests.integration.queue.model import SMALL_REBASE

__all__ = ["SMALL_REBASE", "take_walk"]

ACTIONS: dict[str, float] = {
    "enqueue": 10, "producer_restarts": 2, "skip": 1, "withdraw": 1,
    "lease": 16, "lease_again": 3, "lease_old": 2, "beat": 12, "complete": 14, "zombie": 6,
    "fail": 6, "worker_dies": 2, "everybody_dies": 0.8, "pass_time": 16, "outage": 1, "sweep": 5,
    "read_full": 10, "claim_full": 2, "verdict": 12,
    "read_ready": 14, "ack": 8, "old_trainer_calls": 1, "retire": 1, "checkpoint": 4,
    "trainer_restarts": 0.7, "control": 3, "snapshot": 2, "server_rolls_back": 0.7,
}  # fmt: skip
"""What may happen next, by weight."""


def take_walk(
    client: redis.Redis, seed: int, steps: int, scripts: Mapping[str, Script] | None = None
) -> Counter[str]:
    """Take one walk and return what happened.

    Raises:
        AssertionError: an invariant broke; the seed and the last steps are in its notes.
    """
    walk = Walk(client, seed, scripts)
    try:
        walk.run(steps, ACTIONS)
    except Exception as error:
        error.add_note(f"seed {seed}, step {len(walk.log)}: {' '.join(walk.log[-8:])}")
        raise
    return walk.stats


def main() -> None:
    """Take many walks on a server of their own and print what happened in them."""
    from examples.devserver import DevServer

    seed, walks, steps = (int(argument) for argument in sys.argv[1:4])
    stats: Counter[str] = Counter()
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        for number in range(seed, seed + walks):
            stats += take_walk(client, number, steps)
    for name, count in sorted(stats.items()):
        print(f"{name:24} {count}")  # noqa: T201 - the report of a long walk


if __name__ == "__main__":
    main()
