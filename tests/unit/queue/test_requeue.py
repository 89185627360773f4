"""`requeue` and `park`: a group that begins anew, and a member that waits with what it has."""

from __future__ import annotations

import pytest

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from tests.queue_bench import Bench, fake_bench

LIVE = ("queued", "open", "full", "ready", "delivered")


def _requeue(bench: Bench, gid: int | str = 0, life: int = 0, reason: str = "") -> str:
    return bench.call(calls.requeue(str(gid), life, reason))


def _group(bench: Bench, gid: int | str = 0) -> dict[str, str]:
    raw = bench.client.hgetall(f"{bench.key}g:{gid}")
    return {name.decode(): value.decode() for name, value in raw.items()}


# --- requeue -------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", LIVE)
def test_requeue_makes_a_group_what_it_was_when_it_was_new(bench: Bench, state: str) -> None:
    bench.connect()
    fresh = fake_bench()
    fresh.enqueue(0)
    bench.bring(0, state)
    assert _requeue(bench, reason="operator") == "requeued"
    wanted = _group(fresh) | {"life": "1", "requeue_reason": "operator"}
    assert _group(bench) == wanted
    assert bench.dump().keys() & {"b:0", "s", "d", "l", "age", "dl"} == set()
    assert bench.dump()["q"] == fresh.dump()["q"]
    assert bench.m("delivered") == "0"
    assert bench.client.xlen(f"{bench.key}full") == bench.client.xlen(f"{bench.key}ready") == 0
    counters = bench.counters()
    assert (counters["enqueued"], counters["requeued"]) == (1, 1)
    assert bench.queue.wait_bell(0.01)
    bench.audit()


@pytest.mark.parametrize("state", LIVE)
def test_a_requeued_group_lives_on_to_its_ack(bench: Bench, state: str) -> None:
    bench.connect()
    bench.bring(0, state)
    _requeue(bench)
    bench.complete(bench.lease("another"), b"new")
    (entry,) = bench.queue.read_full("a", count=9, block_s=0)
    assert bench.judge(entry) == "ready"
    (entry,) = bench.queue.read_ready(count=9, block_s=0)
    found = bench.queue.deliver_and_fetch("trainer", [entry])
    assert found.groups[0] is not None
    assert found.groups[0].bodies == [b"new"] * 2
    assert bench.ack(0) == ["acked"]
    assert not {key for key in bench.key_names() if ":" in key}
    bench.audit()


def test_requeue_forgets_attempts_crashes_errors_and_parked_bodies(bench: Bench) -> None:
    bench.enqueue(0, n=4, timeout_ms=60_000)
    a, b, c, _ = bench.lease()
    bench.fail(a, Report.RETRY)
    bench.fail(b, Report.FINAL)
    bench.call(calls.park(c, b"half"))
    bench.advance(15_001)  # the fourth crashes
    assert _requeue(bench) == "requeued"
    (group,) = bench.call(calls.lease("another", 1, 9)).groups
    assert [(m.attempts, m.crashes, m.parked_bytes) for m in group.members] == [(0, 0, 0)] * 4
    assert group.remaining_s == 60.0
    (stored,) = bench.queue.groups([("0", 4)])
    assert (stored.why, stored.errors, stored.bodies) == ("", [None] * 4, [None] * 4)
    bench.audit()


def test_requeue_keeps_the_place_in_front_of_the_queue(bench: Bench) -> None:
    bench.full(0)
    bench.enqueue(1, 2)
    _requeue(bench)
    assert [lease.group_index for lease in bench.lease()] == ["0", "0", "1", "1", "2", "2"]


def test_requeue_of_a_queued_group_passes_none_that_is_older(bench: Bench) -> None:
    bench.enqueue(0, 1, 2)
    _requeue(bench, 2)
    assert [lease.group_index for lease in bench.lease()] == ["0", "0", "1", "1", "2", "2"]


def test_requeue_fences_the_leases_of_the_old_life(bench: Bench) -> None:
    bench.enqueue(0)
    first = bench.call(calls.lease("w", 1, 9)).groups[0].members
    done, running = (member.lease for member in first)
    bench.complete([done])
    _requeue(bench)
    assert bench.complete([done, running]) == ["fenced", "fenced"]
    assert bench.fail(running) == "fenced"
    assert bench.call(calls.park(running, b"p")) == "fenced"
    assert bench.call(calls.beat("w", [running.id])).lost == [running.id]
    assert bench.call(calls.lease("w", 1, 9)).groups == []
    assert (bench.where(0, 0), bench.where(0, 1)) == ("q", "q")
    bench.audit()


