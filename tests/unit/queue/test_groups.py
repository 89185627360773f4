"""Groups: capacity, deadlines, verdicts, delivery, endings, and what is left of them."""

from __future__ import annotations

import pytest

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import Completion
from tests.queue_bench import Bench, fake_bench

RUN_KEYS = {"m", "c", "w", "wl", "ws", "cur", "full", "ready", "ctl", "past", "bell", "room"}


def test_open_refuses_another_source_and_another_schema(bench: Bench) -> None:
    assert bench.open("other source") == ["mismatch", "1", "source"]
    assert bench.open(schema=2) == ["mismatch", "1", "source"]
    assert bench.queue.info().capacity == 512  # type: ignore[union-attr]  # it is open


def test_open_sets_budgets_again_on_the_same_run(bench: Bench) -> None:
    bench.enqueue(0)
    bench.budgets["cap"] = 3
    assert bench.open() == ["same", "running"]
    info = bench.queue.info()
    assert info is not None
    assert (info.capacity, info.lease_s, info.max_crashes) == (3, 15.0, 4)
    assert bench.where(0, 0) == "q"


@pytest.mark.parametrize("missing", ["full", "ready"])
def test_open_makes_what_is_missing_of_the_streams(bench: Bench, missing: str) -> None:
    bench.client.delete(bench.key + missing)
    bench.open()
    bench.connect()
    assert [entry.group_index for entry in bench.ready(0)] == ["0"]


def test_info_is_none_before_the_run_was_opened(bench: Bench) -> None:
    bench.client.flushall()
    assert bench.queue.info() is None


def test_enqueue_waits_for_capacity_and_room_rings_when_it_comes_free() -> None:
    bench = fake_bench(cap=2)
    assert bench.enqueue(0, 1, 2) == ["new", "new", "full"]
    assert not bench.queue.wait_room(0.01)
    bench.call(calls.withdraw("0"))
    assert bench.queue.wait_room(0.01)
    assert bench.enqueue(2) == ["new"]


def test_enqueue_takes_evaluations_beyond_capacity() -> None:
    bench = fake_bench(cap=1)
    assert bench.enqueue(0, "e:x:0") == ["new", "new"]


def test_enqueue_answers_wait_beyond_the_window_and_done_for_terminal_ids() -> None:
    bench = fake_bench(W=16)
    bench.connect()
    assert bench.enqueue(16, 15) == ["wait", "new"]
    bench.ready(0)
    bench.ack(0, 15)
    assert bench.enqueue(0, 15, 16, 17) == ["done", "done", "new", "wait"]


def test_enqueue_is_refused_by_a_run_that_ends(bench: Bench) -> None:
    bench.call(calls.abort_run())
    assert bench.enqueue(0) == ["aborting"]
    bench.sweep()
    assert bench.enqueue(0) == ["ended"]


def test_deadline_counts_from_the_first_lease_and_ends_every_member(bench: Bench) -> None:
    bench.enqueue(0, n=4, timeout_ms=20_000)
    bench.advance(60_000)
    assert bench.state(0) == "open"
    a, b, c = bench.lease(limit=3)
    bench.complete([a])
    bench.fail(b, Report.RETRY, delay_s=500)
    for _ in range(4):
        bench.advance(5000)
        bench.call(calls.beat("worker", [c.id]))
    (group,) = bench.queue.groups([("0", 4)])
    assert group.state == "full"
    assert group.why == "deadline"
    assert [e and e[0] for e in group.errors] == [None, "deadline", "deadline", "deadline"]
    assert bench.call(calls.beat("worker", [c.id])).lost == [c.id]
    assert bench.complete([c]) == ["fenced"]
    bench.audit()


def test_deadline_passed_in_the_queue_ends_the_member_at_its_lease(bench: Bench) -> None:
    bench.enqueue(0, timeout_ms=3000)
    (a,) = bench.lease(limit=1)
    bench.set_clock(bench.now_ms + 3000)
    assert bench.lease() == []
    assert bench.complete([a]) == ["ok"]
    assert bench.state(0) == "full"
    bench.audit()


