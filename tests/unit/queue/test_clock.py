"""The queue clock: it moves with sweeps only, and no outage or jump expires anything."""

from __future__ import annotations

import pytest

from rollstream.queue import calls
from tests.queue_bench import Bench


def test_clock_moves_only_with_sweeps_and_by_half_a_lease_at_most(bench: Bench) -> None:
    before = int(bench.m("clock"))
    bench.enqueue(0)
    bench.set_clock(bench.now_ms + 1000)
    bench.lease()
    bench.call(calls.beat("worker", []))
    assert int(bench.m("clock")) == before
    bench.sweep()
    assert int(bench.m("clock")) == before + 1000
    bench.set_clock(bench.now_ms + 3_600_000)
    bench.sweep()
    assert int(bench.m("clock")) == before + 1000 + 7500


@pytest.mark.parametrize("jump_ms", [7_501, 60_000, 10**9, -1, -(10**9)])
def test_nothing_expires_for_one_lease_after_an_outage_or_a_jump(
    bench: Bench, jump_ms: int
) -> None:
    bench.enqueue(0)
    leases = bench.lease()
    bench.advance(7_500)
    bench.set_clock(bench.now_ms + jump_ms)
    swept = bench.sweep()
    assert (swept.expired, swept.grace) == (0, True)
    bench.advance(14_999)
    assert bench.where(0, 0) == "l"
    assert bench.call(calls.beat("worker", [x.id for x in leases])).lost == []
    bench.advance(15_001)
    assert bench.where(0, 0) == "q"
    assert bench.counters()["crashes"] == 2


def test_a_worker_that_never_comes_back_after_the_outage_expires_in_the_end(bench: Bench) -> None:
    bench.enqueue(0)
    bench.lease()
    bench.set_clock(bench.now_ms + 10**7)
    bench.sweep()
    bench.advance(15_001)
    assert bench.where(0, 0) == "q"


def test_sweep_does_bounded_pages_and_says_that_there_is_more(bench: Bench) -> None:
    bench.enqueue(0, n=200)
    assert len(bench.lease("w")) == 200
    bench.set_clock(bench.now_ms + 7400)
    bench.sweep()
    bench.set_clock(bench.now_ms + 7400)
    bench.sweep()
    bench.set_clock(bench.now_ms + 7400)
    pages = [bench.call(calls.sweep(64)) for _ in range(4)]
    assert [(page.expired, page.more) for page in pages] == [
        (64, True), (64, True), (64, True), (8, False)
    ]  # fmt: skip


def test_sweep_of_no_run_says_lost_and_creates_nothing(bench: Bench) -> None:
    bench.client.flushall()
    bench.set_clock(bench.now_ms)
    assert bench.call(calls.sweep()).lost
    assert bench.key_names() == set()
