"""The workers' acts: lease, beat, complete, fail, park; freezes, deaths and late calls."""

from __future__ import annotations

from rollstream.errors import MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import Completion, Lease, LeaseAnswer
from tests.integration.queue.model import MAX_BODY, WalkState, Worker

MAX_FROZEN = 3
REPORTS = [Report.RETRY, Report.RETRY, Report.BACK, Report.BACK, Report.FINAL]


class WorkerActs(WalkState):
    """Three workers; what they call late is judged as everything else."""

    def lease(self) -> None:
        worker = self.a_worker()
        answer = self.lease_for(worker, self.rng.randint(1, 12))
        if self.chance(0.1):
            self.stats["lease reply lost"] += 1
        else:
            self.take(worker, answer)

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
        worker = self.a_worker()
        number = worker.call_no - self.rng.randint(1, 3)
        if number > 0 and number < int(self.sight.wl.get(worker.name, "0").split()[0]):
            assert self.call(calls.lease(worker.name, number, 5)).state == "old"
            self.stats["old call"] += 1

    def beat(self) -> None:
        self.beat_for(self.a_worker())

    def beat_for(self, worker: Worker) -> None:
        answer = self.call(calls.beat(worker.name, list(worker.held)))
        for lost in answer.lost:
            del worker.held[lost]
            self.stats["beat lost"] += 1

    def complete(self) -> None:
        worker = self.a_worker()
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
        size = MAX_BODY + 40 if self.chance(0.03) else self.rng.randint(1, 20)
        text = b"text" if self.chance(0.5) else b""
        return Completion(lease, b"header %d" % lease.member, b"b" * size, text)

    def zombie(self) -> None:
        """Somebody who had a lease calls late; the oracle knows whether it lives."""
        if not self.past_leases:
            return
        lease = self.rng.choice(self.past_leases[-30:])
        lives = lease.id in self.sight.z["l"]
        kind = self.rng.choice(["complete", "fail", "park", "beat"])
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
        worker = self.a_worker()
        if worker.held:
            self._fail(worker.held.pop(next(iter(worker.held))), self.rng.choice(REPORTS))

    def _fail(self, lease: Lease, report: Report) -> str:
        delay_s = self.rng.choice([0, 0.05, 0.3])
        call = calls.fail(lease, report, MemberReason.ENGINE_ERROR, "it broke", delay_s=delay_s)
        answer = self.call(call)
        self.stats[f"fail {report} {answer}"] += 1
        return answer

    def park(self) -> None:
        worker = self.a_worker()
        if worker.held:
            lease = worker.held.pop(next(iter(worker.held)))
            body = b"p" * (MAX_BODY + 1 if self.chance(0.05) else self.rng.randint(1, MAX_BODY))
            self.stats[f"park {self.call(calls.park(lease, body))}"] += 1

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
        for _ in range(self.rng.randint(1, 3)):
            for worker in self.workers:
                self.take(worker, self.lease_for(worker, 12))
            self.workers = [self.new_worker() for _ in self.workers]
            for _ in range(3):
                self.pass_ms(499)
                self.sweep_all()

    def sweep_all(self, page: int = 64) -> None:
        """Sweep until nothing is left."""
        for _ in range(1000):
            answer = self.call(calls.sweep(page))
            for name in ("expired", "promoted", "deadlines", "evicted", "aborted"):
                self.stats[name] += getattr(answer, name)
            if not answer.more:
                return
        raise AssertionError("sweep never ends")
