"""The workers' acts: lease, beat, complete, fail, park; freezes, deaths and late calls."""

from __future__ import annotations

from rollstream.errors import MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease, LeaseAnswer
from rollstream.queue.calls import Completion
from tests.integration.queue.acts.producer import ProducerActs
from tests.integration.queue.model import MAX_BODY, Worker

MAX_FROZEN, MAX_STEPS = 3, 40
REPORTS = [Report.RETRY, Report.RETRY, Report.BACK, Report.BACK, Report.FINAL]


class WorkerActs(ProducerActs):
    """Three workers; what they call late is judged as everything else."""

    def lease(self) -> None:
        worker = self.a_worker()
        if self.chance(0.5):
            self.hear("bell")
        answer = self.lease_for(worker, self.rng.randint(1, 12))
        if self.chance(0.1):
            self.stats["lease reply lost"] += 1
        else:
            self.take(worker, answer)

    def hear(self, name: str) -> None:
        """Somebody who waited takes the token of `bell` or `room`."""
        self.client.lpop(f"{self.key}{name}")
        self.look()

    def lease_for(self, worker: Worker, limit: int) -> LeaseAnswer:
        worker.call_no += 1
        return self.call(calls.lease(worker.name, worker.call_no, limit))

    def take(self, worker: Worker, answer: LeaseAnswer) -> None:
        for group in answer.groups:
            assert group.prompt == b"prompt %s" % group.group_index.encode()
            for member in group.members:
                lease = member.lease
                assert self.minted.setdefault(lease.token, lease.id) == lease.id, "invariant 9"
                worker.held[lease.id] = lease
                self.past_leases.append(lease)
                self.stats["leased"] += 1
                self.stats["suspects leased"] += member.crashes >= 2
                self.stats["suspects alone"] += member.crashes >= 3
                self.stats["parked leased"] += member.parked_bytes > 0

    def lease_again(self) -> None:
        """Ask for an answered call once more, long after: only what is still leased."""
        worker = self.a_worker()
        record = self.sight.wl.get(worker.name)
        if record is not None and int(record.split()[0]) == worker.call_no:
            answer = self.call(calls.lease(worker.name, worker.call_no, 5))
            self.stats["leased again"] += sum(len(group.members) for group in answer.groups)

    def lease_old(self) -> None:
        """A call that was answered and followed by another comes late."""
        later = [w for w in self.workers if int(self.sight.wl.get(w.name, "0").split()[0]) > 1]
        if later:
            worker = self.rng.choice(later)
            number = int(self.sight.wl[worker.name].split()[0]) - 1
            assert self.call(calls.lease(worker.name, number, 5)).state == "old"
            self.stats["old call"] += 1

    def beat(self) -> None:
        self.beat_for(self.a_busy_worker())

    def beat_for(self, worker: Worker) -> None:
        answer = self.call(calls.beat(worker.name, list(worker.held)))
        for lost in answer.lost:
            del worker.held[lost]
            self.stats["beat lost"] += 1

    def complete(self) -> None:
        worker = self.a_busy_worker()
        leases = list(worker.held.values())[: self.rng.randint(1, 5)]
        for lease in leases:
            del worker.held[lease.id]
        if leases and self.chance(0.1):
            leases.append(leases[0])
        self.report(leases)

    def report(self, leases: list[Lease]) -> list[str]:
        """Complete; a repeat with other bodies changes nothing either."""
        if not leases:
            return []
        results = [self._result(lease) for lease in leases]
        outcomes = [answer.outcome for answer in self.call(calls.complete(results))]
        for outcome in outcomes:
            self.stats[f"complete {outcome}"] += 1
        if self.chance(0.3):
            self.repeat(calls.complete([Completion(x, b"other", b"other") for x in leases]))
        return outcomes

    def _result(self, lease: Lease) -> Completion:
        header, text = b"header %d" % lease.member, b"text" if self.chance(0.5) else b""
        size = self.rng.randint(1, 20)
        if self.chance(0.1):  # exactly what is allowed, or one byte more
            limit = int(self.sight.m.get("max_body", MAX_BODY))
            size = max(1, limit - len(header) - len(text)) + self.chance(0.4)
        return Completion(lease, header, b"b" * size, text)

    def zombie(self) -> None:
        """Somebody who had a lease calls late; the oracle knows whether it lives."""
        if not self.past_leases:
            return
        lease = self.rng.choice(self.past_leases[-30:])
        kind = self.rng.choice(["complete", "fail", "park", "beat"])
        gone = lease.group_index in self.sight.dangling and kind != "beat"
        lives = lease.id in self.sight.z["l"] and not gone
        if kind == "complete":
            worked = self.report([lease])[0] in ("ok", "too_large")
        elif kind == "beat":
            worked = self.call(calls.beat(self.a_worker().name, [lease.id])).lost == []
        elif kind == "park":
            worked = self.call(calls.park(lease, b"late")) != "fenced"
        else:
            worked = self._fail(lease, self.rng.choice(REPORTS)) != "fenced"
        assert worked == lives, "invariant 9: a late call succeeds exactly when its lease lives"
        self.stats["zombie lives" if lives else "zombie fenced"] += 1
        if kind != "beat":
            for worker in (*self.workers, *self.frozen):
                worker.held.pop(lease.id, None)

    def fail(self) -> None:
        """Of what a worker holds, what failed before often fails again."""
        worker = self.a_busy_worker()
        if worker.held:
            tried = max(worker.held, key=lambda x: self._attempts(worker.held[x]))
            first = next(iter(worker.held))
            lease = worker.held.pop(tried if self.chance(0.6) else first)
            self._fail(lease, self.rng.choice(REPORTS))

    def _attempts(self, lease: Lease) -> int:
        group = self.sight.groups.get(lease.group_index)
        known = group is not None and lease.member < group.n
        return group.members[lease.member].attempts if group and known else 0

    def _fail(self, lease: Lease, report: Report) -> str:
        delay_s = self.rng.choice([0, 0.05, 0.3])
        reason = self.rng.choice([MemberReason.ENGINE_ERROR, MemberReason.TOOL_ERROR])
        forget = self.chance(0.3)
        call = calls.fail(lease, report, reason, "it broke", delay_s=delay_s, forget=forget)
        answer = self.call(call)
        self.stats[f"fail {report} {answer}"] += 1
        return answer

    def park(self) -> None:
        worker = self.a_busy_worker()
        if worker.held:
            lease = worker.held.pop(next(iter(worker.held)))
            limit = int(self.sight.m["max_body"])
            body = b"p" * (limit + self.chance(0.6) if self.chance(0.2) else self.rng.randint(1, 9))
            delay_s = self.rng.choice([0, 0, 0.3])
            answer = self.call(calls.park(lease, body, delay_s=delay_s))
            self.stats[f"park {answer}"] += 1
            if answer == "parked":
                assert self.bench.queue.parked(lease) == body

    def confirm(self) -> None:
        """A worker confirms what it heard last, or something older; also one that left."""
        worker = self.a_worker()
        heard = int(self.sight.m["control_seq"])
        seq = self.rng.choice([heard, max(0, heard - 1), 0])
        in_flight = self.rng.choice([0, len(worker.held)])
        self.call(calls.confirm(worker.name, seq, in_flight, self.rng.choice([b"", b'[{"x": 1}]'])))
        (said,) = (c for c in self.bench.queue.confirmations() if c.worker == worker.name)
        assert (said.control_seq, said.in_flight) == (seq, in_flight)
        self.stats["confirmed"] += 1

    def worker_dies(self) -> None:
        self.workers[self.rng.randrange(len(self.workers))] = self.new_worker()

    def worker_freezes(self) -> None:
        """SIGSTOP: it will go on some time, and knows nothing of what happened."""
        if len(self.frozen) < MAX_FROZEN:
            which = self.rng.randrange(len(self.workers))
            self.frozen.append(self.workers[which])
            self.workers[which] = self.new_worker()
            self.stats["frozen"] += 1

    def worker_thaws(self) -> None:
        """It goes on: the first it does is one of what it was about to do."""
        if not self.frozen:
            return
        worker = self.frozen.pop(self.rng.randrange(len(self.frozen)))
        lost = [i for i in worker.held if i not in self.sight.z["l"]]
        self.stats["thawed with lost leases"] += bool(lost)
        self.workers[self.rng.randrange(len(self.workers))] = worker
        act = self.rng.choice(["beat", "complete", "lease", "fail", "park"])
        if act == "beat":
            self.beat_for(worker)
        elif act == "lease":
            self.take(worker, self.lease_for(worker, 4))
        elif worker.held:
            lease = worker.held.pop(next(iter(worker.held)))
            if act == "complete":
                answer = self.report([lease])[0]
            elif act == "park":
                answer = self.call(calls.park(lease, b"so far"))
            else:
                answer = self._fail(lease, Report.BACK)
            self.stats["thawed fenced"] += answer == "fenced"

    def everybody_dies(self) -> None:
        """Let all workers die together, as members that take their workers with them would."""
        if self.sight.m["state"] == "paused":
            self.call(calls.resume())
        while self.chance(0.7) and self.scan < self.num_ids and self.enqueue_one(4):
            pass
        for _ in range(self.rng.choice([1, 2, 2, 3, 3, 4])):
            for worker in self.workers:
                for _ in range(self.rng.randint(1, 3)):
                    self.take(worker, self.lease_for(worker, self.rng.choice([2, 12])))
            self.workers = [self.new_worker() for _ in self.workers]
            for _ in range(5):
                self.pass_ms(250)
                self.sweep_all()
        if self.chance(0.5):
            self.worker_grabs()

    def worker_grabs(self) -> None:
        """One worker asks again and again: only the rules of poison and of shares stop it."""
        worker = self.a_worker()
        for _ in range(3):
            self.take(worker, self.lease_for(worker, self.rng.choice([4, 12, 300])))

    def deadline_passes(self) -> None:
        """A deadline passes while nobody sweeps, and somebody gives back and leases right then."""
        if not self.sight.z["dl"] or self.sight.m["state"] != "running":
            return
        gid, deadline = min(self.sight.z["dl"].items(), key=lambda item: item[1])
        for _ in range(MAX_STEPS):
            left = deadline - self.sight.clock(self.bench.now_ms)[1]
            if left < 250 or gid not in self.sight.z["dl"]:
                break
            self.pass_ms(min(200, left - 100))
            for worker in self.workers:
                self.beat_for(worker)
            self.sweep_all()
        self.pass_ms(250)
        for worker in self.workers:
            for lease in [x for x in worker.held.values() if x.group_index == gid]:
                del worker.held[lease.id]
                self._fail(lease, Report.BACK)
        self.take(self.workers[0], self.lease_for(self.workers[0], 300))
        self.stats["leased at a deadline"] += 1

    def sweep_all(self, page: int = 64) -> None:
        """Sweep until nothing is left."""
        for _ in range(1000):
            answer = self.call(calls.sweep(page))
            for name in ("expired", "promoted", "deadlines", "evicted", "aborted"):
                self.stats[name] += getattr(answer, name)
            if not answer.more:
                return
        raise AssertionError("sweep never ends")