def test_requeue_fences_the_verdict_on_the_old_life(bench: Bench) -> None:
    old = bench.full(0)
    _requeue(bench)
    assert bench.judge(old) == "noop"
    bench.complete(bench.lease())
    assert bench.judge(old, DropReason.ZERO_STD) == "noop"
    (new,) = bench.queue.read_full("a", count=9, block_s=0)
    assert bench.judge(new) == "ready"
    bench.audit()


@pytest.mark.parametrize("state", LIVE)
def test_an_ack_of_the_old_results_ends_the_new_life_wherever_it_is(
    bench: Bench, state: str
) -> None:
    bench.connect()
    bench.bring(0, "delivered")
    _requeue(bench)
    if state != "queued":
        leases = bench.lease(limit=1 if state == "open" else 9)
        if state != "open":
            bench.complete(leases)
            (entry,) = bench.queue.read_full("a", count=9, block_s=0)
        if state in ("ready", "delivered"):
            bench.judge(entry)
        if state == "delivered":
            bench.deliver(0)
    assert bench.ack(0) == ["acked"]
    assert bench.terminal() == {0}
    assert bench.m("delivered") == "0"
    bench.audit()


def test_retire_of_the_old_results_leaves_the_new_life_alone(bench: Bench) -> None:
    bench.connect()
    bench.bring(0, "delivered")
    _requeue(bench)
    for _ in range(2):
        assert bench.call(calls.retire("trainer", "0", DropReason.STALE)) == "gone"
        bench.complete(bench.lease())
    (entry,) = bench.queue.read_full("a", count=9, block_s=0)
    bench.judge(entry)
    assert bench.call(calls.retire("trainer", "0", DropReason.STALE)) == "gone"
    assert bench.deliver(0) == ["ok"]
    bench.audit()


def test_a_delivery_that_was_under_way_is_gone(bench: Bench) -> None:
    bench.connect()
    (entry,) = bench.ready(0)
    _requeue(bench)
    found = bench.queue.deliver_and_fetch("trainer", [entry])
    assert (found.answers, found.groups) == (["gone"], [None])
    assert bench.queue.pending_ready(count=9) == []


def test_staleness_and_deadline_begin_anew_with_the_next_lease() -> None:
    bench = fake_bench(max_stale=0)
    bench.enqueue(0, timeout_ms=5000)
    bench.lease()
    bench.advance(4000)
    bench.call(calls.set_version(3))
    _requeue(bench)
    bench.advance(8000)
    assert bench.sweep().evicted == 0
    assert bench.state(0) == "open"
    (group,) = bench.call(calls.lease("another", 1, 9)).groups
    assert group.remaining_s == 5.0
    assert bench.queue.groups([("0", 2)])[0].version_at_lease == 3
    bench.audit()


def test_requeue_is_fenced_by_the_life_and_bounded_by_the_budget() -> None:
    bench = fake_bench(max_requeues=2)
    bench.enqueue(0)
    assert [_requeue(bench, life=life) for life in (1, 0, 0, 1, 1, 2)] == [
        "other", "requeued", "other", "requeued", "other", "exhausted"
    ]  # fmt: skip
    bench.call(calls.set_budget("max_requeues", 3))
    assert _requeue(bench, life=2) == "requeued"
    assert bench.counters()["requeued"] == 3
    bench.audit()


def test_requeue_without_a_budget_in_the_run_is_possible_once(bench: Bench) -> None:
    bench.client.hdel(f"{bench.key}m", "max_requeues")
    bench.enqueue(0)
    assert [_requeue(bench, life=life) for life in (0, 1)] == ["requeued", "exhausted"]


def test_requeue_of_what_ended_is_gone_and_of_no_run_is_lost(bench: Bench) -> None:
    bench.connect()
    bench.ready(0)
    bench.ack(0)
    assert _requeue(bench) == "gone"
    assert bench.terminal() == {0}
    bench.client.flushall()
    assert _requeue(bench) == "lost"
    assert bench.key_names() == set()


@pytest.mark.parametrize("n", [1, 1024, 1025])
def test_requeue_of_a_large_group_takes_all_its_members_along(bench: Bench, n: int) -> None:
    bench.enqueue(0, n=n)
    leases = bench.lease()
    for lease in leases[:3]:
        bench.fail(lease, Report.BACK, MemberReason.SHUTDOWN, delay_s=5)
    bench.complete(leases[3:6])
    assert _requeue(bench) == "requeued"
    assert bench.client.zcard(f"{bench.key}q") == n
    bench.audit()