def test_deadline_stands_still_while_the_run_is_paused(bench: Bench) -> None:
    bench.enqueue(0, timeout_ms=10_000)
    leases = bench.lease()
    bench.advance(4000)
    bench.call(calls.pause())
    for _ in range(10):
        bench.advance(5000)
        bench.call(calls.beat("worker", [lease.id for lease in leases]))
    bench.call(calls.resume())
    bench.advance(5999)
    assert bench.state(0) == "open"
    bench.advance(1)
    assert bench.state(0) == "full"


def test_deadline_does_not_touch_a_full_or_ready_group(bench: Bench) -> None:
    bench.enqueue(0, timeout_ms=1000)
    bench.complete(bench.lease())
    assert bench.key_names() & {"dl"} == set()
    bench.advance(100_000)
    assert bench.state(0) == "full"


def test_why_is_the_reason_of_the_first_member_that_failed(bench: Bench) -> None:
    bench.enqueue(0)
    a, b = bench.lease()
    bench.fail(a, Report.FINAL, MemberReason.TOOL_ERROR)
    bench.fail(b, Report.FINAL, MemberReason.ENGINE_ERROR)
    assert bench.queue.groups([("0", 2)])[0].why == "tool_error"


def test_verdict_replaces_headers_of_a_group_reward(bench: Bench) -> None:
    entry = bench.full(0)
    bench.call(calls.verdict("0", entry.message_id, headers={0: b"a", 1: b"b"}))
    (group,) = bench.queue.headers([entry])
    assert (group.state, group.headers, group.bodies) == ("ready", [b"a", b"b"], [])
    assert group.ready_unix_s > 0
    assert group.full_unix_s > 0


def test_verdict_of_an_earlier_life_removes_only_its_own_entry(bench: Bench) -> None:
    bench.connect()
    old = bench.full(0)
    bench.call(calls.withdraw("0"))
    bench.call(calls.rewind("trainer", "r", 0, b""))
    new = bench.full(0)
    assert bench.judge(old, DropReason.ZERO_STD) == "noop"
    assert bench.state(0) == "full"
    assert bench.judge(new) == "ready"
    bench.audit()


def test_a_drop_leaves_a_record_with_headers_and_errors_and_nothing_else(bench: Bench) -> None:
    bench.enqueue(0, n=3)
    a, b, c = bench.lease()
    bench.complete([a, b])
    bench.fail(c, Report.FINAL)
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    call = calls.verdict("0", entry.message_id, drop=DropReason.CUSTOM, detail="mine")
    assert bench.call(call) == "dropped"
    (drop,) = bench.queue.past()
    assert drop["group_index"] == "0"
    assert (drop["reason"], drop["detail"], drop["state"]) == ("custom", "mine", "full")
    assert drop["headers"] == [b"header", b"header", None]
    assert drop["errors"] == [None, None, ("engine_error", "it broke")]
    assert bench.key_names() <= RUN_KEYS
    assert bench.counters()["dropped:custom"] == 1
    assert bench.terminal() == {0}


def test_claim_full_takes_over_what_nobody_judged_and_counts(bench: Bench) -> None:
    entry = bench.full(0)
    (again,) = bench.queue.claim_full("other", idle_s=0, count=10)
    assert (again.message_id, again.group_index, again.deliveries) == (
        entry.message_id, "0", 2
    )  # fmt: skip
    bench.judge(again)
    assert bench.queue.claim_full("other", idle_s=0, count=10) == []


def test_claim_full_claims_no_more_than_it_returns(bench: Bench) -> None:
    for gid in range(5):
        bench.full(gid)

    taken = bench.queue.claim_full("other", idle_s=0, count=2)
    rest = bench.queue.claim_full("other", idle_s=0, count=10)

    assert [entry.group_index for entry in taken] == ["0", "1"]
    assert [entry.deliveries for entry in rest] == [3, 3, 2, 2, 2]


