"""Drops in a row: counted by verdicts, ended by one that keeps, and too many fail the run."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.calls import MAX_ERROR_CHARS
from rollstream.queue.keys import PAST_MEMBERS
from tests.queue_bench import Bench, fake_bench

ZERO, SHORT = DropReason.ZERO_STD, DropReason.SHORT_GROUP


@pytest.fixture
def bench() -> Bench:
    return fake_bench(max_drops=3)


def judge(bench: Bench, first: int, *drops: DropReason | None, detail: str = "why") -> None:
    """Judge a new group for each, from index `first` on; None keeps it."""
    for gid, drop in enumerate(drops, first):
        entry = bench.full(gid)
        call = calls.verdict(entry.group_index, entry.message_id, drop=drop, detail=detail)
        assert bench.call(call) == ("ready" if drop is None else "dropped")


def run_of(bench: Bench) -> dict[str, str]:
    found: Any = bench.client.hgetall(f"{bench.key}m")
    return {name.decode(): value.decode() for name, value in found.items()}


def test_as_many_drops_in_a_row_as_are_allowed_fail_the_run_and_it_says_what_for(
    bench: Bench,
) -> None:
    judge(bench, 0, ZERO, SHORT)
    assert (run_of(bench)["state"], run_of(bench)["error"]) == ("running", "")
    heard = run_of(bench)["control_seq"]
    judge(bench, 2, ZERO, detail="std 0 of 8 around 1")
    run = run_of(bench)
    assert run["state"] == "failed"
    assert run["error"].startswith(
        "3 groups in a row were dropped and none kept: zero_std 2, short_group 1; the last was "
        "group 2 (zero_std: std 0 of 8 around 1). Nothing reaches the trainer: "
    )
    assert "aggregator.stop_after_dropped_batches" in run["error"]
    assert int(run["control_seq"]) == int(heard) + 1
    assert bench.call(calls.lease("other", 1, 8)).state == "failed"
    bench.audit()


def test_a_group_that_is_kept_ends_the_row(bench: Bench) -> None:
    judge(bench, 0, ZERO, ZERO, None, ZERO, ZERO, None, ZERO, SHORT)
    run = run_of(bench)
    assert (run["state"], run["streak"]) == ("running", "zero_std=1 short_group=1")


def test_a_verdict_that_changes_nothing_neither_counts_nor_ends_the_row(bench: Bench) -> None:
    entry = bench.full(0)
    drop = calls.verdict("0", entry.message_id, drop=ZERO)
    keep = calls.verdict("0", entry.message_id)
    assert [bench.call(call) for call in (drop, drop, drop, keep)] == [
        "dropped", "noop", "noop", "noop",
    ]  # fmt: skip
    assert run_of(bench)["streak"] == "zero_std=1"


def test_what_ends_a_group_elsewhere_is_no_part_of_the_row(bench: Bench) -> None:
    judge(bench, 0, ZERO, ZERO)
    bench.full(2)
    bench.enqueue(3)
    for gid in "23":
        assert bench.call(calls.withdraw(gid)) == "dropped"
    assert (run_of(bench)["state"], run_of(bench)["streak"]) == ("running", "zero_std=2")


def test_drops_without_a_limit_are_counted_and_fail_nothing() -> None:
    bench = fake_bench()
    judge(bench, 0, *[ZERO] * 30)
    assert (run_of(bench)["state"], run_of(bench)["streak"]) == ("running", "zero_std=30")
    bench.call(calls.set_budget("max_drops", 5))
    judge(bench, 30, ZERO)
    assert "31 groups in a row" in run_of(bench)["error"]


def test_a_paused_run_fails_too_and_one_that_is_over_keeps_its_own_reason(bench: Bench) -> None:
    entries = [bench.full(gid) for gid in range(8)]
    bench.call(calls.pause())

    def drop() -> None:
        entry = entries.pop()
        bench.call(calls.verdict(entry.group_index, entry.message_id, drop=ZERO))

    for _ in range(3):
        drop()
    said = run_of(bench)
    assert said["state"] == "failed"
    drop()
    assert (run_of(bench)["error"], run_of(bench)["control_seq"]) == (
        said["error"], said["control_seq"],
    )  # fmt: skip
    bench.call(calls.abort_run("enough"))
    drop()
    assert (run_of(bench)["state"], run_of(bench)["error"]) == ("aborting", "enough")


def test_a_drop_of_any_detail_is_told_bounded_and_its_record_has_the_new_headers(
    bench: Bench,
) -> None:
    entry = bench.full(0, n=PAST_MEMBERS + 1)
    headers = {i: b"new %d" % i for i in range(PAST_MEMBERS + 1)}
    call = calls.verdict("0", entry.message_id, drop=ZERO, detail="\ud800x" * 5000, headers=headers)
    assert len(call.args) == 5 + 2 * PAST_MEMBERS
    assert bench.call(call) == "dropped"
    ((_, record),) = bench.client.xrange(f"{bench.key}past")
    assert record[b"detail"] == b"?x" * (MAX_ERROR_CHARS // 2)
    assert [record[b"h%d" % i] for i in range(PAST_MEMBERS)] == list(headers.values())[:-1]
