"""What the random walk knows of its run: its processes, its two histories, and every call judged.

Owns the records of the model, the bench with its clock, and the one way to call a script (`call`):
answer and effects are judged, and often the same call comes again, as after a lost reply. Never
decides what happens: the acts do. Invariant: what the trainer counts (`lineage`) and what the
server counts (`theirs`) differ only from a rollback until the trainer noticed it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import redis

from rollstream.frontier import TerminalIds
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import StreamEntry
from rollstream.queue.scripts import Script
from rollstream.trainer.lineage import Lineage as Claim
from tests.integration.queue.effects import check_effects
from tests.integration.queue.invariants import Known, Lineage, check_all
from tests.integration.queue.oracle import Scene, check_answer, sweep_bounds
from tests.integration.queue.sight import LOOK, Looks, Sight
from tests.queue_bench import Bench, clocked_scripts

T = TypeVar("T")
LEASE_MS, CAPACITY, MAX_BODY = 1000, 5, 64
REPEATED = 0.3
"""Share of calls whose reply is lost, so that they come again."""
SMALL_REBASE = ("*", "local REBASE_AFTER = 65536", "local REBASE_AFTER = 16")


@dataclass
class Worker:
    """A worker process: dies by being replaced, and its leases become zombies."""

    name: str
    call_no: int = 0
    held: dict[str, Lease] = field(default_factory=dict)


@dataclass
class Aggregator:
    """An aggregator with the entries it took and has not judged."""

    name: str
    in_hand: list[StreamEntry] = field(default_factory=list)


@dataclass
class Checkpoint:
    """What a trainer saved, and what the model knows of that moment."""

    lineage: Lineage
    terminal: TerminalIds
    version: int


@dataclass
class Snapshot:
    """What a server that was killed comes back with."""

    keys: dict[bytes, bytes]
    accepted: set[str]
    theirs: Lineage
    past_id: str
    vanished: set[str]


class WalkBench(Bench):
    """A bench whose clock can be moved while the server's memory is full, too."""

    def set_clock(self, now_ms: int) -> None:
        self.now_ms = now_ms
        script = "redis.call('ZREM', KEYS[2], ''); return redis.call('SET', KEYS[1], ARGV[1])"
        self.client.eval(script, 2, f"now:{self.key}", f"{self.key}d", now_ms)


class Trainer(Claim):
    """The package's own claim of a trainer, whose calls the model judges as all others."""

    def __init__(self, queue: BlockingQueue, model: WalkState) -> None:
        super().__init__(queue)
        self._model = model
        self.held: set[int] = set()

    @property
    def rewind_id(self) -> str:
        return self._rewind_id

    def _read_server_id(self) -> str:
        return self._model.server_id


class JudgedQueue(BlockingQueue):
    """A queue whose script calls go through the model."""

    model: WalkState

    def call(self, call: ScriptCall[T]) -> T:
        return self.model.call(call)