def test_requeue_of_a_suspect_starts_it_without_suspicion() -> None:
    bench = fake_bench(lease_ms=1000)
    bench.enqueue(0, n=1)
    for crash in range(2):
        bench.lease(f"w{crash}")
        bench.advance(1001)
    assert bench.where(0, 0) == "s"
    _requeue(bench)
    assert bench.where(0, 0) == "q"
    bench.audit()


def test_requeue_of_an_evaluation_is_counted_apart_and_stays_in_front(bench: Bench) -> None:
    bench.enqueue(0)
    bench.enqueue("e:x:1", priority=-1)
    bench.complete([x for x in bench.lease() if x.group_index == "e:x:1"])
    assert _requeue(bench, "e:x:1") == "requeued"
    assert bench.counters() == {"enqueued": 1, "e.enqueued": 1, "completed": 2, "e.requeued": 1}
    bench.enqueue(1)
    assert [x.group_index for x in bench.lease("b")] == ["e:x:1"] * 2 + ["1"] * 2
    bench.audit()


# --- park ----------------------------------------------------------------------------------------
def test_park_sends_a_member_back_uncharged_with_its_body(bench: Bench) -> None:
    bench.enqueue(0)
    lease, _ = bench.lease()
    bench.queue.wait_bell(0.01)
    assert bench.call(calls.park(lease, b"half")) == "parked"
    assert bench.where(0, 0) == "q"
    assert bench.client.hget(f"{bench.key}b:0", "p0") == b"half"
    assert bench.queue.wait_bell(0.01)
    (group,) = bench.call(calls.lease("another", 1, 9)).groups
    (member,) = group.members
    assert (member.attempts, member.crashes, member.parked_bytes) == (0, 0, 4)
    assert bench.counters()["parked"] == 1
    bench.audit()


def test_a_parked_body_stays_until_the_member_ends(bench: Bench) -> None:
    bench.enqueue(0, n=3)
    for lease in bench.lease():
        bench.call(calls.park(lease, b"half"))
    back, crashed, parked = bench.lease()
    bench.fail(back, Report.BACK)
    bench.call(calls.park(parked, b"further"))
    bench.advance(15_001)
    assert bench.where(0, crashed.member) == "q"
    (group,) = bench.call(calls.lease("another", 1, 9)).groups
    by_member = sorted(group.members, key=lambda m: m.lease.member)
    assert [m.parked_bytes for m in by_member] == [4, 4, 7]
    bench.audit()
    done, failed, _ = (m.lease for m in by_member)
    bench.complete([done])
    bench.fail(failed, Report.FINAL)
    assert set(bench.client.hkeys(f"{bench.key}b:0")) == {b"0", b"x0", b"p2"}
    bench.audit()


def test_park_keeps_a_suspect_a_suspect() -> None:
    bench = fake_bench(lease_ms=1000)
    bench.enqueue(0, n=1)
    for crash in range(2):
        bench.lease(f"w{crash}")
        bench.advance(1001)
    (lease,) = bench.lease("w2")
    assert bench.call(calls.park(lease, b"half")) == "parked"
    assert bench.where(0, 0) == "s"
    (member,) = bench.call(calls.lease("w3", 1, 9)).groups[0].members
    assert (member.crashes, member.parked_bytes) == (2, 4)
    bench.audit()


def test_park_over_the_limit_fails_the_member_and_the_group_goes_on() -> None:
    bench = fake_bench(max_body=5)
    bench.enqueue(0)
    a, b = bench.lease()
    assert bench.call(calls.park(a, b"123456")) == "too_large"
    assert bench.call(calls.park(b, b"12345")) == "parked"
    assert bench.queue.groups([("0", 2)])[0].errors[0] == ("too_large", "6 bytes, allowed are 5")
    bench.fail(bench.lease()[0], Report.FINAL)
    assert bench.state(0) == "full"
    bench.audit()


def test_park_is_fenced_after_the_lease_expired_or_the_group_ended(bench: Bench) -> None:
    bench.enqueue(0, 1, n=1)
    expired, dropped = bench.lease()
    bench.call(calls.withdraw("1"))
    bench.advance(15_001)
    before = bench.dump()
    for lease in (expired, dropped):
        assert bench.call(calls.park(lease, b"late")) == "fenced"
    assert bench.dump() == before


@pytest.mark.parametrize("field", ["score", "prompt", "timeout_ms", "n", "state"])
def test_a_group_that_lost_what_it_began_with_stays_as_it_is(bench: Bench, field: str) -> None:
    bench.enqueue(0)
    bench.lease()
    bench.client.hdel(f"{bench.key}g:0", field)
    before = bench.dump()
    assert bench.call(calls.requeue("0", 0)) == "gone"
    assert bench.dump() == before
