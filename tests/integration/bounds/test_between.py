"""A group that moves on while it is read is never handed out as a mixture, and never lost.

Commands of one round trip reach Redis one behind the other, and other clients' come in between. So
every place is tried: between two round trips, and between two commands of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from examples.devserver import DevServer
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Completion
from rollstream.queue.keys import SCHEMA
from rollstream.queue.reads import Command, StoredGroup, StreamEntry
from tests.builders import budgets

MB = 1 << 20
SHAPES = {"small": (3, 100), "several round trips": (3, 3 * MB), "thousands": (2100, 3)}
"""Members, and bytes of a body."""


class Stepping(BlockingQueue):
    """A queue whose commands reach the server one by one, and something may come before one."""

    before: Callable[[], object] | None = None
    place = -1
    num_sent = 0

    def _send(self, commands: Sequence[Command], client: redis.Redis | None = None) -> list[Any]:
        replies = []
        for command in commands:
            if self.num_sent == self.place and self.before is not None:
                self.before()
            self.num_sent += 1
            replies += super()._send([command], client)
        return replies

    def step(self, place: int, before: Callable[[], object] | None) -> None:
        self.place, self.before, self.num_sent = place, before, 0


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with DevServer() as server:
        yield server


class Stage:
    """One group of life 0 in `ready`, which can be brought to anything else."""

    def __init__(self, queue: BlockingQueue, shape: str) -> None:
        self.queue, self.call_no = queue, 0
        self.n, self.size = SHAPES[shape]
        queue.client.flushall()
        queue.call(calls.open_run(SCHEMA, "source", budgets(max_requeues=9)))
        queue.call(calls.connect("trainer", 1))
        self.enqueue(self.n)
        (self.entry,) = self.run(b"0")

    def enqueue(self, n: int) -> None:
        assert self.queue.call(calls.enqueue(0, n, b"prompt")) == "new"

    def run(self, mark: bytes) -> list[StreamEntry]:
        """Bring the group to `ready`, all its results made of `mark`."""
        while True:
            self.call_no += 1
            answer = self.queue.call(calls.lease("worker", self.call_no, 256))
            leases = [m.lease for group in answer.groups for m in group.members]
            if not leases:
                break
            for first in range(0, len(leases), 128):
                some = leases[first : first + 128]
                self.queue.call(
                    calls.complete([Completion(x, mark, mark * self.size) for x in some])
                )
        (full,) = self.queue.read_full("judge", count=9, block_s=0)
        assert self.queue.call(calls.verdict("0", full.message_id)) == "ready"
        return self.queue.pending_ready()

    # --- what may come in between ----------------------------------------------------------------
    def requeue(self) -> None:
        assert self.queue.call(calls.requeue("0", 0)) == "requeued"

    def requeue_and_run(self) -> None:
        self.requeue()
        self.run(b"1")

    def requeue_and_deliver(self) -> None:
        self.requeue_and_run()
        assert self.queue.call(calls.deliver("trainer", ["0"])) == ["ok"]

    def end(self) -> None:
        self.queue.call(calls.ack("trainer", ["0"]))

    def end_and_come_again(self) -> None:
        """A rewind brings the id back: its life is 0 again, and so is its size of another."""
        self.end()
        assert not self.queue.call(calls.rewind("trainer", "r", 0, b"")).taken
        self.n -= 1
        self.enqueue(self.n)
        self.run(b"1")
        assert self.queue.call(calls.deliver("trainer", ["0"])) == ["ok"]


ACTS = (
    Stage.requeue, Stage.requeue_and_run, Stage.requeue_and_deliver, Stage.end,
    Stage.end_and_come_again,
)  # fmt: skip
LIVE_ON = (Stage.requeue_and_run, Stage.requeue_and_deliver, Stage.end_and_come_again)


def is_whole(group: StoredGroup, n: int, size: int, mark: bytes) -> bool:
    return (
        group.n == n
        and group.headers == [mark] * n
        and group.bodies == [mark * size] * n
        and group.prompt == b"prompt"
    )


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_group_that_moves_on_while_it_is_delivered_is_whole_or_gone(
    server: DevServer, run_name: str, shape: str, act: Callable[[Stage], None]
) -> None:
    with (
        contextlib.closing(BlockingQueue.connect(server.url, run_name)) as queue,
        contextlib.closing(Stepping.connect(server.url, run_name)) as stepping,
    ):
        Stage(queue, "small")
        stepping.call(calls.deliver("trainer", []))  # it knows the script from now on
        stage = Stage(queue, shape)
        stepping.step(-1, None)
        assert stepping.deliver_and_fetch("trainer", [stage.entry]).answers == ["ok"]
        num_commands, gone = stepping.num_sent, 0
        for place in range(num_commands + 1):
            stage = Stage(queue, shape)
            n, size = stage.n, stage.size
            stepping.step(place, lambda stage=stage: act(stage))  # type: ignore[misc]  # bound at once
            found = stepping.deliver_and_fetch("trainer", [stage.entry])
            (group,) = found.groups
            if group is None:
                gone += 1
                assert found.answers in (["gone"], ["stale"])
            else:
                assert is_whole(group, n, size, b"0"), place
                assert group.ready_id == stage.entry.message_id
            # Whatever lives on is found by the next look, and is whole then.
            if act in LIVE_ON and place < num_commands:
                stepping.step(-1, None)
                (entry,) = queue.pending_ready()
                (again,) = stepping.deliver_and_fetch("trainer", [entry]).groups
                assert again is not None
                assert is_whole(again, stage.n, size, b"1")
        assert gone == num_commands  # behind the last command it is in hand
