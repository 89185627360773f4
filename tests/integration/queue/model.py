"""What the random walk knows of its run, and what must hold after every step.

Owns the records of the model and every check against the server. Never acts on the run: `walk.py`
does. Invariants: those of the queue (docs/queue.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from rollstream.queue import calls
from rollstream.queue.calls import Lease, ScriptCall
from rollstream.queue.reads import StreamEntry
from rollstream.queue.scripts import Script
from tests.queue_bench import Bench, clocked_scripts, unpack_ids

T = TypeVar("T")
LEASE_MS, CAPACITY = 1000, 5
SMALL_REBASE = ("*", "local REBASE_AFTER = 65536", "local REBASE_AFTER = 16")


@dataclass
class Worker:
    """A worker process: dies by being replaced, and its leases become zombies."""

    name: str
    call_no: int = 0
    held: dict[str, Lease] = field(default_factory=dict)


@dataclass
class Lineage:
    """What ended how, as one line of checkpoints sees it."""

    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)

    def copy(self) -> Lineage:
        return Lineage(set(self.trained), set(self.dropped), set(self.skipped))

    def ended(self) -> set[int]:
        return self.trained | self.dropped | self.skipped


@dataclass
class Checkpoint:
    lineage: Lineage
    frontier: int
    above: set[int]


@dataclass
class Snapshot:
    """What a server that was killed comes back with."""

    keys: dict[bytes, bytes]
    accepted: set[str]
    lineage: Lineage
    past_id: str


class WalkState:
    """What the model knows of a run, and what must hold of both."""

    def __init__(
        self, client: redis.Redis, seed: int, scripts: Mapping[str, Script] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.num_ids = self.rng.choice([14, 40, 80])
        self.timeout_ms = self.rng.choice([0, 2000, 5000])
        self.window = self.rng.choice([8, 16])
        self.max_stale = self.rng.choice([-1, 1, 2])
        self.bench = Bench(
            client, f"walk-{seed}", clocked_scripts(SMALL_REBASE) if scripts is None else scripts,
            lease_ms=LEASE_MS, cap=CAPACITY, W=self.window, max_attempts=2, max_crashes=4,
            max_stale=self.max_stale, max_body=64,
        )  # fmt: skip
        self.client, self.key = client, self.bench.key
        self.log: list[str] = []
        self.stats: Counter[str] = Counter()
        self.num_names = 0
        self.workers = [self.new_worker() for _ in range(3)]
        self.past_leases: list[Lease] = []
        self.minted: dict[str, str] = {}
        self.accepted: set[str] = set()
        self.scan, self.epoch = 0, 1
        self.in_hand: list[StreamEntry] = []
        self.seen_entries: list[StreamEntry] = []
        self.version = 0
        self.consumer, self.number, self.rewind_id = "", 0, ""
        self.old_consumers: list[str] = []
        self.held: set[int] = set()
        self.lineage = Lineage()
        self.known_ended: set[int] = set()
        self.past_id = "0"
        self.frontier, self.terminal = 0, set[int]()
        self.may_go_back = True
        self.checkpoints: list[Checkpoint] = []
        self.snapshots: list[Snapshot] = []

    # --- small things --------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}{self.num_names}"

    def new_worker(self) -> Worker:
        return Worker(self.name("w"))

    def a_worker(self) -> Worker:
        return self.rng.choice(self.workers)

    def call(self, call: ScriptCall[T], repeat: Callable[[T, T], bool] | None = None) -> T:
        """Run a script and, sometimes, run it again as after a lost reply."""
        answer = self.bench.call(call)
        if repeat is not None and self.chance(0.4):
            before = self.bench.dump() if self.chance(0.2) else None
            again = self.bench.call(call)
            assert repeat(answer, again), (call.script, call.args[:3], answer, again)
            if before is not None:
                assert without_fenced(self.bench.dump()) == without_fenced(before), call.script
            self.stats["repeated"] += 1
        return answer

    def read_state(self) -> tuple[int, set[int], int]:
        state = self.bench.call(calls.state())
        return state.frontier, unpack_ids(state.frontier, state.bitmap), state.epoch

    def terminal_ids(self) -> set[int]:
        frontier, above, _ = self.read_state()
        return set(range(frontier)) | above

    # --- what holds after every step -----------------------------------------------------------
    def check(self) -> None:
        self.bench.audit()
        for message_id, row in self.client.xrange(f"{self.key}past", min=f"({self.past_id}"):
            self.past_id = message_id.decode()
            if row[b"reason"] != b"seen":
                self.lineage.dropped.add(int(row[b"g"]))
        frontier, above, epoch = self.read_state()
        terminal = set(range(frontier)) | above
        live = {int(gid) for gid in self.client.smembers(f"{self.key}gs")}
        self.lineage.dropped &= terminal  # withdrawn beyond the window comes again
        if epoch != self.epoch:
            self.epoch, self.scan = epoch, 0
        if not self.may_go_back:
            assert frontier >= self.frontier, "the frontier went back"
            assert terminal >= self.terminal, "a terminal id came free"
        self.frontier, self.terminal, self.may_go_back = frontier, terminal, False
        assert frontier not in above
        assert terminal <= self.lineage.ended(), terminal - self.lineage.ended()
        assert self.lineage.trained <= terminal, self.lineage.trained - terminal
        assert len(live) <= CAPACITY
        assert all(gid < frontier + self.window for gid in live), "a live group beyond the window"
        for key in self.client.keys(f"{self.key}[gb]:*"):
            assert int(key.rsplit(b":", 1)[1]) in live, key
        for gid in self.client.zrange(f"{self.key}dl", 0, -1):
            assert self.bench.state(int(gid)) == "open"
        self.check_leases()

    def check_leases(self) -> None:
        suspects: dict[str, list[int]] = {}
        for lease_id, crashes in self.leased_crashes().items():
            token = lease_id.split(":")[2]
            assert self.minted.get(token, lease_id) == lease_id
            if crashes >= 2:
                suspects.setdefault(token.split("-")[0], []).append(crashes)
        for worker, crashes_of in suspects.items():
            assert len(crashes_of) <= 8, (worker, crashes_of)
            assert max(crashes_of) < 3 or len(crashes_of) == 1, (worker, crashes_of)

    def leased_crashes(self) -> dict[str, int]:
        """Return the crashes of every leased member by lease id."""
        found = {}
        for raw in self.client.zrange(f"{self.key}l", 0, -1):
            gid, member, _ = raw.decode().split(":")
            found[raw.decode()] = int(self.client.hget(f"{self.key}g:{gid}", f"x{member}") or 0)
        return found

    def check_nothing_due(self, *, grace: bool) -> None:
        """After a sweep that left nothing over."""
        clock = int(self.bench.m("clock"))
        due = {"d": clock, "age": self.version - self.max_stale - 1, "l": clock}
        if self.max_stale < 0:
            del due["age"]
        if grace:
            del due["l"]
        for name, limit in due.items():
            assert self.client.zcount(self.key + name, "-inf", limit) == 0, name


def without_fenced(dump: dict[str, Any]) -> dict[str, Any]:
    """Leave out the one counter that counts repeats."""
    return {**dump, "c": {k: v for k, v in dump.get("c", {}).items() if k != b"fenced"}}
