"""What happens to time and to the server: outages, jumps, full memory, rollbacks, emptiness."""

from __future__ import annotations

import contextlib

import pytest

from rollstream.queue import calls
from rollstream.queue.keys import SCHEMA
from rollstream.trainer.lineage import RunMissing
from tests.integration.queue.acts.workers import WorkerActs
from tests.integration.queue.invariants import Lineage
from tests.integration.queue.model import LEASE_MS, Snapshot

MAX_SNAPSHOTS = 3
PAUSE_ROUNDS = 21
"""Quarters of a lease: longer than the longest timeout of a group."""


class ServerActs(WorkerActs):
    """Time passes, jumps or stands still; the server forgets something or everything."""

    def pass_time(self) -> None:
        self.pass_ms(self.rng.choice([20, 120, 340, 499]))
        self.sweep()

    def time_goes_by(self) -> None:
        """Nobody sweeps yet: every script reads a clock that runs on by itself."""
        self.pass_ms(self.rng.choice([50, 200]))

    def sweep(self) -> None:
        answer = self.call(calls.sweep(self.rng.choice([1, 3, 64])))
        for name in ("expired", "promoted", "deadlines", "evicted"):
            self.stats[name] += getattr(answer, name)

    def outage(self) -> None:
        """Nobody swept for a while, or the wall clock jumped: nothing expires for one lease."""
        self.pass_ms(self.rng.choice([700, 5000, 10**7, -300, -(10**6)]))
        leased, clock = set(self.sight.z["l"]), int(self.sight.m["clock"])
        self.sweep_all()
        assert 0 <= int(self.sight.m["clock"]) - clock <= LEASE_MS / 2, "invariant 12"
        lost = {x for x in leased - set(self.sight.z["l"]) if x.split(":")[0] in self.sight.groups}
        dead = {x for x in lost if self.sight.crashes(*x.rsplit(":", 2)[:2]) and not self._final(x)}
        assert not dead, f"invariant 12: an outage ended {dead}"
        self.stats["outage"] += 1

    def _final(self, lease_id: str) -> bool:
        gid, member, _ = lease_id.rsplit(":", 2)
        group = self.sight.groups.get(gid)
        return group is None or group.members[int(member)].final is not None

    def long_pause(self) -> None:
        """A pause of many deadlines ends nothing, while those who have leases beat on."""
        if self.sight.m["state"] != "running":
            return
        self.sweep_all()
        self.call(calls.pause())
        gone = {x for x in self.sight.z["l"] if not any(x in w.held for w in self.workers)}
        clock, finals = self.sight.clock(self.bench.now_ms)[1], self._finals()
        groups = set(self.sight.groups)
        for _ in range(PAUSE_ROUNDS):
            self.pass_ms(LEASE_MS // 4)
            for worker in self.workers:
                self.beat_for(worker)
            self.sweep_all()
        assert self.sight.clock(self.bench.now_ms)[1] == clock, "the run clock moved in a pause"
        ended = self._finals() - finals - {x.rsplit(":", 1)[0] for x in gone}
        assert not ended, f"a long pause ended {ended}"
        if int(self.sight.m["max_stale"]) < 0:
            assert groups <= set(self.sight.groups), "a long pause ended a group"
        self.call(calls.resume())
        self.stats["long pause"] += 1

    def _finals(self) -> set[str]:
        return {
            f"{group.gid}:{i}" for group in self.sight.groups.values()
            for i, member in enumerate(group.members) if member.failed
        }  # fmt: skip

    def memory_fills(self) -> None:
        """From here on the server refuses what may need memory, until it is given more."""
        self.memory_full = not self.memory_full
        self.client.config_set("maxmemory", 1 if self.memory_full else 0)
        self.stats["memory full"] += self.memory_full

    def memory_comes_back(self) -> None:
        if self.memory_full:
            self.memory_fills()

    # --- a server that forgets -----------------------------------------------------------------
    def snapshot(self) -> None:
        if len(self.snapshots) < MAX_SNAPSHOTS:
            self.snapshots.append(
                Snapshot(
                    self._dump(),
                    set(self.accepted), self.theirs.copy(), self.past_id, set(self.vanished),
                )
            )  # fmt: skip

    def _dump(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for key in self.client.keys(f"{self.key}*"):
            found[key] = self.client.dump(key)  # type: ignore[assignment,index]  # bytes
        return found

    def server_rolls_back(self) -> None:
        """Come back with an older state; producer and trainer find out by themselves."""
        if not self.snapshots:
            return
        self.memory_comes_back()
        chosen = self.rng.randrange(len(self.snapshots))
        saved = self.snapshots[chosen]
        del self.snapshots[chosen + 1 :]
        self._forget()
        for key, value in saved.keys.items():
            self.client.restore(key, 0, value)
        self.accepted, self.past_id = set(saved.accepted), saved.past_id
        self.theirs, self.vanished = saved.theirs.copy(), set(saved.vanished)
        self.look()
        self.epoch = int(self.sight.m["epoch"])
        self.stats["rollbacks"] += 1

    def server_is_emptied(self) -> None:
        """Come back with nothing: until the producer opens it anew, there is no run."""
        self.memory_comes_back()
        self._forget()
        self.accepted, self.past_id, self.theirs, self.vanished = set(), "-", Lineage(), set()
        self.look()
        worker = self.a_worker()
        self.beat_for(worker)
        assert self.lease_for(worker, 3).state == "lost"
        assert self.call(calls.enqueue(0, 1, b"p")) == "lost"
        assert self.bench.call(calls.sweep()).lost
        with contextlib.suppress(RunMissing), pytest.raises(RunMissing):
            self.trainer.check()
        assert self.call(calls.open_run(SCHEMA, "source", self.bench.budgets))[0] == "created"
        self.epoch = 1
        self.stats["emptied"] += 1

    def _forget(self) -> None:
        """Take the run away; the server has another identity when it is back."""
        self.client.delete(*self.client.keys(f"{self.key}*"))
        self.server_id = self.name("server")
        self.may_go_back, self.scan = True, 0
        for aggregator in self.aggregators:
            aggregator.in_hand = []
