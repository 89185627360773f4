"""A random walk of deaths, checkpoints and rollbacks: relative to its checkpoint, a trainer trains
on every group once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollstream.batch import Batch
from rollstream.errors import StreamStalled
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage

Connect = Callable[..., GroupStream]
NUM_GROUPS = 24


@dataclass
class Walk:
    """One trainer lineage over one run, and what it has trained on."""

    run: Backstage
    connect: Connect
    rng: random.Random
    stream: GroupStream = field(init=False)
    trained: set[int] = field(default_factory=set)
    out: list[Batch] = field(default_factory=list)
    checkpoints: list[tuple[dict[str, Any], set[int]]] = field(default_factory=list)
    snapshots: list[dict[bytes, bytes]] = field(default_factory=list)

    def start(self) -> None:
        self.stream = self.connect()
        self.checkpoints.append((self.stream.state_dict(), set()))

    def produce(self) -> None:
        """Scan again from the start, as after an epoch change; what is done is refused."""
        room = self.rng.randint(1, NUM_GROUPS)
        assert set(self.run.enqueue(*range(room), n=1)) <= {"new", "dup", "done", "full"}

    def work(self) -> None:
        self.run.work()

    def train(self) -> None:
        with contextlib.suppress(StreamStalled):
            batch = self.stream.next_batch(self.rng.randint(1, 3), 0.05)
            if batch is not None:
                again = self.trained & set(batch.group_indexes)
                assert not again, f"handed to training twice: {again}"
                self.trained |= set(batch.group_indexes)
                self.out.append(batch)

    def ack(self) -> None:
        if self.out:
            self.out.pop(self.rng.randrange(len(self.out))).ack()

    def save(self) -> None:
        if not self.out:
            self.checkpoints.append((self.stream.state_dict(), set(self.trained)))

    def die(self) -> None:
        """A new process, from one of the last checkpoints (JSON in between is tested apart)."""
        state, trained = self.rng.choice(self.checkpoints[-2:])
        old = self.stream
        self.stream, self.trained, self.out = self.connect(state=state), set(trained), []
        old.close()

    def snapshot(self) -> None:
        self.snapshots.append(self.run.keys())

    def roll_back(self) -> None:
        if self.snapshots:
            del self.snapshots[self.rng.randrange(len(self.snapshots)) + 1 :]
            self.run.roll_back(self.snapshots[-1])

    def empty(self) -> None:
        """Redis lost everything, and a producer opened the run again."""
        self.run.roll_back({})
        self.run.open()
        self.snapshots.clear()

    def drain(self) -> None:
        while self.out:
            self.ack()
        for _ in range(5 * NUM_GROUPS):
            self.run.enqueue(*range(NUM_GROUPS), n=1)
            self.run.work()
            self.train()
            while self.out:
                self.ack()
            if len(self.trained) == NUM_GROUPS:
                break
        self.run.enqueue(*range(NUM_GROUPS), n=1)
        self.run.work()
        self.run.end_of_data()
        for batch in self.stream.batches(groups=4, timeout_s=3):
            raise AssertionError(f"handed out after everything was trained: {batch.group_indexes}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_trainer_trains_every_group_once_through_deaths_checkpoints_and_rollbacks(
    valkey_url: str, run_name: str, connect: Connect, seed: int
) -> None:
    rng = random.Random(seed)
    with Backstage(valkey_url, run_name, cap=16, lease_ms=60_000) as run:
        walk = Walk(run.open(), connect, rng)
        walk.start()
        steps = [walk.produce, walk.work, walk.train, walk.train, walk.ack, walk.ack, walk.save,
                 walk.snapshot, walk.die, walk.roll_back, walk.empty]  # fmt: skip
        weights = [6, 6, 5, 5, 5, 5, 3, 2, 1, 2, 0.4]
        for _ in range(4):
            for step in rng.choices(steps, weights, k=25):
                step()
            rng.choice([walk.die, walk.snapshot])()
        walk.roll_back()
        walk.drain()
        assert walk.trained == set(range(NUM_GROUPS))
        frontier = walk.stream.state_dict()["frontier"]
        assert frontier == NUM_GROUPS
        assert run.queue.call(calls.audit(deep=True)).problems == []
