"""The rest of a run beside its trainer, played with raw calls: no process, no engine, no clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Container, Sequence
from typing import Any

from rollstream.errors import DropReason
from rollstream.group import Trajectory
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Arg, Completion
from rollstream.queue.keys import MAX_MEMBERS_A_CALL, SCHEMA
from rollstream.stream import GroupStream
from rollstream.wire import encode_body, encode_header, encode_prompt, encode_text
from tests.builders import a_prompt, a_sample, budgets

Connect = Callable[..., GroupStream]
"""Connects a trainer to the run of a test (the fixture `connect`)."""


class Backstage:
    """Plays the producer, one worker and the aggregator of a run, with raw calls.

    What a test wants of a run beside its trainer: groups that are enqueued, leased, finished and
    judged, exactly when it says so.
    """

    def __init__(self, url: str, run: str, **changes: Arg) -> None:
        self.queue = BlockingQueue.connect(url, run)
        self.budgets = budgets(**changes)
        self.worker = uuid.uuid4().hex[:12]
        self.call_no = 0

    def __enter__(self) -> Backstage:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()

    def open(self, fingerprint: str = "data") -> Backstage:
        """Open the run, as a producer that lives."""
        self.queue.call(calls.open_run(SCHEMA, fingerprint, self.budgets))
        self.queue.call(calls.present("producer", "p"))
        return self

    def enqueue(
        self, *group_indexes: int, n: int = 2, timeout_ms: int = 0, env: str = ""
    ) -> list[str]:
        """Enqueue groups; their answers."""
        answers = []
        for group_index in group_indexes:
            prompt = encode_prompt(a_prompt(group_index, n, enqueued_unix_s=time.time()))
            call = calls.enqueue(group_index, n, prompt, timeout_ms=timeout_ms, env=env)
            answers.append(self.queue.call(call))
        return answers

    def end_of_data(self) -> str:
        """Say that everything of this epoch is enqueued."""
        info = self.queue.info()
        assert info is not None
        return self.queue.call(calls.end_of_data(info.epoch))

    def lease(self, limit: int = 256) -> list[Lease]:
        """Lease what waits."""
        self.call_no += 1
        answer = self.queue.call(calls.lease(self.worker, self.call_no, limit))
        return [member.lease for group in answer.groups for member in group.members]

    def complete(
        self, leases: Sequence[Lease], make: Callable[[int, int], Trajectory] = a_sample
    ) -> None:
        """Complete leased members with what `make(group_index, member)` returns."""
        done = []
        for lease in leases:
            trajectory = make(int(lease.group_index), lease.member)
            header = encode_header(trajectory, num_turns=1, done_unix_s=time.time())
            body, text = encode_body(trajectory), encode_text(trajectory)
            done.append(Completion(lease, header, body, text))
        for start in range(0, len(done), MAX_MEMBERS_A_CALL):
            self.queue.call(calls.complete(done[start : start + MAX_MEMBERS_A_CALL]))

    def judge(self, drop: Container[int] = ()) -> None:
        """Keep every full group, but for those in `drop`."""
        while entries := self.queue.read_full("judge", count=100, block_s=0):
            for entry in entries:
                reason = DropReason.ZERO_STD if int(entry.group_index) in drop else None
                call = calls.verdict(entry.group_index, entry.message_id, drop=reason)
                self.queue.call(call)

    def work(
        self, make: Callable[[int, int], Trajectory] = a_sample, drop: Container[int] = ()
    ) -> None:
        """Lease, complete and judge everything that waits."""
        while leases := self.lease():
            self.complete(leases, make)
        self.judge(drop)

    def finish(self, *group_indexes: int, n: int = 2, env: str = "", **how: Any) -> None:
        """Enqueue groups and bring them to the trainer's door."""
        answers = self.enqueue(*group_indexes, n=n, env=env)
        assert set(answers) <= {"new"}, answers
        self.work(**how)

    def keys(self) -> dict[bytes, bytes]:
        """Dump every key of the run, to be restored later: a server that loses its last second."""
        client = self.queue.client
        names = list(client.scan_iter(match=f"{self.queue.prefix}*"))
        return {name: client.dump(name) for name in names}

    def roll_back(self, keys: dict[bytes, bytes]) -> None:
        """Make the run what it was when `keys` were dumped."""
        client = self.queue.client
        gone = list(client.scan_iter(match=f"{self.queue.prefix}*"))
        with client.pipeline(transaction=True) as pipeline:
            if gone:
                pipeline.delete(*gone)
            for name, data in keys.items():
                pipeline.restore(name, 0, data)
            pipeline.execute()


def wait_until(condition: Callable[[], Any], timeout_s: float = 45.0) -> Any:
    """Poll until `condition()` is true and return its value; fail with a bound, never sleep."""
    limit = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {timeout_s} s: {condition}"
        time.sleep(0.01)
    return value
