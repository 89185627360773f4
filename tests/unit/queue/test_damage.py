"""Keys of a live group that vanish (evicted, deleted, overwritten): nothing hangs or is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import Completion
from tests.queue_bench import Bench, fake_bench

LIVE = ("queued", "open", "full", "ready", "delivered")
STATES = (*LIVE, "delayed", "suspect", "parked")


def _bring(bench: Bench, gid: int, state: str) -> None:
    if state in LIVE:
        bench.bring(gid, state)
    elif state == "suspect":
        bench.enqueue(gid)
        for crash in range(2):
            bench.lease(f"dead{crash}")
            bench.advance(15_001)
        assert bench.where(gid, 0) == "s"
    else:
        bench.enqueue(gid)
        lease = bench.lease(limit=1)[0]
        if state == "parked":
            bench.call(calls.park(lease, b"half"))
        else:
            bench.fail(lease, Report.BACK, MemberReason.SHUTDOWN, delay_s=60)


def _delete(bench: Bench, *names: str) -> None:
    bench.client.delete(*(bench.key + name for name in names))


def _drain(bench: Bench, num_ids: int) -> None:
    """One healthy process of each kind finishes the run."""
    for number in range(20):
        if bench.terminal() == set(range(num_ids)):
            break
        bench.advance(7000)
        bench.enqueue(*range(num_ids))
        bench.complete(bench.lease(f"healthy{number}"))
        for entry in bench.queue.read_full("a", count=99, block_s=0):
            bench.judge(entry)
        bench.queue.read_ready(count=99, block_s=0)
        entries = bench.queue.pending_ready(count=99)
        for entry in entries:
            if bench.deliver(int(entry.group_index)) == ["ok"]:
                bench.ack(int(entry.group_index))
    assert bench.terminal() == set(range(num_ids))
    assert not {key for key in bench.key_names() if ":" in key or key in "qsdl"}
    bench.audit()


# --- found by sweep ------------------------------------------------------------------------------
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("keys", ["g", "gb", "b", "foreign g", "foreign b"])
def test_a_group_whose_keys_vanish_is_ended_and_trained_after_all(
    bench: Bench, state: str, keys: str
) -> None:
    bench.connect()
    _bring(bench, 0, state)
    bench.enqueue(1)
    bench.call(calls.end_of_data(1))
    hash_is_gone = keys in ("g", "gb", "foreign g")
    results_are_gone = "b:0" in bench.key_names() or keys == "foreign b"
    if keys.startswith("foreign"):
        _delete(bench, f"{keys[-1]}:0")
        bench.client.set(f"{bench.key}{keys[-1]}:0", "another program's")
    else:
        _delete(bench, *(f"{key}:0" for key in keys))
    bench.advance(15_000)
    bench.audit()
    info = bench.queue.info()
    assert info is not None
    if hash_is_gone or results_are_gone:
        assert bench.state(0) is None
        assert bench.counters()["dropped:withdrawn"] == bench.counters()["vanished"] == 1
        (drop,) = bench.queue.past()
        what = "record" if hash_is_gone else "results"
        assert drop["detail"] == f"its {what} vanished"
        assert (info.epoch, info.done, info.delivered) == (2, False, 0)
        assert bench.terminal() == set()
    else:
        assert (info.epoch, info.done) == (1, True)
        assert bench.state(0) == "open"
    assert bench.enqueue(1) == ["dup"]
    _drain(bench, 2)


@pytest.mark.parametrize("state", ["queued", "leased", "ready", "delivered"])
def test_many_vanish_at_once_and_the_others_are_left_alone(bench: Bench, state: str) -> None:
    bench.connect()
    gone, kept = range(0, 700, 10), [1, 2, 3]
    for gid in (*gone, *kept):
        bench.bring(gid, state) if state in LIVE else bench.enqueue(gid)
    if state not in LIVE:
        bench.lease("w")
    _delete(bench, *(f"g:{gid}" for gid in gone))
    bench.advance(7500)
    bench.audit()
    assert bench.counters()["vanished"] == len(gone)
    assert bench.m("epoch") in ("2", "3")
    assert {gid for gid in kept if bench.state(gid)} == set(kept)
    assert int(bench.m("delivered")) == (len(kept) if state == "delivered" else 0)


def test_a_walk_begins_every_half_lease_and_at_once_where_somebody_met_damage(
    bench: Bench,
) -> None:
    bench.enqueue(0, 1)
    bench.advance(7500)
    bench.lease(limit=1)
    _delete(bench, "g:0")
    bench.sweep()
    assert bench.call(calls.audit(deep=True)).problems
    assert [lease.group_index for lease in bench.lease()] == ["1", "1"]
    assert bench.sweep().vanished == 1
    bench.audit()


def test_a_damaged_group_is_live_until_nothing_is_left_of_it(bench: Bench) -> None:
    """Else its id could come again beside members of its earlier life."""
    bench.enqueue(0, n=1500)
    leases = bench.lease()
    _delete(bench, "g:0")
    bench.complete(leases[:1])
    pages = 0
    while bench.call(calls.sweep(64)).more:
        pages += 1
        left = sum(bench.client.zcard(bench.key + key) for key in "ql")
        assert bench.call(calls.audit()).live == 1 or left == 0
        if left:
            assert bench.enqueue(0, n=1500) == ["dup"]
    assert pages > 3
    assert bench.enqueue(0, n=1500) == ["new"]
    assert bench.complete(leases[1:]) == ["fenced"] * 255
    bench.audit()


def test_entries_that_vanish_are_written_again(bench: Bench) -> None:
    bench.connect()
    bench.full(0)
    bench.ready(1, 2)
    bench.deliver(2)
    _delete(bench, "full", "ready")
    bench.advance(7500)
    bench.audit()
    (entry,) = bench.queue.read_full("a", count=9, block_s=0)
    assert bench.judge(entry) == "ready"
    entries = bench.queue.read_ready(count=9, block_s=0)
    assert {entry.group_index for entry in entries} == {"0", "1", "2"}
    assert bench.deliver(0, 1, 2) == ["ok"] * 3
    assert bench.ack(0, 1, 2) == ["acked"] * 3
    bench.audit()


def test_entries_that_refer_to_no_group_are_taken_away_and_foreign_ones_stay(bench: Bench) -> None:
    bench.full(0)
    for stream in ("full", "ready"):
        bench.client.xadd(bench.key + stream, {"g": "7", "n": 2})
        bench.client.xadd(bench.key + stream, {"g": "0", "n": 2})
        bench.client.xadd(bench.key + stream, {"other": "x"})
    bench.advance(7500)
    assert bench.client.xlen(f"{bench.key}full") == 2
    assert bench.client.xlen(f"{bench.key}ready") == 1


@pytest.mark.parametrize("key", ["q", "s", "d", "l"])
def test_members_of_no_group_at_all_are_taken_away(bench: Bench, key: str) -> None:
    bench.enqueue(0)
    bench.client.zadd(bench.key + key, {"9:0:w-1-1" if key == "l" else "9:0": 0})
    if key == "l":
        bench.advance(16_000)
    bench.lease("w")
    bench.advance(100)
    bench.audit()


# --- met by a script -----------------------------------------------------------------------------
def test_lease_gives_none_of_a_vanished_group_and_all_of_the_others(bench: Bench) -> None:
    bench.enqueue(0, 1, 2)
    _delete(bench, "g:1")
    assert [lease.group_index for lease in bench.lease()] == ["0", "0", "2", "2"]
    assert bench.sweep().vanished == 1
    bench.audit()
    assert bench.m("epoch") == "2"


def _lease_calls(bench: Bench) -> dict[str, Callable[[], object]]:
    lease = bench.lease(limit=1)[0]
    return {
        "complete": lambda: bench.complete([lease]),
        "fail": lambda: [bench.fail(lease)],
        "back": lambda: [bench.fail(lease, Report.BACK)],
        "park": lambda: [bench.call(calls.park(lease, b"p"))],
    }


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("name", ["complete", "fail", "back", "park"])
def test_a_lease_of_a_vanished_group_is_fenced_and_the_group_is_ended_at_the_next_sweep(
    bench: Bench, name: str, foreign: bool
) -> None:
    bench.enqueue(0, n=3)
    call = _lease_calls(bench)[name]
    bench.advance(7500)
    _delete(bench, "g:0")
    if foreign:
        bench.client.set(f"{bench.key}g:0", "x")
    assert call() == ["fenced"]
    assert bench.sweep().vanished == 1
    assert call() == ["fenced"]
    bench.audit()
    assert bench.enqueue(0, n=3) == ["new"]


def test_an_expired_lease_of_a_vanished_group_charges_nobody(bench: Bench) -> None:
    bench.enqueue(0)
    bench.lease()
    bench.set_clock(bench.now_ms + 7499)
    bench.sweep()
    _delete(bench, "g:0")
    for _ in range(2):
        bench.set_clock(bench.now_ms + 7499)
        bench.sweep()
    assert bench.counters().get("crashes", 0) == 0
    bench.audit()


@pytest.mark.parametrize("state", LIVE)
def test_an_ack_of_a_vanished_group_is_a_fact_and_leaves_nothing(bench: Bench, state: str) -> None:
    bench.connect()
    _bring(bench, 0, state)
    bench.enqueue(1)
    _delete(bench, "g:0")
    assert bench.ack(0) == ["acked"]
    bench.audit()
    assert bench.terminal() == {0}
    assert bench.ack(0) == ["done"]
    bench.advance(15_000)
    assert bench.counters().get("vanished", 0) == 0
    assert bench.m("epoch") == "1"


@pytest.mark.parametrize("state", LIVE)
def test_a_withdrawal_and_a_rewind_of_a_vanished_group_leave_nothing(
    bench: Bench, state: str
) -> None:
    bench.connect()
    for gid in (0, 1):
        _bring(bench, gid, state) if state == "open" and gid == 0 else bench.bring(
            gid, "queued" if state == "open" else state
        )
    _delete(bench, "g:0", "g:1")
    assert bench.call(calls.withdraw("0")) == "dropped"
    bench.call(calls.rewind("trainer", "r", 2, b""))
    bench.audit()
    assert bench.counters()["dropped:seen"] == 1
    assert int(bench.m("delivered")) == 0


def test_other_calls_for_a_vanished_group_say_gone(bench: Bench) -> None:
    bench.connect()
    full = bench.full(0)
    bench.ready(1)
    _delete(bench, "g:0", "g:1")
    assert bench.judge(full, DropReason.ZERO_STD) == "noop"
    assert bench.deliver(1) == ["gone"]
    assert bench.call(calls.retire("trainer", "1", DropReason.STALE)) == "gone"
    assert bench.call(calls.requeue("1", 0)) == "gone"
    bench.advance(7500)
    bench.audit()


def test_enqueue_of_a_vanished_group_counts_nothing_twice(bench: Bench) -> None:
    bench.enqueue(0)
    _delete(bench, "g:0")
    assert bench.enqueue(0) == ["dup"]
    assert bench.counters()["enqueued"] == 1
    bench.sweep()
    assert bench.enqueue(0) == ["new"]
    bench.audit()


def test_an_abort_ends_vanished_groups_before_the_run_is_ended(bench: Bench) -> None:
    bench.connect()
    bench.bring(0, "delivered")
    bench.enqueue(*range(1, 40))
    bench.lease()
    _delete(bench, *(f"g:{gid}" for gid in range(0, 40, 2)))
    bench.call(calls.abort_run())
    bench.sweep()
    info = bench.queue.info()
    assert info is not None
    assert (info.state, info.delivered) == ("ended", 0)
    assert "vanished" not in bench.key_names()
    assert not set("qsdl") & bench.key_names()
    bench.audit()


def test_staleness_and_deadlines_of_vanished_groups_stop_no_sweep() -> None:
    bench = fake_bench(max_stale=0)
    bench.enqueue(*range(40), timeout_ms=1000)
    bench.lease()
    _delete(bench, *(f"g:{gid}" for gid in range(20)))
    bench.call(calls.set_version(1))
    bench.set_clock(bench.now_ms + 1500)
    bench.sweep()
    assert bench.counters()["vanished"] == 20
    assert bench.counters()["dropped:stale"] == 20
    bench.audit()


def test_an_evaluation_that_vanishes_changes_no_epoch_and_no_training_count(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(0)
    for gid in ("e:x:1", "e:x"):
        bench.enqueue(gid, priority=-1)
    bench.lease(limit=3)
    _delete(bench, "g:e:x")
    bench.advance(7500)
    assert bench.counters()["e.dropped:withdrawn"] == bench.counters()["e.vanished"] == 1
    assert bench.m("epoch") == "1"
    assert bench.state("e:x:1") == "open"
    bench.audit()


def test_a_sweep_that_walks_over_whole_groups_writes_nothing_of_them(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(0, 1, n=3)
    lease, done, _ = bench.lease(limit=3)
    bench.call(calls.park(lease, b"half"))
    bench.complete([done])
    for gid, state in enumerate(("full", "ready", "delivered"), 2):
        bench.bring(gid, state)
    before = bench.dump()
    bench.advance(7500)
    after = bench.dump()
    assert {k: v for k, v in after.items() if k != "m"} == {
        k: v for k, v in before.items() if k != "m"
    }


def test_a_parked_body_that_was_used_is_no_damage(bench: Bench) -> None:
    bench.enqueue(0)
    bench.call(calls.park(bench.lease(limit=1)[0], b"half"))
    bench.fail(bench.lease(limit=1)[0], Report.FINAL)
    assert "b:0" not in bench.key_names()
    bench.advance(7500)
    assert bench.state(0) == "open"
    bench.audit()


def test_a_result_for_lost_results_is_not_counted_as_whole(bench: Bench) -> None:
    bench.enqueue(0, n=3)
    a, b, c = bench.lease()
    bench.complete([a])
    _delete(bench, "b:0")
    assert [x.left for x in bench.call(calls.complete([Completion(b, b"h", b"b")]))] == [1]
    bench.advance(7500)
    bench.complete([c])


# --- a hash that is not whole --------------------------------------------------------------------
@pytest.mark.parametrize("state", ["queued", "open", "ready", "delivered"])
@pytest.mark.parametrize("size", ["1e15", "9" * 400, "0", "x", None])
def test_a_group_of_an_impossible_size_ends_and_comes_again(state: str, size: str | None) -> None:
    """A script that loops over its members would keep the server from everybody."""
    bench = fake_bench()
    bench.connect()
    bench.bring(0, state)
    if size is None:
        bench.client.hdel(f"{bench.key}g:0", "n")
    else:
        bench.client.hset(f"{bench.key}g:0", "n", size)
    problems = bench.call(calls.audit(deep=True)).problems
    assert f"n of 0 is {size or 'missing'}" in problems
    assert bench.call(calls.requeue("0", 0, "x")) == "gone"
    bench.call(calls.withdraw("0"))
    _drain(bench, 2)
