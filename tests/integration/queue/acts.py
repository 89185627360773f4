"""Everything that can happen to a run, one method an act.

Owns the acts of producer, workers, aggregator and trainer, with their deaths, frozen clocks, lost
replies and a server that forgets. Invariant: what happens is a function of the seed.
"""

from __future__ import annotations

from collections.abc import Mapping

import redis

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import Completion, Lease, LeaseAnswer
from rollstream.queue.reads import StreamEntry
from rollstream.queue.scripts import Script
from tests.integration.queue.model import (
    LEASE_MS,
    Checkpoint,
    Snapshot,
    WalkState,
    Worker,
)
from tests.queue_bench import pack_ids

DRAIN_ROUNDS = 400
RUN_KEYS = {"m", "c", "w", "wl", "ws", "wp", "wa", "cur", "full", "ready", "ctl", "past", "bell",
            "room"}  # fmt: skip


class Walk(WalkState):
    """One walk: `run(steps)` acts, checks, and drains in the end."""

    def __init__(
        self, client: redis.Redis, seed: int, scripts: Mapping[str, Script] | None = None
    ) -> None:
        super().__init__(client, seed, scripts)
        self.connect_trainer()
        self.checkpoints.append(self.take_checkpoint())

    def run(self, steps: int, actions: Mapping[str, float]) -> None:
        names, weights = list(actions), list(actions.values())
        self.check()
        for _ in range(steps):
            name = self.rng.choices(names, weights)[0]
            self.log.append(name)
            getattr(self, name)()
            self.check()
        self.log.append("end")
        if self.chance(0.15):
            self.abort()
        else:
            self.drain()
        self.clean()

    # --- producer ------------------------------------------------------------------------------
    def enqueue(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.scan >= self.num_ids or not self.enqueue_one(self.rng.randint(1, 4)):
                return

    def enqueue_one(self, n: int) -> bool:
        gid, frontier, before = self.scan, self.read_state()[0], self.terminal_ids()
        call = calls.enqueue(
            gid, n, b"prompt %d" % gid, priority=gid % 2, timeout_ms=self.timeout_ms
        )
        answer = self.call(call, lambda a, b: b == ("dup" if a == "new" else a))
        self.stats[f"enqueue {answer}"] += 1
        assert answer != "new" or (gid not in before and gid < frontier + self.window)
        if answer in ("new", "dup", "done"):
            self.scan += 1
        return answer in ("new", "dup", "done")

    def producer_restarts(self) -> None:
        self.scan = 0

    def skip(self) -> None:
        if self.scan < self.num_ids and self.scan % 3 == 0:
            again = {"skipped": "done", "dropped": "done", "wait": "wait", "done": "done",
                     "held": "held"}  # fmt: skip
            gid = self.scan
            answer = self.call(calls.skip(gid), lambda a, b: b == again[a])
            self.stats[f"skip {answer}"] += 1
            if answer == "skipped":
                self.lineage.skipped.add(gid)

    def withdraw(self) -> None:
        gid = self.rng.choice([self.rng.randrange(self.num_ids), *self.held])
        state = self.bench.state(gid)
        answer = self.call(
            calls.withdraw(str(gid)), lambda a, b: b == ("gone" if a == "dropped" else a)
        )
        self.stats[f"withdraw {answer}"] += 1
        wanted = {None: "gone", "delivered": "held"}.get(state, "dropped")
        assert answer == wanted, (answer, state)

    # --- workers -------------------------------------------------------------------------------
    def lease(self) -> None:
        worker = self.a_worker()
        worker.call_no += 1
        waiting = sum(int(self.client.zcard(self.key + name)) for name in ("q", "s", "d"))
        limit = self.rng.randint(1, 12)
        call = calls.lease(worker.name, worker.call_no, limit)
        answer = self.call(call, lambda a, b: a.state != "running" or a == b)
        taken = sum(len(group.members) for group in answer.groups)
        share = -(-waiting // int(self.client.zcard(f"{self.key}w")))
        assert taken <= min(limit, max(8, share)), (taken, limit, waiting)
        assert taken == 0 or self.bench.m("state") == "running"
        if self.chance(0.1):
            self.stats["lease reply lost"] += 1
        else:
            self.take(worker, answer)

    def take(self, worker: Worker, answer: LeaseAnswer) -> None:
        for group in answer.groups:
            assert group.prompt == b"prompt %s" % group.group_index.encode()
            assert group.remaining_s is None or 0 < group.remaining_s <= 5
            for member in group.members:
                lease = member.lease
                assert self.minted.setdefault(lease.token, lease.id) == lease.id
                worker.held[lease.id] = lease
                self.past_leases.append(lease)
                self.stats["leased"] += 1
                self.stats["suspects leased"] += member.crashes >= 2
                self.stats["alone leased"] += member.crashes >= 3

    def lease_again(self) -> None:
        """Ask for an answered call once more, long after: only what is still leased."""
        worker = self.a_worker()
        record = self.client.hget(f"{self.key}wl", worker.name)
        if record is None or int(record.split()[0]) != worker.call_no:
            return
        answer = self.bench.call(calls.lease(worker.name, worker.call_no, 5))
        for group in answer.groups:
            for member in group.members:
                assert self.client.zscore(f"{self.key}l", member.lease.id) is not None
                self.stats["leased again"] += 1

    def lease_old(self) -> None:
        worker = self.a_worker()
        record = self.client.hget(f"{self.key}wl", worker.name)
        number = worker.call_no - self.rng.randint(1, 3)
        if record is not None and 0 < number < int(record.split()[0]):
            assert self.bench.call(calls.lease(worker.name, number, 5)).state == "old"
            self.stats["old call"] += 1

    def beat(self) -> None:
        worker = self.a_worker()
        live = {raw.decode() for raw in self.client.zrange(f"{self.key}l", 0, -1)}
        answer = self.call(calls.beat(worker.name, list(worker.held)), lambda a, b: a == b)
        assert answer.lost == [lease_id for lease_id in worker.held if lease_id not in live]
        for lost in answer.lost:
            del worker.held[lost]
            self.stats["beat lost"] += 1

    def complete(self) -> None:
        worker = self.a_worker()
        leases = list(worker.held.values())[: self.rng.randint(1, 5)]
        if leases:
            for lease in leases:
                del worker.held[lease.id]
            self.report(leases, twice=self.chance(0.4))

    def report(self, leases: list[Lease], *, twice: bool = False) -> list[str]:
        body = b"x" * 100 if self.chance(0.03) else b"body"
        results = [Completion(lease, b"header", body, b"text") for lease in leases]
        outcomes = [answer.outcome for answer in self.bench.call(calls.complete(results))]
        for lease, outcome in zip(leases, outcomes, strict=True):
            self.stats[f"complete {outcome}"] += 1
            if outcome == "ok":
                assert lease.id not in self.accepted, "a token was accepted twice"
                self.accepted.add(lease.id)
            assert outcome != "dup" or lease.id in self.accepted
        if twice:
            others = [Completion(lease, b"other", b"other") for lease in leases]
            again = [answer.outcome for answer in self.bench.call(calls.complete(others))]
            wanted = ["dup" if outcome in ("ok", "dup") else "fenced" for outcome in outcomes]
            assert again == wanted, (outcomes, again)
            for lease, outcome in zip(leases, outcomes, strict=True):
                if outcome == "ok":
                    stored = self.client.hget(f"{self.key}b:{lease.group_index}", lease.member)
                    assert stored == b"body"
        return outcomes

    def zombie(self) -> None:
        if not self.past_leases:
            return
        lease = self.rng.choice(self.past_leases[-30:])
        lives = self.client.zscore(f"{self.key}l", lease.id) is not None
        if self.chance(0.4):
            worked = self.report([lease])[0] in ("ok", "too_large")
        else:
            report = self.rng.choice([Report.RETRY, Report.BACK, Report.FINAL])
            worked = self.bench.fail(lease, report) != "fenced"
        assert worked == lives, "a late call succeeds exactly when its lease lives"
        self.stats["zombie lives" if lives else "zombie fenced"] += 1
        for worker in self.workers:
            worker.held.pop(lease.id, None)

    def fail(self) -> None:
        worker = self.a_worker()
        if not worker.held:
            return
        lease = worker.held.pop(next(iter(worker.held)))
        report = self.rng.choice([Report.RETRY, Report.RETRY, Report.BACK, Report.BACK,
                                  Report.FINAL])  # fmt: skip
        group, names = f"{self.key}g:{lease.group_index}", [f"a{lease.member}", f"x{lease.member}"]
        budgets = self.client.hmget(group, names)
        call = calls.fail(
            lease, report, MemberReason.ENGINE_ERROR, "e", delay_s=self.rng.choice([0, 0.05])
        )
        answer = self.call(call, lambda _, b: b == "fenced")
        self.stats[f"fail {report} {answer}"] += 1
        if answer in ("back", "fenced"):
            assert self.client.hmget(group, names) == budgets, "a give-back was charged"

    def worker_dies(self) -> None:
        self.workers[self.rng.randrange(len(self.workers))] = self.new_worker()

    def everybody_dies(self) -> None:
        """Let all workers die together, as members that take their workers with them would."""
        for _ in range(self.rng.randint(1, 3)):
            for worker in self.workers:
                worker.call_no += 1
                self.take(worker, self.bench.call(calls.lease(worker.name, worker.call_no, 12)))
            self.workers = [self.new_worker() for _ in self.workers]
            for _ in range(3):
                self.bench.set_clock(self.bench.now_ms + 499)
                self.bench.sweep()

    # --- time ----------------------------------------------------------------------------------
    def pass_time(self) -> None:
        self.bench.set_clock(self.bench.now_ms + self.rng.choice([20, 120, 340, 499]))
        self.sweep()

    def outage(self) -> None:
        jump = self.rng.choice([700, 5000, 10**7, -300, -(10**6)])
        self.bench.set_clock(self.bench.now_ms + jump)
        away = self.bench.now_ms - int(self.bench.m("clock_tick"))
        before = int(self.bench.m("clock"))
        page = self.bench.call(calls.sweep())
        assert 0 <= int(self.bench.m("clock")) - before <= LEASE_MS / 2
        if not 0 <= away <= LEASE_MS / 2:
            assert page.expired == 0
            assert page.grace
        self.stats["outage"] += 1

    def sweep(self) -> None:
        leased = self.leased_crashes()
        page = self.bench.call(calls.sweep(self.rng.choice([1, 3, 64])))
        after = self.leased_crashes()
        for lease_id, crashes in leased.items():
            gid, member, _ = lease_id.split(":")
            if lease_id not in after and self.bench.state(gid) == "open":
                final = self.client.hget(f"{self.key}g:{gid}", f"f{member}")
                charged = int(self.client.hget(f"{self.key}g:{gid}", f"x{member}") or 0)
                assert final == b"x:deadline" or charged == crashes + 1, lease_id
        if not page.more:
            self.check_nothing_due(grace=page.grace)
        for name in ("expired", "promoted", "deadlines", "evicted"):
            self.stats[name] += getattr(page, name)

    # --- aggregator ----------------------------------------------------------------------------
    def read_full(self) -> None:
        entries = self.bench.queue.read_full("a", count=self.rng.randint(1, 4), block_s=0)
        if not self.chance(0.1):
            self.in_hand += entries
        self.seen_entries += entries

    def claim_full(self) -> None:
        known = {entry.message_id for entry in self.in_hand}
        entries = self.bench.queue.claim_full("b", idle_s=0, count=10)
        self.in_hand += [entry for entry in entries if entry.message_id not in known]

    def verdict(self) -> None:
        if self.seen_entries and self.chance(0.2):
            self.judge(self.rng.choice(self.seen_entries))
        elif self.in_hand:
            self.judge(self.in_hand.pop(0))

    def judge(self, entry: StreamEntry, *, keep: bool | None = None) -> None:
        keep = self.chance(0.85) if keep is None else keep
        call = calls.verdict(
            entry.group_index, entry.message_id, drop=None if keep else DropReason.ZERO_STD
        )
        answer = self.call(call, lambda _, b: b == "noop")
        self.stats[f"verdict {answer}"] += 1

    # --- trainer -------------------------------------------------------------------------------
    def connect_trainer(self) -> None:
        self.old_consumers += [self.consumer] if self.consumer else []
        info = self.bench.queue.info()
        assert info is not None
        self.consumer, self.number = self.name("c"), info.connects + 1
        answer = self.call(calls.connect(self.consumer, self.number), lambda a, b: a == b)
        assert (answer.consumer, answer.connects) == (self.consumer, self.number)
        self.held = set()

    def read_ready(self) -> None:
        queue = self.bench.queue
        if self.chance(0.2):
            entries = queue.pending_ready(count=100)
        else:
            entries = queue.read_ready(count=self.rng.randint(1, 4), block_s=0)
        if not self.chance(0.1):
            self.hold(entries)

    def hold(self, entries: list[StreamEntry]) -> None:
        """Take groups in hand, by the trainer's rules: never again what it holds or has acked."""
        fresh: dict[int, StreamEntry] = {}
        for entry in entries:
            gid = int(entry.group_index)
            if gid in self.known_ended:
                self.bench.ack(gid, consumer=self.consumer)
                self.stats["acked again"] += 1
            elif gid not in self.held:
                fresh[gid] = entry
        if not fresh:
            return
        found = self.bench.queue.deliver_and_fetch(self.consumer, list(fresh.values()))
        assert not found.taken
        for (gid, entry), answer, group in zip(
            fresh.items(), found.answers, found.groups, strict=True
        ):
            self.stats[f"deliver {answer}"] += 1
            if answer == "ok":
                assert group is not None
                assert self.max_stale < 0 or (
                    self.version - group.version_at_lease <= self.max_stale
                )
                assert len(group.bodies) == entry.n
                ended = zip(group.bodies, group.errors, strict=True)
                assert all((body is None) == (error is not None) for body, error in ended)
                self.held.add(gid)
        self.call(
            calls.deliver(self.consumer, [str(gid) for gid in fresh]),
            lambda _, b: all(x in ("ok", "gone") for x in b),
        )

    def ack(self) -> None:
        ids = sorted(self.held)[: self.rng.randint(1, 3)]
        if ids:
            self.train(ids)

    def train(self, ids: list[int]) -> None:
        for gid in ids:
            assert gid not in self.lineage.trained, "trained twice"
            self.lineage.trained.add(gid)
            self.known_ended.add(gid)
            self.held.discard(gid)
        call = calls.ack(self.consumer, [str(gid) for gid in ids])
        for answer in self.call(call, lambda _, b: set(b) == {"done"}):
            self.stats[f"ack {answer}"] += 1
        assert set(ids) <= self.terminal_ids()

    def old_trainer_calls(self) -> None:
        gid = str(next(iter(self.held), 0))
        for consumer in self.old_consumers[-2:]:
            assert self.bench.call(calls.ack(consumer, [gid])) == ["taken"]
            assert self.bench.call(calls.deliver(consumer, [gid])) == ["taken"]
            assert self.bench.call(calls.retire(consumer, gid, DropReason.STALE)) == "taken"
            assert self.bench.call(calls.rewind(consumer, "no", 0, b"")).taken
            answer = self.bench.call(calls.connect(consumer, self.number))
            assert answer.consumer == self.consumer

    def retire(self) -> None:
        if self.held and self.chance(0.3):
            gid = self.held.pop()
            call = calls.retire(self.consumer, str(gid), DropReason.STALE)
            assert self.call(call, lambda _, b: b == "gone") in ("dropped", "gone")

    def take_checkpoint(self) -> Checkpoint:
        frontier, above, _ = self.read_state()
        return Checkpoint(self.lineage.copy(), frontier, above)

    def checkpoint(self) -> None:
        if not self.held:
            self.checkpoints.append(self.take_checkpoint())

    def rewind(self, frontier: int, above: set[int]) -> None:
        self.rewind_id = self.name("r")
        call = calls.rewind(self.consumer, self.rewind_id, frontier, pack_ids(frontier, above))
        answer = self.call(
            call, lambda a, b: (a.frontier, a.epoch) == (b.frontier, b.epoch) and b.seen == 0
        )
        self.stats["rewind seen"] += answer.seen
        self.stats["rewind beyond"] += answer.beyond
        self.may_go_back = True

    def trainer_restarts(self) -> None:
        recent = 4 if self.chance(0.7) else len(self.checkpoints)
        saved = self.rng.choice(self.checkpoints[-recent:])
        self.connect_trainer()
        self.lineage = saved.lineage.copy()
        self.known_ended = set(range(saved.frontier)) | saved.above
        self.rewind(saved.frontier, saved.above)
        assert self.terminal_ids() == self.known_ended
        self.stats["trainer restarts"] += 1

    def control(self) -> None:
        kind = self.rng.choice(["pause", "resume", "resume", "version"])
        if kind == "version":
            self.version += 1
        call = {
            "pause": calls.pause(),
            "resume": calls.resume(),
            "version": calls.set_version(self.version),
        }[kind]
        self.call(call, lambda a, b: a == b)

    # --- a server that forgets -----------------------------------------------------------------
    def snapshot(self) -> None:
        if len(self.snapshots) < 3:
            keys = {key: self.client.dump(key) for key in self.client.keys(f"{self.key}*")}
            self.snapshots.append(
                Snapshot(keys, set(self.accepted), self.lineage.copy(), self.past_id)
            )

    def server_rolls_back(self) -> None:
        """Come back with an older state; the trainer asserts itself again and rewinds."""
        if not self.snapshots:
            return
        chosen = self.rng.randrange(len(self.snapshots))
        saved = self.snapshots[chosen]
        del self.snapshots[chosen + 1 :]
        self.client.delete(*self.client.keys(f"{self.key}*"))
        for key, value in saved.keys.items():
            self.client.restore(key, 0, value)
        self.accepted, self.past_id = set(saved.accepted), saved.past_id
        answer = self.bench.call(calls.connect(self.consumer, self.number))
        assert answer.consumer == self.consumer
        self.bench.call(calls.set_version(self.version))
        mine = answer.rewind_id == self.rewind_id
        ended = self.known_ended | (self.terminal_ids() if mine else set())
        if mine:
            self.lineage.dropped |= saved.lineage.dropped
            self.lineage.skipped |= saved.lineage.skipped
        self.lineage.dropped &= ended
        self.lineage.skipped &= ended
        frontier = next(i for i in range(10**6) if i not in ended)
        self.rewind(frontier, {i for i in ended if i >= frontier})
        self.scan, self.in_hand = 0, []
        self.stats["rollbacks"] += 1

    # --- the end -------------------------------------------------------------------------------
    def drain(self) -> None:
        """Let one healthy process of each kind finish the run."""
        self.bench.call(calls.resume())
        worker = self.new_worker()
        for _ in range(DRAIN_ROUNDS):
            if self.frontier >= self.num_ids:
                break
            self.bench.set_clock(self.bench.now_ms + 150)
            self.bench.sweep()
            self.check()
            while self.scan < self.num_ids and self.enqueue_one(2):
                pass
            worker.call_no += 1
            self.take(worker, self.bench.call(calls.lease(worker.name, worker.call_no, 50)))
            self.bench.call(calls.beat(worker.name, list(worker.held)))
            if worker.held:
                self.report(list(worker.held.values()))
                worker.held.clear()
            self.read_full()
            self.claim_full()
            while self.in_hand:
                self.judge(self.in_hand.pop(0), keep=True)
            self.hold(self.bench.queue.read_ready(count=50, block_s=0))
            self.hold(self.bench.queue.pending_ready(count=50))
            if self.held:
                self.train(sorted(self.held))
            self.check()
        assert self.frontier >= self.num_ids, ("does not drain", self.frontier, self.scan)
        assert self.bench.key_names() <= RUN_KEYS
        self.stats["drained"] += 1

    def abort(self) -> None:
        self.bench.call(calls.abort_run("enough"))
        self.bench.sweep()
        info = self.bench.queue.info()
        assert info is not None
        assert info.state == "ended"
        self.bench.audit()
        assert self.bench.key_names() <= RUN_KEYS
        self.stats["aborted"] += 1

    def clean(self) -> None:
        self.client.delete(f"now:{self.key}", *self.client.keys(f"{self.key}*"))
