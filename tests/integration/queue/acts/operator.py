"""The operator's acts: withdraw, requeue, pause, budgets, abort; and hashes that vanish."""

from __future__ import annotations

from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.calls import ScriptCall
from tests.integration.queue.acts.server import ServerActs

BUDGETS: dict[str, list[int | str]] = {
    "cap": [1, 3, 5, 8], "max_stale": [-1, 0, 1, 2], "max_attempts": [1, 2, 4],
    "max_crashes": [1, 3, 4, 6], "max_requeues": [0, 1, 3], "max_body": [30, 64],
    "W": [8, 16], "lease_ms": [600, 1000], "on_stale": ["drop", "requeue", "deliver"],
}  # fmt: skip


class OperatorActs(ServerActs):
    """What people do to a run, and what they should not do."""

    def _some_group(self) -> str:
        held = [str(gid) for gid in self.trainer.held]
        return self.rng.choice([str(self.rng.randrange(self.num_ids)), *sorted(self.sight.live),
                                *held])  # fmt: skip

    def withdraw(self) -> None:
        self.stats[f"withdraw {self.call(calls.withdraw(self._some_group()))}"] += 1

    def requeue(self) -> None:
        """Under the life it has, or by somebody who saw an older one."""
        full = sorted(gid for gid, g in self.sight.groups.items() if g.state == "full")
        begun = sorted(gid for gid, g in self.sight.groups.items() if g.life != "0")
        choice = self.rng.choice([full, begun, sorted(map(str, self.trainer.held)), []])
        gid = self.rng.choice(choice) if choice else self._some_group()
        group = self.sight.groups.get(gid)
        life = 0 if group is None or self.chance(0.2) else int(group.life)
        state = group.state if group else "gone"
        answer = self.call(calls.requeue(gid, life, "again"))
        self.stats[f"requeue {answer}"] += 1
        if answer == "requeued":
            self.stats[f"requeued {state}"] += 1

    def control(self) -> None:
        kind = self.rng.choice(["pause", "resume", "resume", "unknown", "label", "engines"])
        if kind == "unknown":
            assert self.call(calls.set_budget("frontier", 7)).state == "unknown"
            assert self.call(calls.set_budget("on_stale", "sell")).state == "unknown"
        elif kind == "label":
            for _ in range(self.rng.choice([1, 1, 1, 70])):
                self.num_labels += 1
                label = f"v{self.num_labels - self.rng.choice([0, 0, 1])}"
                version = int(self.sight.m["version"]) + self.rng.randint(0, 2)
                self.call(calls.set_label(version, label))
        elif kind == "engines":
            urls = self.rng.choice([None, [], ["http://a:1"], ["http://a:1", "http://b:1"]])
            self.call(calls.set_engines(urls))
            info = self.bench.queue.info()
            assert info is not None
            assert info.engines == (None if urls is None else tuple(urls))
        elif kind == "pause":
            mode, deadline_s = self.rng.choice(["keep", "abort"]), self.rng.choice([0, 0.4, 3])
            self.call(self._by_somebody(calls.pause(mode, deadline_s, self.rng.choice(["", "t"]))))
        else:
            self.call(self._by_somebody(calls.resume(self.rng.choice(["", "", "t"]))))

    def _by_somebody(self, change: ScriptCall[ControlAnswer]) -> ScriptCall[ControlAnswer]:
        """In nobody's name, the trainer's, or that of one that is none any more."""
        name = self.rng.choice([None, None, self.sight.m["consumer"], "replaced"])
        return change if name is None else calls.by(name, change)

    def pause_expires(self) -> None:
        """Whoever paused the run died: it goes on by itself, in time and not before."""
        self.sweep_all()
        if self.call(calls.pause("abort", 0.9)).state != "paused":
            return
        for _ in range(4):
            assert self.sight.m["state"] == "paused"
            self.pass_ms(225)
            self.sweep_all()
        assert self.sight.m["state"] == "running", "a pause outlives its deadline"
        self.stats["pauses expired"] += 1

    def set_budget(self) -> None:
        name = self.rng.choice(list(BUDGETS))
        self.call(calls.set_budget(name, self.rng.choice(BUDGETS[name])))
        self.stats["budget set"] += 1

    def group_vanishes(self) -> None:
        """Somebody evicts or deletes the record of a live group."""
        if not self.sight.groups:
            return
        state = self.rng.choice(sorted({g.state for g in self.sight.groups.values()}))
        gid = self.rng.choice(sorted(x for x, g in self.sight.groups.items() if g.state == state))
        keys = [f"{self.key}g:{gid}"]
        if self.chance(0.3):
            keys.append(f"{self.key}b:{gid}")
        self.client.delete(*keys)
        self.vanished.add(gid)
        self.look()
        if gid.isdecimal() and self.chance(0.4):
            # A second producer comes by before anybody noticed; this one's scan stays where it is.
            place, self.scan = self.scan, int(gid)
            self.enqueue_one(2)
            self.scan = place
        self.stats[f"dangling {state}"] += 1

    def drop_too_many(self) -> bool:
        """Let a verdict's drop fail the run; False where no group is full."""
        full = [gid for gid, group in self.sight.groups.items() if group.state == "full"]
        if not full or self.sight.m["state"] not in ("running", "paused"):
            return False
        row = sum(int(part.split("=")[1]) for part in self.sight.m.get("streak", "").split())
        self.call(calls.set_budget("max_drops", row + 1))
        group = self.sight.groups[min(full)]
        call = calls.verdict(group.gid, group.text("full_id"), drop=DropReason.RANGE)
        assert self.call(call) == "dropped"
        assert self.sight.m["state"] == "failed"
        self.stats["too many drops"] += 1
        return True

    def abort(self) -> None:
        """End the run in mid-flight, by way of `failed` or not."""
        self.memory_comes_back()
        if self.chance(0.3):
            if not (self.chance(0.5) and self.drop_too_many()):
                assert self.call(calls.fail_run("engines")) == "failed"
            live = {gid for gid in self.sight.groups if gid.isdecimal()}
            self.sweep_all()
            assert self.call(calls.enqueue(self.sight.frontier, 1, b"p")) == "failed"
            assert not self.lease_for(self.a_worker(), 5).groups
            assert live <= set(self.sight.groups), "a failed run keeps its groups"
        assert self.call(calls.abort_run("enough")) == "aborting"
        assert self.call(calls.enqueue(self.sight.frontier, 1, b"p")) == "aborting"
        assert not self.lease_for(self.a_worker(), 5).groups
        for _ in range(10):
            self.sweep_all()
        assert self.sight.m["state"] == "ended"
        self.stats["runs aborted"] += 1