def test_keep_full_begins_the_idle_time_anew_and_counts_no_delivery(bench: Bench) -> None:
    entry = bench.full(0)
    key = f"{bench.key}full"
    bench.client.xclaim(key, "aggregators", "aggregator", 0, [entry.message_id], idle=50_000)

    bench.queue.keep_full("other", [entry.message_id, "1-1"])

    assert bench.queue.claim_full("other", idle_s=40, count=10) == []
    (again,) = bench.queue.claim_full("other", idle_s=0, count=10)
    assert again.deliveries == 3  # read, claimed by hand, claimed


def test_deliver_and_fetch_gives_whole_groups_and_none_for_what_is_gone(bench: Bench) -> None:
    bench.connect()
    entries = bench.ready(0, 1, n=3)
    bench.call(calls.withdraw("1"))
    found = bench.queue.deliver_and_fetch("trainer", entries, text=True)
    assert found.answers == ["ok", "gone"]
    group, gone = found.groups
    assert gone is None
    assert group is not None
    assert group.bodies == [b"body"] * 3
    assert group.texts == [b"text"] * 3
    assert group.prompt == b"prompt 0"
    assert bench.state(0) == "delivered"
    assert bench.queue.depths()["delivered"] == 1
    assert bench.queue.depths()["ready"] == 0


def test_deliver_and_fetch_says_taken_to_an_older_trainer(bench: Bench) -> None:
    bench.connect("old", 1)
    entries = bench.ready(0)
    bench.connect("new", 2)
    found = bench.queue.deliver_and_fetch("old", entries)
    assert found.taken
    assert found.groups == []
    assert bench.state(0) == "ready"


def test_pending_ready_pages_through_what_was_not_acked(bench: Bench) -> None:
    bench.connect()
    entries = bench.ready(0, 1, 2)
    bench.ack(1)
    first = bench.queue.pending_ready(count=1)
    assert first == entries[:1]
    assert bench.queue.pending_ready(first[-1].message_id, count=5) == entries[2:]
    assert bench.queue.read_ready(count=5, block_s=0) == []


def test_staleness_evicts_running_groups_but_never_queued_ones() -> None:
    bench = fake_bench(max_stale=1)
    bench.enqueue(0, 1, n=1)
    assert bench.lease(limit=1)[0].group_index == "0"
    bench.call(calls.set_version(1))
    assert bench.sweep().evicted == 0
    bench.call(calls.set_version(2))
    assert bench.sweep().evicted == 1
    assert (bench.state(0), bench.state(1)) == (None, "open")
    assert bench.counters()["dropped:stale"] == 1
    assert [lease.group_index for lease in bench.lease()] == ["1"]
    bench.audit()


def test_a_delivered_group_is_not_evicted_but_judged_when_it_is_handed_out_again() -> None:
    bench = fake_bench(max_stale=0)
    bench.connect()
    bench.ready(0)
    assert bench.deliver(0) == ["ok"]
    bench.call(calls.set_version(1))
    assert bench.sweep().evicted == 0
    assert bench.deliver(0) == ["stale"]
    bench.audit()


@pytest.mark.parametrize("state", ["open", "full", "ready", "delivered"])
def test_ack_ends_a_group_in_any_live_state_and_leaves_no_key(bench: Bench, state: str) -> None:
    bench.connect()
    if state == "open":
        bench.enqueue(0)
        bench.lease(limit=1)
    elif state == "full":
        bench.full(0)
    else:
        bench.ready(0)
        if state == "delivered":
            bench.deliver(0)
    assert bench.state(0) == state
    assert bench.ack(0) == ["acked"]
    assert bench.key_names() <= RUN_KEYS
    assert bench.terminal() == {0}
    assert bench.client.xlen(f"{bench.key}full") == bench.client.xlen(f"{bench.key}ready") == 0
    bench.audit()


def test_ack_of_what_redis_forgot_makes_the_id_terminal_outside_the_identity(bench: Bench) -> None:
    bench.connect()
    assert bench.ack(3) == ["lost"]
    assert bench.terminal() == {3}
    assert bench.counters() == {"reacked": 1}
    assert bench.enqueue(3) == ["done"]
    bench.audit()


