"""The producer's acts: enqueue, skip, scan again, say that everything is enqueued."""

from __future__ import annotations

from rollstream.queue import calls
from rollstream.queue.keys import EVALUATION_PRIORITY, SCHEMA
from tests.integration.queue.model import WalkState

NUM_EVALUATIONS = 6


class ProducerActs(WalkState):
    """A producer that keeps no position but where it scans; worse than the real one, it may scan
    from 0 instead of the frontier."""

    def enqueue(self) -> None:
        if self.chance(0.3):
            self.client.lpop(f"{self.key}room")
            self.look()
        for _ in range(self.rng.randint(1, 4)):
            if self.scan >= self.num_ids or not self.enqueue_one(self.rng.randint(1, 4)):
                return

    def enqueue_one(self, n: int) -> bool:
        """Enqueue the next id; whether the scan may go on."""
        gid = self.scan
        call = calls.enqueue(
            gid, n, b"prompt %d" % gid, priority=gid % 2, timeout_ms=self.timeout_ms,
            env=("", "math", "a:b")[gid % 3],
        )  # fmt: skip
        answer = self.call(call)
        self.stats[f"enqueue {answer}"] += 1
        if answer in ("new", "dup", "done"):
            self.scan += 1
        return answer in ("new", "dup", "done")

    def enqueue_evaluation(self) -> None:
        """An evaluation group runs before all training groups and is in no account of ids."""
        gid = f"e:math:{self.rng.randrange(NUM_EVALUATIONS)}"
        call = calls.enqueue(
            gid, self.rng.randint(1, 3), b"prompt " + gid.encode(),
            priority=EVALUATION_PRIORITY, timeout_ms=self.timeout_ms,
        )  # fmt: skip
        self.stats[f"evaluation {self.call(call)}"] += 1

    def producer_restarts(self) -> None:
        self.scan = 0
        answer = self.call(calls.open_run(SCHEMA, "source", self.bench.budgets))
        assert answer[0] == "same"
        assert self.call(calls.open_run(SCHEMA, "other", {}))[0] == "mismatch"

    def end_of_data(self) -> None:
        if self.scan >= self.num_ids:
            self.stats[f"done {self.call(calls.end_of_data(self.epoch))}"] += 1
        if self.epoch > 1:
            assert self.call(calls.end_of_data(self.epoch - 1)) == "epoch"

    def skip(self) -> None:
        if self.scan < self.num_ids and self.scan % 3 == 0:
            gid = self.scan
            answer = self._skip(gid)
            self.stats[f"skip {answer}"] += 1

    def _skip(self, gid: int) -> str:
        # Known before the call: its repeat is judged within it.
        might = gid not in self.sight.terminal and str(gid) not in self.sight.gs
        answer = self.call(calls.skip(gid))
        if might and answer == "skipped":
            self.theirs.skipped.add(gid)
        return answer

    def presence(self) -> None:
        role = self.rng.choice(["worker", "producer", "aggregator"])
        name = self.a_worker().name if role == "worker" else role
        blocked = None
        if role == "producer" and self.chance(0.7):
            from_ms = self.rng.randint(0, 500)
            process = self.rng.choice(["first", "second"])
            blocked = calls.BlockedTime(process, from_ms, from_ms + self.rng.randint(0, 500))
        self.call(calls.present(role, name, leaving=self.chance(0.2), blocked=blocked))