class WalkState:
    """What the model knows of a run, and what must hold of both."""

    def __init__(
        self, client: redis.Redis, seed: int, scripts: Mapping[str, Script] | None = None,
        rng: random.Random | None = None, sizes: Sequence[int] = (14, 40, 80),
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed) if rng is None else rng
        self.num_ids = self.rng.choice(sizes)
        self.timeout_ms = self.rng.choice([0, 2000, 5000])
        scripts = clocked_scripts(SMALL_REBASE) if scripts is None else scripts
        scripts = {**scripts, LOOK.name: LOOK}
        load_all(client, scripts)
        self.bench = WalkBench(
            client, f"walk-{seed}", scripts, lease_ms=LEASE_MS, cap=CAPACITY,
            W=self.rng.choice([8, 16]), max_attempts=self.rng.choice([1, 2, 3]),
            max_crashes=self.rng.choice([2, 4, 4, 4, 4]), max_requeues=2,
            max_stale=self.rng.choice([-1, 0, 1, 1, 2]), max_body=MAX_BODY,
            on_stale=self.rng.choice(["drop", "requeue", "requeue", "deliver"]),
        )  # fmt: skip
        self.client, self.key = client, self.bench.key
        self.judged = JudgedQueue(client, client, self.bench.queue.run, scripts)
        self.judged.model = self
        self.looks = Looks(self.key)
        self.log: list[str] = []
        self.stats: Counter[str] = Counter()
        self._num_names = 0
        self.workers = [self.new_worker() for _ in range(3)]
        self.frozen: list[Worker] = []
        self.past_leases: list[Lease] = []
        self.minted: dict[str, str] = {}
        self.accepted: set[str] = set()
        self.scan, self.epoch = 0, 1
        self.aggregators = [Aggregator(self.name("a")) for _ in range(2)]
        self.seen_entries: list[StreamEntry] = []
        self.lineage = self.theirs = Lineage()
        self.past_id = "-"
        self.vanished: set[str] = set()
        self.memory_full = False
        self.num_labels = 0
        self.server_id = self.name("server")
        self.may_go_back = True
        self.checkpoints: list[Checkpoint] = []
        self.snapshots: list[Snapshot] = []
        self.sight: Sight = self.look()
        self.trainer = Trainer(self.judged, self)
        self.old_trainers: list[Trainer] = []

    # --- small things --------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}{self._num_names}"

    def new_worker(self) -> Worker:
        return Worker(self.name("w"))

    def a_worker(self) -> Worker:
        return self.rng.choice(self.workers)

    def a_busy_worker(self) -> Worker:
        """One that has something to report, where there is one."""
        return self.rng.choice([w for w in self.workers if w.held] or self.workers)

    def pass_ms(self, ms: int) -> None:
        self.bench.set_clock(self.bench.now_ms + ms)

    @property
    def settled(self) -> bool:
        """Whether trainer and server count the same."""
        return self.lineage is self.theirs

    # --- calls ---------------------------------------------------------------------------------
    def look(self) -> Sight:
        """Look at the run again, and learn what was dropped since."""
        return self._learn(self.bench.call(self.looks.call(self.past_id)))

    def _learn(self, sight: Sight) -> Sight:
        self.sight = sight
        for message_id, row in self.sight.drops:
            self.past_id = message_id
            gid, reason = row["g"].decode(), row["reason"].decode()
            self.stats[f"dropped {reason}"] += 1
            if gid.isdecimal() and int(gid) in self.sight.terminal and reason != "seen":
                self.theirs.dropped.add(int(gid))
        return self.sight

    def call(self, call: ScriptCall[T]) -> T:
        """Run a script, judge it, and sometimes run it again as after a lost reply."""
        answer = self._call_once(call)
        if self.chance(REPEATED):
            self.stats["repeated"] += 1
            self.repeat(call)
        return answer

    def repeat(self, call: ScriptCall[Any]) -> None:
        """Run a call again that was answered just now: it must write nothing."""
        before = self.sight
        self._call_once(call)
        if call.script != "sweep":
            wrote = difference(before.content(), self.sight.content())
            if call.script == "enqueue" and before.dangling:
                wrote.pop("m", None)
            assert not wrote, f"invariant 10: a repeated {call.script} wrote {wrote}"

    def _call_once(self, call: ScriptCall[T]) -> T:
        scene = Scene(self.sight, self.bench.now_ms, self.memory_full)
        both: list[ScriptCall[Any]] = [call, self.looks.call(self.past_id)]
        answer, after = self.bench.queue.call_many(both)
        self.judge(call, answer, scene, self._learn(after))
        return cast(T, answer)

    def judge(self, call: ScriptCall[Any], answer: Any, scene: Scene, after: Sight) -> None:
        """Compare a call with what the model says of it."""
        check_answer(call, answer, scene)
        if call.script == "sweep" and scene.before.exists:
            sweep_bounds(answer, scene, int(call.args[0]))
        check_effects(call, answer, scene, after)
        if call.script == "complete":
            for j, landed in enumerate(answer):
                gid, member, token = map(str, call.args[6 * j : 6 * j + 3])
                if landed.outcome == "ok":
                    lease_id = f"{gid}:{member}:{token}"
                    assert lease_id not in self.accepted, f"invariant 9: {lease_id} landed twice"
                    self.accepted.add(lease_id)

    # --- what holds after every step -----------------------------------------------------------
    def check(self, before: Sight) -> None:
        """Check every invariant; `before` is the look when the step began."""
        now = self.sight
        state = calls.state()
        both: list[ScriptCall[Any]] = [calls.audit(deep=True), state]
        audit, frontier = self.bench.queue.call_many(both)
        check_answer(state, frontier, Scene(now, self.bench.now_ms))
        ended = self.vanished - now.dangling
        self.stats["dangling ended"] += len(ended)
        self.vanished -= ended
        known = Known(self.theirs, self.minted, self.may_go_back, self.vanished)
        check_all(before, now, known, audit)
        if now.exists and int(now.m["epoch"]) != self.epoch:
            self.epoch, self.scan = int(now.m["epoch"]), 0
        self.may_go_back = False


def load_all(client: redis.Redis, scripts: Mapping[str, Script]) -> None:
    """Let the server know every script: one that is loaded later runs behind its look."""
    with client.pipeline(transaction=False) as pipeline:
        for script in scripts.values():
            pipeline.script_load(script.source)
        pipeline.execute()


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs, for a message that people can read."""
    found = {}
    for name in before:
        old, new = before[name], after[name]
        if old != new:
            both = isinstance(old, dict) and isinstance(new, dict)
            found[name] = difference(old, {**dict.fromkeys(old), **new}) if both else (old, new)
    return found