def test_every_call_of_an_older_trainer_is_taken_and_does_nothing(bench: Bench) -> None:
    bench.connect("old", 1)
    bench.ready(0)
    bench.connect("new", 2)
    before = bench.dump()
    assert bench.deliver(0, consumer="old") == ["taken"]
    assert bench.ack(0, consumer="old") == ["taken"]
    assert bench.call(calls.retire("old", "0", DropReason.STALE)) == "taken"
    assert bench.call(calls.rewind("old", "r", 5, b"")).taken
    assert bench.dump() == before


def test_connect_with_a_number_that_is_not_higher_tells_who_is_there(bench: Bench) -> None:
    bench.connect("a", 1)
    answer = bench.call(calls.connect("b", 1))
    assert (answer.consumer, answer.connects) == ("a", 1)
    answer = bench.call(calls.connect("b", answer.connects + 1))
    assert (answer.consumer, answer.connects) == ("b", 2)
    answer = bench.call(calls.connect("a", 1))
    assert (answer.consumer, answer.connects) == ("b", 2)


def test_withdraw_is_refused_for_what_the_trainer_holds(bench: Bench) -> None:
    bench.connect()
    bench.ready(0)
    assert bench.call(calls.withdraw("9")) == "gone"
    bench.deliver(0)
    assert bench.call(calls.withdraw("0")) == "held"
    assert bench.ack(0) == ["acked"]


def test_skip_makes_an_id_terminal_within_the_window_only() -> None:
    bench = fake_bench(W=8)
    assert bench.call(calls.skip(8)) == "wait"
    assert bench.call(calls.skip(0)) == "skipped"
    assert bench.call(calls.skip(0)) == "done"
    assert bench.call(calls.skip(8)) == "skipped"
    bench.enqueue(1)
    assert bench.call(calls.skip(1)) == "dropped"
    assert bench.counters()["skipped"] == 2
    bench.audit()


def test_version_and_budgets_are_absolute_and_only_ever_rise_for_the_version(
    bench: Bench,
) -> None:
    assert bench.call(calls.set_version(5)).version == 5
    assert bench.call(calls.set_version(3, "older")).version == 5
    assert bench.queue.info().version_label == ""  # type: ignore[union-attr]  # it is open
    bench.call(calls.set_version(6, "v1.0"))
    assert bench.queue.info().version_label == "v1.0"  # type: ignore[union-attr]  # it is open
    assert bench.call(calls.set_budget("nonsense", 1)).state == "unknown"
    bench.call(calls.set_budget("cap", 1))
    assert bench.enqueue(0, 1) == ["new", "full"]


def test_control_changes_are_read_in_order_from_where_one_stood(bench: Bench) -> None:
    last, _ = bench.queue.read_control("$", block_s=0)
    bench.call(calls.set_version(1))
    bench.call(calls.set_version(1))
    bench.call(calls.pause("abort"))
    last, changes = bench.queue.read_control(last, block_s=0)
    assert changes == [{"op": "version", "arg": "1"}, {"op": "pause", "arg": "abort"}]
    assert bench.queue.read_control(last, block_s=0) == (last, [])


def test_end_of_data_of_an_older_epoch_is_refused(bench: Bench) -> None:
    bench.connect()
    assert bench.call(calls.end_of_data(1)) == "running"
    assert bench.queue.info().done  # type: ignore[union-attr]  # it is open
    bench.call(calls.rewind("trainer", "r", 0, b""))
    assert not bench.queue.info().done  # type: ignore[union-attr]  # it is open
    assert bench.call(calls.end_of_data(1)) == "epoch"
    assert bench.call(calls.end_of_data(2)) == "running"


