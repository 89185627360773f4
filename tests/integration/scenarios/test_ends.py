"""How groups and runs end: aborted, withdrawn, begun anew, paused; and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from rollstream.errors import DropReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from tests.queue_bench import Bench

RUN_KEYS = {
    "m", "c", "cur", "w", "wp", "wa", "wl", "ws", "full", "ready", "eval", "ctl", "past", "bell",
    "room",
}  # fmt: skip
"""What a run without groups may have: its record, counters, frontier, presence, empty streams."""


@pytest.fixture
def bench(valkey_url: str, run_name: str) -> Iterator[Bench]:
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        yield Bench(client, run_name, cap=64, lease_ms=10_000)


STATES = (
    "queued", "leased", "delayed", "suspect", "half done", "parked", "full", "ready", "delivered",
)  # fmt: skip


def groups_in_every_state(bench: Bench) -> dict[str, int]:
    """One group of three members in each state, an evaluation that ended and one that waits."""
    bench.connect()
    bench.enqueue("e:math:0", n=3, timeout_ms=10**6)
    assert set(bench.complete(bench.lease())) == {"ok"}
    assert [entry.group_index for entry in bench.queue.read_eval(block_s=0)] == ["e:math:0"]
    ids = {state: gid for gid, state in enumerate(STATES)}
    for state in ("delivered", "ready"):
        bench.ready(ids[state], n=3)
    assert bench.deliver(ids["delivered"]) == ["ok"]
    bench.full(ids["full"], n=3)
    for state in ("leased", "delayed", "suspect", "half done", "parked"):
        bench.enqueue(ids[state], n=3, timeout_ms=10**6)
    by_group: dict[int, list[Lease]] = {}
    for lease in bench.lease():
        by_group.setdefault(int(lease.group_index), []).append(lease)
    bench.fail(by_group[ids["delayed"]][0], Report.RETRY, delay_s=3600)
    bench.complete(by_group[ids["half done"]][:2])
    assert bench.call(calls.park(by_group[ids["parked"]][0], b"partial")) == "parked"
    bench.client.hset(f"{bench.key}g:{ids['suspect']}", "x0", 2)
    bench.fail(by_group[ids["suspect"]][0], Report.BACK)
    bench.enqueue(ids["queued"], n=3)
    bench.enqueue("e:math:1", n=3)
    assert bench.where(ids["suspect"], 0) == "s"
    assert bench.where(ids["delayed"], 0) == "d"
    bench.audit()
    return ids


def is_empty(bench: Bench) -> bool:
    """Whether nothing of any group is left, and both streams hold and await nothing."""
    assert bench.key_names() <= RUN_KEYS, bench.key_names() - RUN_KEYS
    assert bench.client.xlen(f"{bench.key}eval") == 0
    for stream, group in (("full", "aggregators"), ("ready", "trainer")):
        assert bench.client.xlen(bench.key + stream) == 0
        assert bench.client.xpending(bench.key + stream, group)["pending"] == 0
    assert bench.queue.depths() == dict.fromkeys(
        ("q", "d", "s", "l", "full", "ready", "live", "delivered", "eval", "evaluations"), 0
    )
    return True


# --- 23: tastyware/streaq#92 ---------------------------------------------------------------------
def test_an_aborted_run_leaves_no_key_of_any_group(bench: Bench) -> None:
    ids = groups_in_every_state(bench)
    leases = bench.client.zrange(f"{bench.key}l", 0, -1)
    assert leases
    assert bench.call(calls.abort_run("enough")) == "aborting"
    bench.sweep()
    assert bench.m("state") == "ended"
    assert is_empty(bench)
    counters = bench.counters()
    assert counters["enqueued"] == len(ids) == counters["dropped:run_aborted"]
    assert counters["e.dropped:run_aborted"] == 2
    assert bench.terminal() == set()  # they may come again, in a new run
    late = [Lease(*entry.decode().split(":")) for entry in leases if b"e:" not in entry]
    assert set(bench.complete(late)) == {"fenced"}
    assert bench.call(calls.beat("worker", [lease.id for lease in late])).lost
    assert is_empty(bench)
    bench.audit()


# --- withdrawal ----------------------------------------------------------------------------------
@pytest.mark.parametrize("state", STATES)
def test_a_withdrawn_group_leaves_no_key_whatever_its_state(bench: Bench, state: str) -> None:
    ids = groups_in_every_state(bench)
    gid = ids[state]
    answer = bench.call(calls.withdraw(str(gid)))
    if state == "delivered":  # the trainer trains on it: taking it back would be a lie
        assert answer == "held"
        assert bench.state(gid) == "delivered"
        return
    assert answer == "dropped"
    assert not {f"g:{gid}", f"b:{gid}"} & bench.key_names()
    for members in ("q", "s", "d", "l"):
        left = bench.client.zrange(bench.key + members, 0, -1)
        assert [x for x in left if x.startswith(b"%d:" % gid)] == []
    assert gid in bench.terminal()
    assert bench.call(calls.withdraw(str(gid))) == "gone"
    bench.audit()


def test_capacity_returns_with_every_kind_of_end(bench: Bench) -> None:
    """A full run takes exactly one group more for every group that ended, however it did."""
    ids = groups_in_every_state(bench)
    bench.call(calls.set_budget("cap", len(ids)))  # the evaluation takes no capacity
    fresh = iter(range(100, 200))

    def free() -> int:
        found = 0
        while bench.enqueue(next(fresh), n=1) == ["new"]:
            found += 1
        return found

    assert free() == 0
    bench.ack(ids["delivered"])
    assert free() == 1
    assert bench.deliver(ids["ready"]) == ["ok"]
    assert bench.call(calls.retire("trainer", str(ids["ready"]), DropReason.STALE)) == "dropped"
    assert free() == 1
    entry = bench.queue.claim_full("a", idle_s=0, count=1)[0]
    assert bench.judge(entry, DropReason.ZERO_STD) == "dropped"
    assert free() == 1
    bench.call(calls.withdraw(str(ids["queued"])))
    assert free() == 1
    bench.call(calls.set_budget("max_stale", 0))
    bench.call(calls.set_version(5))
    swept = bench.sweep()  # what was leased under an old version
    assert swept.evicted == 5
    assert free() == 5
    bench.audit()


# --- a long pause --------------------------------------------------------------------------------
def test_a_pause_of_many_leases_and_deadlines_ends_nothing(bench: Bench) -> None:
    bench.enqueue(0, 1, n=2, timeout_ms=20_000)
    leases = bench.lease()
    bench.call(calls.pause())
    for _ in range(60):  # ten minutes, in which the worker beats as it does
        bench.advance(10_000 // 2 - 1)
        bench.advance(10_000 // 2 - 1)
        assert bench.call(calls.beat("worker", [lease.id for lease in leases])).lost == []
    assert bench.lease("other") == []
    bench.call(calls.resume())
    assert bench.counters() == {"enqueued": 2, "pauses": 1}
    assert {bench.state(0), bench.state(1)} == {"open"}
    assert bench.complete(leases) == ["ok"] * 4
    bench.audit()


def test_a_deadline_goes_on_with_the_run_where_the_pause_stopped_it(bench: Bench) -> None:
    bench.enqueue(0, n=1, timeout_ms=20_000)
    (lease,) = bench.lease()

    def live_for(ms: int) -> None:
        for _ in range(ms // 4_000):
            bench.advance(4_000)
            bench.call(calls.beat("worker", [lease.id]))

    live_for(16_000)
    bench.call(calls.pause())
    live_for(100_000)
    bench.call(calls.resume())
    assert bench.state(0) == "open"
    live_for(8_000)
    assert bench.state(0) == "full"
    (group,) = bench.queue.groups([("0", 1)])
    assert group.why == "deadline"


# --- begun anew ----------------------------------------------------------------------------------
@pytest.mark.parametrize("state", STATES)
def test_a_group_that_begins_anew_keeps_its_place_and_is_trained_once(
    bench: Bench, state: str
) -> None:
    ids = groups_in_every_state(bench)
    gid = ids[state]
    bench.enqueue(50, n=1)
    assert bench.call(calls.requeue(str(gid), 0, "by hand")) == "requeued"
    bench.audit()
    in_line = waiting(bench)  # a group keeps its age, so that it comes before all younger ones
    assert [x for x in in_line if x.startswith(f"{gid}:")] == [f"{gid}:{i}" for i in range(3)]
    assert in_line.index(f"{gid}:2") < in_line.index("50:0")
    leased = [lease for lease in bench.lease("fresh") if lease.group_index == str(gid)]
    assert {lease.member for lease in leased} == {0, 1, 2}
    assert set(bench.complete(leased, b"second life")) == {"ok"}
    entries = bench.queue.read_full("a", count=100, block_s=0)
    (entry,) = [e for e in entries if e.group_index == str(gid)]
    assert bench.judge(entry) == "ready"
    assert bench.deliver(gid) == ["ok"]
    assert bench.ack(gid) == ["acked"]
    assert bench.ack(gid) == ["done"]
    assert bench.call(calls.requeue(str(gid), 0, "too late")) == "gone"
    bench.audit()


def waiting(bench: Bench) -> list[str]:
    """The queue of the training groups, first what is leased next."""
    found = [name.decode() for name in bench.client.zrange(f"{bench.key}q", 0, -1)]
    return [name for name in found if not name.startswith("e:")]
