"""Memory stays flat, on the server and in every process, however many groups have ended."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis

from examples.devserver import DevServer
from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.calls import Completion
from tests.queue_bench import Bench

N = 8
GROUPS = 256
SAMPLES_A_GENERATION = N * GROUPS
LEASE_MS = 10_000
BODY, TOO_LARGE = b"b" * 400, b"b" * 5000
KEYS = {
    "m", "c", "w", "wl", "wh", "ws", "wp", "wa", "lb", "cur", "full", "ready", "eval", "ctl",
    "past", "bell", "room",
}  # fmt: skip
"""All that a run without live groups may have."""


@dataclass
class Life:
    """Groups that live through everything that can happen to them, 256 at a time."""

    bench: Bench
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    generation: int = 0
    num_samples: int = 0

    def live(self) -> None:
        """Bring one generation of groups to their ends; one member in ten fails somehow."""
        bench = self.bench
        first = self.generation * GROUPS
        worker = f"{self.generation:012x}"  # a process of its own: none is remembered for ever
        self.generation += 1
        ids = list(range(first, first + GROUPS))
        late = {str(g) for g in ids[:4]}
        answers = bench.queue.call_many(
            [
                calls.enqueue(g, N, b"p" * 200, timeout_ms=8_000 if str(g) in late else 0)
                for g in ids
            ]
        )
        assert set(answers) == {"new"}
        bench.call(calls.present("producer", f"p{self.generation}"))
        bench.call(calls.present("aggregator", f"a{self.generation}"))
        bench.call(calls.pause("keep", 60))
        bench.call(calls.confirm(worker, self.generation, 3, b"[]"))
        bench.call(calls.resume())
        bench.call(calls.set_version(self.generation, f"step-{self.generation}"))
        for place in range(8):  # whose trainer died: nobody acks them
            bench.enqueue(f"e:{self.generation}:{place}", n=2, timeout_ms=8_000)
        bench.queue.call_many([calls.withdraw(str(ids[-1])), calls.requeue(str(ids[-2]), 0)])
        crashed = self.some(worker, late)
        # What was not completed expires: crashes, and groups whose deadline passes meanwhile.
        assert crashed
        rest = itertools.count()
        while any(bench.queue.depths()[name] for name in ("live", "evaluations")):
            bench.advance(LEASE_MS + 1)
            self.some(f"{self.generation:06x}{next(rest):06x}", set())
            self.judge()
        self.num_samples += SAMPLES_A_GENERATION

    def some(self, worker: str, late: set[str]) -> int:
        """Lease what waits and end nine in ten; how many were left to expire."""
        bench, rng, left = self.bench, self.rng, 0
        numbers = itertools.count(1)
        while leases := self.lease(worker, next(numbers)):
            done: list[Completion] = []
            fails: list[calls.ScriptCall[str]] = []
            for lease in leases:
                luck = rng.random()
                if lease.group_index in late or luck < 0.01:
                    left += 1
                elif luck < 0.1:
                    fails += self.unlucky(lease, done)
                else:
                    done.append(Completion(lease, b"h" * 100, BODY, b"text"))
            bench.queue.call_many(fails)
            for start in range(0, len(done), 128):
                bench.call(calls.complete(done[start : start + 128]))
        return left

    def lease(self, worker: str, call_no: int) -> list[Lease]:
        """Lease what waits."""
        answer = self.bench.call(calls.lease(worker, call_no, 256))
        return [member.lease for group in answer.groups for member in group.members]

    def unlucky(self, lease: Lease, done: list[Completion]) -> Iterator[calls.ScriptCall[str]]:
        """One of the ways in which a member does not simply end."""
        kind = self.rng.randrange(5)
        error = "it broke " * 20
        if kind == 0:
            done.append(Completion(lease, b"h", TOO_LARGE))
        elif kind == 1:
            yield calls.park(lease, b"parked" * 100)
        else:
            report = (Report.RETRY, Report.FINAL, Report.BACK)[kind - 2]
            delay_s = self.rng.choice((0.0, 5.0))
            yield calls.fail(lease, report, MemberReason.ENGINE_ERROR, error, delay_s=delay_s)

    def judge(self) -> None:
        """Judge, deliver and end what is full."""
        bench = self.bench
        full = bench.queue.read_full("a", count=1000, block_s=0)
        stored = bench.queue.headers(full)
        verdicts = []
        for j, (entry, group) in enumerate(zip(full, stored, strict=True)):
            reason = DropReason.SHORT_GROUP if group.why else None
            if j % 10 == 0:
                reason = DropReason.ZERO_STD
            verdicts.append(calls.verdict(entry.group_index, entry.message_id, drop=reason))
        bench.queue.call_many(verdicts)
        kept = [entry.group_index for entry in bench.queue.read_ready(count=1000, block_s=0)]
        bench.call(calls.deliver("trainer", kept))
        stale, acked = kept[::50], [gid for j, gid in enumerate(kept) if j % 50]
        bench.queue.call_many([calls.retire("trainer", gid, DropReason.STALE) for gid in stale])
        for start in range(0, len(acked), 64):
            bench.call(calls.ack("trainer", acked[start : start + 64]))

    def settled(self) -> int:
        """Let every process be forgotten; the server's memory then, without the last drops.

        Those are trimmed by whole nodes of a stream, so they swing by a tenth of their number. The
        server's own log of slow commands is emptied: how many there are is the machine's doing.
        """
        self.bench.advance(5 * LEASE_MS)
        client = self.bench.client
        client.slowlog_reset()
        return int(client.info("memory")["used_memory"]) - self.past_bytes()

    def past_bytes(self) -> int:
        """Return what the record of the last drops takes."""
        return int(self.bench.client.memory_usage(f"{self.bench.key}past", samples=0) or 0)


@pytest.fixture
def life() -> Iterator[Life]:
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        bench = Bench(client, cap=GROUPS, lease_ms=LEASE_MS, max_body=4000)
        bench.connect()
        yield Life(bench)


def check_bounded(life: Life) -> None:
    """Nothing is left of any group, and whatever is remembered of them has its bound."""
    bench, client = life.bench, life.bench.client
    assert bench.key_names() <= KEYS
    key = bench.key
    assert client.xlen(f"{key}past") <= 1100
    assert client.xlen(f"{key}ctl") <= 64 + 100
    for name in ("full", "ready"):
        assert client.xlen(key + name) == 0
        (group,) = client.xinfo_groups(key + name)
        assert group["pending"] == 0
        assert len(client.xinfo_consumers(key + name, group["name"])) == 1
    for name in ("w", "wp", "wa"):
        assert client.zcard(key + name) == 0, name
    assert client.xlen(f"{key}eval") == 0
    assert client.hlen(f"{key}lb") <= 64
    for name in ("wl", "ws", "wh", "wc"):
        assert client.hlen(key + name) == 0, name
    assert client.strlen(f"{key}cur") <= 65_536 // 8 + 1
    assert client.hlen(f"{key}c") <= 60
    assert client.hlen(f"{key}m") <= 60
    assert client.llen(f"{key}bell") + client.llen(f"{key}room") <= 2
    bench.audit()


def test_nothing_of_ended_groups_is_left_after_every_kind_of_end(life: Life) -> None:
    for _ in range(4):
        life.live()
    life.settled()
    check_bounded(life)
    counters = life.bench.counters()
    for name in ("acked", "dropped:short_group", "dropped:zero_std", "dropped:stale",
                 "dropped:withdrawn", "requeued", "crashes", "given_back",
                 "member_failed:too_large", "member_failed:engine_error",
                 "member_failed:deadline", "e.dropped:deadline"):  # fmt: skip
        assert counters.get(name, 0) > 0, (name, counters)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_memory_is_flat_over_200_000_samples_with_failures_of_every_kind(life: Life) -> None:
    """rq/rq#1143, #519: failed hashes and finished sets grew for ever."""
    used = {}
    for target in (40_000, 120_000, 200_000):
        while life.num_samples < target:
            life.live()
        life.settled()
        check_bounded(life)  # before the first figure too: what it makes the server keep is once
        used[target] = life.settled()
        assert life.bench.client.xlen(f"{life.bench.key}past") >= 1000  # full from the first on
        assert life.past_bytes() < 8_000_000
    # The bitmap of terminal ids is 8 KB at most; the rest is the allocator's.
    assert abs(used[200_000] - used[40_000]) < 64_000, used