def test_abort_drops_every_group_whatever_its_state_and_frees_the_ids(bench: Bench) -> None:
    bench.connect()
    bench.ready(0, 1)
    bench.deliver(0)
    bench.full(2)
    bench.enqueue(*range(3, 40))
    leases = bench.lease(limit=5)
    assert bench.call(calls.abort_run("a reason")) == "aborting"
    assert bench.sweep().aborted == 40
    info = bench.queue.info()
    assert info is not None
    assert (info.state, info.error, info.delivered) == ("ended", "a reason", 0)
    assert bench.complete(leases) == ["fenced"] * 5
    assert bench.counters()["dropped:run_aborted"] == 40
    assert bench.terminal() == set()
    assert bench.key_names() <= RUN_KEYS
    bench.audit()


def test_a_failed_run_keeps_its_groups_until_it_is_aborted(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.call(calls.fail_run("no engine")) == "failed"
    bench.sweep()
    assert bench.state(0) == "open"
    assert bench.queue.info().error == "no engine"  # type: ignore[union-attr]  # it is open
    assert bench.call(calls.fail_run("again")) == "failed"
    assert bench.call(calls.abort_run()) == "aborting"
    bench.sweep()
    info = bench.queue.info()
    assert info is not None
    assert (info.state, info.error) == ("ended", "no engine")


def test_processes_are_present_until_they_leave_or_are_silent_for_four_leases(
    bench: Bench,
) -> None:
    bench.call(calls.present("producer", "p"))
    bench.call(calls.present("aggregator", "a"))
    bench.call(calls.beat("w1", []))
    bench.enqueue(0)
    bench.lease("w2")
    assert bench.queue.presence() == {"workers": 2, "producers": 1, "aggregators": 1}
    bench.call(calls.present("worker", "w1", leaving=True))
    bench.advance(59_000)
    bench.call(calls.present("producer", "p"))
    bench.advance(2000)
    assert bench.queue.presence() == {"workers": 0, "producers": 1, "aggregators": 0}
    assert not bench.key_names() & {"wl", "ws", "wa"}
    assert bench.call(calls.present("nobody", "x")).state == "unknown"


def test_audit_sees_what_is_out_of_place(bench: Bench) -> None:
    bench.enqueue(0, 1)
    bench.complete(bench.lease(limit=1))
    for spoil in (
        lambda: bench.client.zadd(f"{bench.key}q", {"0:0": 1}),
        lambda: bench.client.zrem(f"{bench.key}q", "0:1"),
        lambda: bench.client.hdel(f"{bench.key}b:0", "0"),
        lambda: bench.client.hset(f"{bench.key}g:0", "left", 2),
        lambda: bench.client.zadd(f"{bench.key}dl", {"nobody": 1}),
        lambda: bench.client.xadd(f"{bench.key}full", {"g": "0", "n": 2}),
        lambda: bench.client.hincrby(f"{bench.key}c", "enqueued", 1),
        lambda: bench.client.setbit(f"{bench.key}cur", 0, 1),
        lambda: bench.client.delete(f"{bench.key}g:1"),
    ):
        known = bench.call(calls.audit(deep=True)).problems
        spoil()
        found = bench.call(calls.audit(deep=True)).problems
        assert len(found) > len(known), found


def test_completions_of_many_groups_land_in_one_call(bench: Bench) -> None:
    bench.enqueue(*range(16), n=4)
    leases = bench.lease()
    answers = bench.call(calls.complete([Completion(x, b"h", b"b") for x in reversed(leases)]))
    assert sorted(a.left for a in answers if a.left is not None) == sorted([0, 1, 2, 3] * 16)
    assert len(bench.queue.read_full("a", count=100, block_s=0)) == 16


def test_a_verdict_on_an_entry_that_the_group_does_not_name_removes_it_and_nothing_else(
    bench: Bench,
) -> None:
    entry = bench.full(0)
    copy: bytes = bench.client.xadd(f"{bench.key}full", {"g": 0, "n": 2})
    assert bench.call(calls.verdict("0", copy.decode())) == "noop"
    assert [i for i, _ in bench.client.xrange(f"{bench.key}full")] == [entry.message_id.encode()]
    assert bench.judge(entry) == "ready"
    bench.audit()
