"""What becomes of groups that are too old, wherever they are found, and how that is counted."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import DropReason
from rollstream.queue import calls
from tests.queue_bench import Bench, fake_bench

PLACES = ("running", "ready", "hand_out")


def _stale(bench: Bench) -> dict[str, int]:
    return {name: n for name, n in bench.counters().items() if name.startswith("stale")}


def _counted(place: str, age: int, groups: int = 1) -> dict[str, int]:
    return {f"stale:{place}": groups, f"stale_age:{place}": age}


def _aged(state: str, versions: int = 3, **budgets: Any) -> Bench:
    """Return a bench with group 0 in `state` and the version moved on; nobody judged it yet."""
    bench = fake_bench(max_stale=1, **budgets)
    bench.connect()
    bench.bring(0, state)
    for version in range(1, versions + 1):
        bench.call(calls.set_version(version))
    return bench


@pytest.mark.parametrize(
    ("state", "place"), [("open", "running"), ("full", "ready"), ("ready", "ready")]
)
def test_a_sweep_drops_what_got_stale_and_counts_where_and_by_how_much(
    state: str, place: str
) -> None:
    bench = _aged(state)
    assert bench.sweep().evicted == 1
    assert _stale(bench) == _counted(place, 3)
    assert bench.counters()["dropped:stale"] == 1
    assert bench.terminal() == {0}
    assert bench.queue.wait_room(0.01)
    bench.audit()


def test_a_hand_out_counts_what_is_stale_at_it_and_what_the_trainer_gives_up(bench: Bench) -> None:
    bench.call(calls.set_budget("max_stale", 1))
    bench.connect()
    bench.ready(0, 1, 2)
    assert bench.deliver(0, 1) == ["ok", "ok"]
    bench.call(calls.set_version(2))
    assert bench.deliver(2) == ["stale"]
    assert _stale(bench) == _counted("ready", 2)
    assert bench.deliver(0) == ["stale"], "handed out again, as to a trainer that reconnects"
    bench.call(calls.set_version(5))
    assert bench.call(calls.retire("trainer", "1", DropReason.STALE)) == "dropped"
    assert _stale(bench) == _counted("ready", 2) | _counted("hand_out", 2 + 5, 2)
    assert bench.m("delivered") == "0"
    bench.audit()


def test_what_is_young_enough_is_left_alone() -> None:
    bench = _aged("ready", versions=1)
    assert bench.sweep().evicted == 0
    assert bench.deliver(0) == ["ok"]
    assert _stale(bench) == {}


def test_another_reason_to_give_a_group_up_is_not_staleness(bench: Bench) -> None:
    bench.call(calls.set_budget("on_stale", "requeue"))
    bench.connect()
    bench.bring(0, "delivered")
    assert bench.call(calls.retire("trainer", "0", DropReason.SEEN)) == "dropped"
    assert _stale(bench) == {}


@pytest.mark.parametrize("state", ["open", "full", "ready", "delivered"])
def test_a_stale_group_begins_anew_in_its_place_where_the_run_says_so(state: str) -> None:
    bench = _aged(state, on_stale="requeue")
    bench.enqueue(1)
    if state == "delivered":
        assert bench.call(calls.retire("trainer", "0", DropReason.STALE)) == "requeued"
        place = "hand_out"
    else:
        assert bench.sweep().evicted == 1
        place = "running" if state == "open" else "ready"
    assert _stale(bench) == _counted(place, 3)
    counters = bench.counters()
    assert (counters["requeued"], counters["requeued:stale"]) == (1, 1)
    assert bench.terminal() == set()
    assert bench.m("delivered") == "0"
    bench.audit()
    leases = bench.lease("other", limit=2)
    assert [lease.group_index for lease in leases] == ["0", "0"], "before what came later"
    assert bench.queue.groups([("0", 2)])[0].version_at_lease == 3
    assert bench.sweep().evicted == 0
    assert bench.complete(leases) == ["ok", "ok"]


def test_whoever_runs_a_group_that_begins_anew_is_fenced() -> None:
    bench = fake_bench(max_stale=0, on_stale="requeue")
    bench.enqueue(0)
    leases = bench.lease()
    bench.call(calls.park(leases[0], b"half"))
    bench.call(calls.set_version(1))
    bench.sweep()
    assert bench.complete(leases) == ["fenced", "fenced"]
    assert bench.queue.parked(leases[0]) is None
    bench.audit()


def test_a_group_that_is_handed_out_stale_begins_anew_and_the_trainer_hears_stale() -> None:
    bench = _aged("ready", on_stale="requeue")
    assert bench.deliver(0) == ["stale"]
    assert bench.state(0) == "open"
    assert bench.deliver(0) == ["gone"]
    assert bench.queue.pending_ready() == []
    bench.audit()


def test_a_group_begins_anew_as_often_as_it_may_and_is_dropped_then() -> None:
    bench = fake_bench(max_stale=0, on_stale="requeue", max_requeues=2)
    bench.enqueue(0)
    for version in (1, 2, 3):
        assert bench.lease(f"w{version}")
        bench.call(calls.set_version(version))
        assert bench.sweep().evicted == 1
    assert bench.state(0) is None
    counters = bench.counters()
    assert (counters["requeued:stale"], counters["dropped:stale"]) == (2, 1)
    assert _stale(bench) == _counted("running", 3, 3)
    assert bench.terminal() == {0}


@pytest.mark.parametrize("state", ["open", "full", "ready", "delivered"])
def test_nothing_is_evicted_or_dropped_where_stale_groups_are_delivered(state: str) -> None:
    bench = _aged(state, on_stale="deliver")
    assert bench.sweep().evicted == 0
    answer = ["ok"] if state in ("ready", "delivered") else ["gone"]
    assert bench.deliver(0) == answer
    assert bench.state(0) is not None
    assert _stale(bench) == {}
    assert bench.queue.groups([("0", 2)])[0].version_at_lease == 0, "it carries its staleness"


def test_no_more_members_of_stale_groups_begin_anew_in_a_call_than_are_dropped() -> None:
    bench = fake_bench(max_stale=0, on_stale="requeue")
    bench.enqueue(*range(5), n=300)
    for worker in range(8):
        bench.lease(f"w{worker}", limit=256)
    bench.call(calls.set_version(1))
    first = bench.call(calls.sweep())
    assert (first.evicted, first.more) == (2, True)
    assert bench.sweep().evicted == 3
    bench.audit()


def test_a_group_in_an_aggregator_s_hands_begins_anew_and_its_verdict_changes_nothing() -> None:
    bench = fake_bench(max_stale=0, on_stale="requeue")
    entry = bench.full(0)
    bench.call(calls.set_version(1))
    bench.sweep()
    assert bench.judge(entry) == "noop"
    assert bench.state(0) == "open"
    bench.audit()


def test_a_failed_run_keeps_its_stale_groups_for_whoever_looks() -> None:
    bench = _aged("ready")
    bench.call(calls.fail_run("engines"))
    assert bench.sweep().evicted == 0
    assert bench.state(0) == "ready"
    assert _stale(bench) == {}
    bench.call(calls.abort_run())
    bench.sweep()
    assert bench.counters()["dropped:run_aborted"] == 1


def test_stale_groups_are_evicted_in_a_pause_too() -> None:
    bench = _aged("open")
    bench.call(calls.pause())
    assert bench.sweep().evicted == 1


def test_case_74_a_group_is_as_old_as_its_first_lease_whenever_it_completes(bench: Bench) -> None:
    bench.call(calls.set_budget("max_stale", 1))
    bench.connect()
    bench.call(calls.set_version(3))
    bench.enqueue(0, n=3)
    first, second, third = bench.lease()
    bench.complete([first, second])
    bench.call(calls.set_version(4))
    bench.complete([third])
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    bench.judge(entry)
    assert bench.queue.groups([("0", 3)])[0].version_at_lease == 3
    bench.call(calls.set_version(5))
    assert bench.deliver(0) == ["stale"]
    assert _stale(bench) == _counted("ready", 2)


def test_case_77_a_prompt_that_is_always_too_slow_ends_visibly_and_keeps_nobody_back() -> None:
    """It needs three versions where one is allowed; the others need less than one."""
    bench = fake_bench(max_stale=1, on_stale="requeue", max_requeues=3, cap=4)
    bench.connect()
    bench.enqueue(0, n=1)
    trained, step = 0, 0
    while bench.state(0) is not None:
        step += 1
        assert bench.enqueue(step, n=1) == ["new"]
        bench.complete([x for x in bench.lease(f"w{step}") if x.group_index != "0"])
        (entry,) = bench.queue.read_full("a", count=1, block_s=0)
        bench.judge(entry)
        assert bench.deliver(step) == ["ok"]
        trained += bench.ack(step) == ["acked"]
        bench.call(calls.set_version(step))
        bench.sweep()
        assert step <= 20
    assert trained == step
    counters = bench.counters()
    assert (counters["requeued:stale"], counters["dropped:stale"]) == (3, 1)
    assert _stale(bench) == _counted("running", 4 * 2, 4)
    (drop,) = bench.queue.past()
    assert (drop["group_index"], drop["reason"]) == ("0", "stale")
    assert bench.terminal() == set(range(step + 1))
    bench.audit()


@pytest.mark.parametrize("state", ["open", "ready", "delivered"])
@pytest.mark.parametrize("field", ["life", "score", "prompt", "timeout_ms", "version"])
def test_a_damaged_group_that_is_stale_stops_no_sweep_and_no_trainer(
    state: str, field: str
) -> None:
    bench = _aged(state, on_stale="requeue")
    bench.client.hdel(f"{bench.key}g:0", field)
    bench.ready(1)
    if state == "delivered":
        answer = bench.call(calls.retire("trainer", "0", DropReason.STALE))
        assert answer == ("requeued" if field == "version" else "dropped")
    else:
        assert bench.sweep().evicted == 1
    assert (bench.state(0) is None) == (field != "version")
    assert bench.deliver(1) == ["ok"]
    bench.audit()
