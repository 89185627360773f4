"""Weighted random walks over everything that can happen to a run, checked after every step.

Owns how likely each act is, how a walk ends, and the notes of a walk that broke. Longer walks than
the test's, on a server of their own:

    python -m tests.integration.queue.walk SEED WALKS STEPS [--seconds S] [--without ACT…] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence

import redis

from rollstream.queue import calls
from rollstream.queue.scripts import Script
from tests.integration.queue.acts.aggregators import AggregatorActs
from tests.integration.queue.acts.operator import OperatorActs
from tests.integration.queue.acts.trainer import TrainerActs
from tests.integration.queue.invariants import LEFT_AFTER_THE_END, check_drained
from tests.integration.queue.model import SMALL_REBASE

__all__ = ["ACTIONS", "SMALL_REBASE", "Walk", "take_walk"]

DRAIN_ROUNDS = 400
MAX_BROKEN = 3
MOODS = (0.4, 1, 1, 2)
"""By which a walk multiplies each weight, so that no two walks are alike."""
STEADY = {"enqueue", "memory_comes_back"}
"""Without these a walk has nothing to do."""
ACTIONS: dict[str, float] = {
    "enqueue": 14, "enqueue_evaluation": 2, "producer_restarts": 2, "skip": 1, "presence": 1,
    "end_of_data": 2,
    "lease": 16, "lease_again": 3, "lease_old": 2, "beat": 12, "complete": 14, "zombie": 6,
    "fail": 8, "park": 6, "confirm": 3, "worker_dies": 2, "worker_freezes": 1.5,
    "worker_thaws": 1.5, "everybody_dies": 2, "worker_grabs": 1,
    "pass_time": 16, "time_goes_by": 4, "outage": 1, "sweep": 5, "long_pause": 0.3,
    "deadline_passes": 0.4,
    "read_full": 10, "claim_full": 3, "verdict": 13, "aggregator_dies": 1,
    "read_ready": 14, "read_evaluations": 3, "ack": 6, "old_trainer_calls": 1, "retire": 1,
    "trainer_names_anything": 2, "checkpoint": 4, "trainer_restarts": 1.5, "new_version": 2.5,
    "withdraw": 2, "requeue": 2, "control": 4, "pause_expires": 1, "set_budget": 0.7,
    "group_vanishes": 0.8, "snapshot": 2, "server_rolls_back": 1, "server_is_emptied": 0.25,
    "settle": 1, "memory_fills": 0.5, "memory_comes_back": 2,
}  # fmt: skip
"""What may happen next, by weight."""


class Walk(AggregatorActs, TrainerActs, OperatorActs):
    """One walk: `run(steps)` acts, checks, and ends."""

    def begin(self) -> None:
        """Connect the first trainer and save its first checkpoint."""
        self.trainer.claim(None, None)
        self.checkpoint()
        self.snapshot()
        self.check(self.sight)

    def step(self, name: str) -> None:
        """Do one act and check everything."""
        self.log.append(name)
        self.stats[f"act {name}"] += 1
        before = self.sight
        getattr(self, name)()
        self.check(before)

    def run(self, steps: int, actions: Mapping[str, float]) -> None:
        weights = [
            weight * (1 if name in STEADY else self.rng.choice(MOODS))
            for name, weight in actions.items()
        ]
        plan = self.rng.choices(list(actions), weights, k=steps)
        # Rare acts too happen once, where there are steps for that.
        for name in [name for name in actions if name not in plan]:
            often = [j for j, other in enumerate(plan) if plan.count(other) > 1]
            if often:
                plan[self.rng.choice(often)] = name
        self.begin()
        for name in plan:
            if self.sight.frontier >= self.num_ids and not self.sight.live:
                self.step("train_again")
            self.step(name)
        self.end()

    def end(self) -> None:
        """Let the run end: drained, or aborted and done again; then maybe trained once more."""
        if self.chance(0.25):
            self.step("abort")
            assert self.sight.names <= LEFT_AFTER_THE_END, self.sight.names
            self.step("server_is_emptied")
        self.drain()
        if self.chance(0.3):
            self.step("trainer_restarts")
            self.drain()

    def train_again(self) -> None:
        """All is trained: go back to the first checkpoint, so that there is something to do."""
        self.restart_from(self.checkpoints[0])

    # --- acts that reach their point only together with another --------------------------------
    def everybody_dies(self) -> None:
        """Make room for members that can be leased, mostly."""
        self.memory_comes_back()
        if self.chance(0.8):
            self.finish_full_groups()
        super().everybody_dies()

    def server_rolls_back(self) -> None:
        """Ack what the server forgot, before anybody noticed that it did."""
        super().server_rolls_back()
        if self.trainer.held and self.chance(0.6):
            self.ack()

    def new_version(self) -> None:
        """Hand out right behind a new version: what waits may be stale by now."""
        super().new_version()
        if self.chance(0.5):
            self.read_ready()

    def group_vanishes(self) -> None:
        """Judge what is gone, before anybody noticed that it is."""
        super().group_vanishes()
        for aggregator in self.aggregators:
            gone = [entry for entry in aggregator.in_hand if entry.group_index in self.vanished]
            if gone and self.chance(0.5):
                aggregator.in_hand.remove(gone[0])
                self.judge_entry(gone[0])

    # --- the end -------------------------------------------------------------------------------
    def drain(self) -> None:
        """Invariant 16: one healthy process of each kind finishes the run."""
        self.step("memory_comes_back")
        self.workers = [self.new_worker()]
        for name, value in self.bench.budgets.items():
            self.call(calls.set_budget(name, str(value)))
        for _ in range(DRAIN_ROUNDS):
            if self.sight.frontier >= self.num_ids and not self.sight.live:
                break
            self.step("drain_round")
        check_drained(self.sight, self.num_ids)
        assert self.lineage.ended() == set(range(self.sight.frontier)) | self.sight.terminal
        assert self.sight.m["done"] == "1", "drained, and the producer is not done"
        self.stats["drained"] += 1

    def drain_round(self) -> None:
        """One round of a healthy worker, aggregator, producer and trainer."""
        if self.sight.m["state"] == "paused":
            self.call(calls.resume())
        self.settle()
        self.pass_ms(150)
        self.sweep_all()
        if int(self.sight.m["epoch"]) != self.epoch:
            self.epoch, self.scan = int(self.sight.m["epoch"]), 0
        while self.scan < self.num_ids and self.enqueue_one(2):
            pass
        self.end_of_data()
        worker = self.workers[0]
        self.take(worker, self.lease_for(worker, 50))
        self.beat_for(worker)
        leases = list(worker.held.values())
        worker.held.clear()
        self.report(leases)
        self.finish_full_groups()

    def finish_full_groups(self) -> None:
        """A healthy aggregator and trainer take all there is."""
        self.read_full()
        self.claim_full()
        for aggregator in self.aggregators:
            while aggregator.in_hand:
                self.judge_entry(aggregator.in_hand.pop(0), keep=True)
        self.hold(self.bench.queue.read_ready(count=50, block_s=0))
        self.look()
        self.hold(self.bench.queue.pending_ready(count=50))
        self.look()
        self.hold(self.bench.queue.read_eval(count=50, block_s=0))
        self.look()
        if self.trainer.held:
            self.train(sorted(self.trainer.held))

    def clean(self) -> None:
        """Leave nothing on the server, whatever happened."""
        self.client.config_set("maxmemory", 0)
        self.client.delete(f"now:{self.key}", *self.client.keys(f"{self.key}*"))


def take_walk(
    client: redis.Redis,
    seed: int,
    steps: int,
    scripts: Mapping[str, Script] | None = None,
    actions: Mapping[str, float] | None = None,
    sizes: Sequence[int] = (14, 40, 80),
) -> Counter[str]:
    """Take one walk and return what happened.

    Raises:
        AssertionError: an invariant broke; the seed and the last steps are in its notes.
    """
    walk = Walk(client, seed, scripts, sizes=sizes)
    try:
        walk.run(steps, ACTIONS if actions is None else actions)
    except Exception as error:
        error.add_note(f"seed {seed}, step {len(walk.log)}: {' '.join(walk.log[-8:])}")
        raise
    finally:
        walk.clean()
    return walk.stats


def main() -> int:
    """Take many walks on a server of their own and print what happened in them."""
    from examples.devserver import DevServer

    parser = argparse.ArgumentParser(prog="python -m tests.integration.queue.walk")
    parser.add_argument("seed", type=int)
    parser.add_argument("walks", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no walk after that")
    parser.add_argument("--without", nargs="*", default=[], choices=ACTIONS, metavar="ACT")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable()
    actions = {name: weight for name, weight in ACTIONS.items() if name not in given.without}
    stats, broken, number = Counter[str](), 0, given.seed
    limit = time.monotonic() + given.seconds
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        while number < given.seed + given.walks and time.monotonic() < limit:
            try:
                stats += take_walk(client, number, given.steps, actions=actions)
            except (AssertionError, redis.RedisError, LookupError) as error:
                traceback.print_exception(error, limit=-4)
                broken += 1
                if broken == MAX_BROKEN:
                    break
            number += 1
    report = {"walks": number - given.seed, "broken": broken, **dict(sorted(stats.items()))}
    lines = [json.dumps(report)] if given.json else [f"{k:36} {v}" for k, v in report.items()]
    print("\n".join(lines))  # noqa: T201 - the report of a long walk
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
