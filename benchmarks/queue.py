"""How long one call keeps Redis from answering anybody else (docs/benchmarks.md).

    python -m benchmarks.queue [--json] [--leases N]

Times are CPU time of the server's main thread from the first byte of a call to its last (Linux
keeps it in nanoseconds), so other processes on the machine do not count; `wall_max_ms` is the
longest of them in the server's own SLOWLOG, and does. `calls` is how many were made, `over_5_ms`
how many of them took longer than the bound that the queue keeps. Expired leases are made by setting
their scores to 0, which `sweep` cannot tell from time that passed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.devserver import DevServer
from rollstream.queue import calls
from rollstream.queue.answers import Lease, LeaseAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Completion, ScriptCall
from rollstream.queue.fetch import MAX_TRIP_BYTES, first_trip
from rollstream.queue.keys import MAX_COMPLETE_BYTES, MAX_LEASE, MAX_MEMBERS_A_CALL, SCHEMA
from rollstream.queue.reads import StreamEntry

BOUND_MS = 5.0
BODY = 33_000
HEADER = b"h" * 180
PROMPT = b"p" * 2_000
WORKER, TRAINER = "worker", "trainer"
BUDGETS: dict[str, calls.Arg] = {
    "lease_ms": 600_000, "cap": 1_000_000, "W": 1 << 30, "max_attempts": 3, "max_crashes": 4,
    "max_requeues": 1_000_000, "max_stale": -1, "max_body": 32 << 20,
}  # fmt: skip


class Stage:
    """One run on one server, and the times that its scripts took there."""

    def __init__(self, server: DevServer) -> None:
        assert server.process is not None
        pid = server.process.pid
        self._clock = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self.queue = BlockingQueue.connect(server.url, "bench")
        self.client = self.queue.client
        self.client.config_set("slowlog-max-len", 100_000)
        self.figures: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        """Begin with an empty run that knows its scripts."""
        self.client.config_set("slowlog-log-slower-than", -1)
        self.client.flushall()
        self.queue.call(calls.open_run(SCHEMA, "source", BUDGETS))
        self.queue.call(calls.connect(TRAINER, 1))
        self._numbers = itertools.count(1)

    def time(self, name: str, wanted: Iterable[ScriptCall[Any]]) -> list[Any]:
        """Make calls one by one and keep what they took; their answers."""
        answers: list[Any] = []

        def make(call: ScriptCall[Any]) -> None:
            answers.append(self.queue.call(call))

        self.time_trips(name, (functools.partial(make, call) for call in wanted))
        return answers

    def time_trips(self, name: str, trips: Iterable[Callable[[], object]]) -> None:
        """The same of round trips of any commands."""
        self.client.slowlog_reset()
        self.client.config_set("slowlog-log-slower-than", 1_000)
        took = []
        for trip in trips:
            before = self.cpu_ms()
            trip()
            took.append(self.cpu_ms() - before)
        self.client.config_set("slowlog-log-slower-than", -1)
        slow = [entry["duration"] / 1000 for entry in self.client.slowlog_get(100_000)]
        self.figures[name] = summary(took) | {"wall_max_ms": max(slow, default=0.0)}

    def cpu_ms(self) -> float:
        """Return the CPU time that the server's main thread has had."""
        return int(self._clock.read_text().split()[0]) / 1e6

    # --- groups --------------------------------------------------------------------------------
    def enqueue(self, ids: Sequence[int], n: int) -> None:
        """Enqueue groups."""
        for some in batched(ids, 100):
            self.queue.call_many([calls.enqueue(gid, n, PROMPT) for gid in some])

    def lease_calls(self, count: int, limit: int = MAX_LEASE) -> Iterator[ScriptCall[Any]]:
        """Return calls that go on with the worker's numbers."""
        return (calls.lease(WORKER, next(self._numbers), limit) for _ in range(count))

    def lease(self, count: int) -> list[Lease]:
        """Lease members until `count` are."""
        leases: list[Lease] = []
        while len(leases) < count:
            answer = self.queue.call(next(self.lease_calls(1)))
            leases += leases_of(answer)
        return leases

    def complete(self, leases: Sequence[Lease], size: int) -> None:
        """Complete members, as many a call as it may have."""
        step = max(1, min(MAX_MEMBERS_A_CALL, MAX_COMPLETE_BYTES // max(1, size)))
        for some in batched(leases, step):
            self.queue.call(calls.complete([Completion(x, HEADER, b"b" * size) for x in some]))

    def ready(self, ids: Sequence[int], n: int, size: int) -> list[StreamEntry]:
        """Bring groups to `ready`; their entries."""
        self.enqueue(ids, n)
        self.complete(self.lease(len(ids) * n), size)
        full = self.queue.read_full("judge", count=len(ids), block_s=0)
        self.queue.call_many([calls.verdict(e.group_index, e.message_id) for e in full])
        return self.queue.read_ready(count=len(ids), block_s=0)

    def hold(self, ids: Sequence[int], n: int, size: int) -> None:
        """Bring groups to `delivered`."""
        for some in batched(self.ready(ids, n, size), 64):
            self.queue.call(calls.deliver(TRAINER, [e.group_index for e in some]))


def summary(took: Sequence[float]) -> dict[str, Any]:
    if not took:
        return {"calls": 0}
    cuts = statistics.quantiles(took, n=100) if len(took) > 1 else [took[0]] * 99
    return {
        "calls": len(took),
        "total_s": round(sum(took) / 1000, 3),
        "p50_ms": round(statistics.median(took), 3),
        "p99_ms": round(min(cuts[98], max(took)), 3),
        "max_ms": round(max(took), 3),
        "over_5_ms": sum(one > BOUND_MS for one in took),
    }


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def leases_of(answer: LeaseAnswer) -> list[Lease]:
    return [member.lease for group in answer.groups for member in group.members]


UNIT = "local x = 0; for j = 1, 100000 do x = x + j % 7 end; return x"
"""What to compare machines, and busy hours of one machine, by."""


def unit(stage: Stage) -> None:
    """Time a loop in Lua that touches no key."""
    stage.time_trips("unit: 100,000 steps of a loop in Lua", [_run_unit(stage)] * 100)


def _run_unit(stage: Stage) -> Callable[[], object]:
    return lambda: stage.client.eval(UNIT, 0)


# --- the cases -----------------------------------------------------------------------------------
def expired_leases(stage: Stage, num_leases: int) -> None:
    """Sweep pages until nothing is due any more."""
    for n in (8, 1000):
        stage.clear()
        stage.enqueue(range(-(-num_leases // n)), n)
        stage.lease(num_leases)
        stage.client.zunionstore(f"{stage.queue.prefix}l", {f"{stage.queue.prefix}l": 0})
        pages = itertools.takewhile(
            lambda _: stage.client.zcard(f"{stage.queue.prefix}l"), itertools.repeat(calls.sweep())
        )
        answers = stage.time(f"sweep of {num_leases} expired leases, n={n}", pages)
        assert sum(answer.expired for answer in answers) >= num_leases


def members(stage: Stage) -> None:
    """What workers and the producer call."""
    for n in (8, 1024, 4096):
        stage.clear()
        some = (calls.enqueue(gid, n, PROMPT) for gid in range(100))
        stage.time(f"enqueue, n={n}", some)
    for n in (8, 1024):
        stage.clear()
        stage.enqueue(range(25_600 // n), n)
        stage.time(f"lease of {MAX_LEASE}, n={n}", stage.lease_calls(100))
        stage.clear()
        stage.enqueue(range(-(-2048 // n)), n)
        ids = [lease.id for lease in stage.lease(2048)]
        stage.time(f"beat of 2,048, n={n}", (calls.beat(WORKER, ids) for _ in range(200)))
    for n, size in ((8, BODY), (1024, 4_000), (1024, BODY), (8, MAX_COMPLETE_BYTES)):
        stage.clear()
        step = max(1, min(MAX_MEMBERS_A_CALL, MAX_COMPLETE_BYTES // size))
        stage.enqueue(range(max(1, 60 * step // n)), n)
        leases = stage.lease(max(n, 60 * step // n * n))
        some = [
            calls.complete([Completion(x, HEADER, b"b" * size) for x in part])
            for part in batched(leases, step)
        ]
        stage.time(f"complete of {step} x {size} bytes, n={n}", some)


def ends(stage: Stage) -> None:
    """What ends a group or begins it anew."""
    for n, size in ((8, BODY), (128, 4_000), (1024, 4_000)):
        stage.clear()
        stage.enqueue(range(32), n)
        stage.complete(stage.lease(32 * n), size)
        full = stage.queue.read_full("judge", count=32, block_s=0)
        some = [calls.verdict(e.group_index, e.message_id) for e in full]
        stage.time(f"verdict, n={n}", some)
        gids = [e.group_index for e in full]
        stage.time(f"deliver of 32, n={n}", [calls.deliver(TRAINER, gids)] * 20)
        acks = [calls.ack(TRAINER, gids)]
        for first in range(32, 160, 32):
            stage.hold(range(first, first + 32), n, size)
            acks.append(calls.ack(TRAINER, [str(gid) for gid in range(first, first + 32)]))
        stage.time(f"ack of 32, n={n}", acks)
    for n in (8, 1024, 4096):
        stage.clear()
        stage.enqueue(range(20), n)
        stage.lease(20 * n)
        stage.time(f"requeue of an open group, all leased, n={n}",
                   [calls.requeue(str(gid), 0) for gid in range(20)])  # fmt: skip
        stage.lease(20 * n)
        stage.time(f"withdraw of an open group, all leased, n={n}",
                   [calls.withdraw(str(gid)) for gid in range(20)])  # fmt: skip
    for n in (8, 1024, 4096):
        stage.clear()
        late = [calls.enqueue(gid, n, PROMPT, timeout_ms=10**9) for gid in range(20)]
        stage.queue.call_many(late)
        stage.lease(20 * n)
        stage.client.zunionstore(f"{stage.queue.prefix}dl", {f"{stage.queue.prefix}dl": 0})
        pages = itertools.takewhile(
            lambda _: stage.client.zcard(f"{stage.queue.prefix}dl"), itertools.repeat(calls.sweep())
        )
        stage.time(f"sweep of 20 passed deadlines, n={n}", pages)


def trainers(stage: Stage) -> None:
    """What a trainer asks for besides."""
    stage.clear()
    entries = stage.ready(range(64), 8, BODY)
    parts = [entries[i : i + first_trip(entries[i:])] for i in range(0, 60, 15)]
    stage.time_trips(
        f"deliver and fetch, round trips of up to {MAX_TRIP_BYTES >> 20} MB",
        [lambda part=part: stage.queue.deliver_and_fetch(TRAINER, part) for part in parts],  # type: ignore[misc]  # bound at once
    )
    for live, terminal in ((512, 100_000), (4_096, 100_000), (4_096, 1_000_000)):
        stage.clear()
        stage.enqueue(range(live), 8)
        # Every other live group was ended in the checkpoint, and all ids above them.
        bits = bytearray(b"\xff" * (terminal // 8))
        bits[: live // 8] = b"\x55" * (live // 8)
        call = calls.rewind(TRAINER, "r1", 0, bytes(bits))
        stage.time(f"rewind, {live} live, half of them seen, {terminal} ids", [call])
        stage.time(f"sweeps behind it, {live} live, {terminal} ids", drained(stage))
        stage.time(f"state of {terminal} ids, {live} live", [calls.state()] * 20)


def drained(stage: Stage) -> Iterator[ScriptCall[Any]]:
    """Sweep pages until one is not full."""
    while stage.queue.call(calls.sweep()).more:
        yield calls.sweep()


def main() -> None:
    parser = argparse.ArgumentParser(description="the longest that one call takes of Redis")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--leases", type=int, default=100_000, help="that expire at once")
    asked = parser.parse_args()
    with DevServer() as server:
        stage = Stage(server)
        unit(stage)
        expired_leases(stage, asked.leases)
        members(stage)
        ends(stage)
        trainers(stage)
        version = stage.client.info("server")
        stage.queue.close()
    if asked.json:
        name = version.get("valkey_version") or version["redis_version"]
        print(json.dumps({"benchmark": "queue", "server": name, **stage.figures}))
        return
    for case, row in stage.figures.items():
        print(f"{case:62} " + "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
