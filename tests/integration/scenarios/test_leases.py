"""Leases on a real server: slow starts, late beats, vanished records, repeated and late results."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Completion
from tests.backstage import Backstage, wait_until
from tests.integration.worker.parts import Gate, a_run
from tests.integration.worker.parts import wait_until as wait_in_loop
from tests.queue_bench import Bench


@pytest.fixture
def bench(valkey_url: str, run_name: str) -> Iterator[Bench]:
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        yield Bench(client, run_name)


# --- 2: rq/rq#2061 -------------------------------------------------------------------------------
@pytest.mark.slow
async def test_sweeps_that_race_a_slow_start_never_fail_a_live_lease(
    valkey_url: str, run_name: str
) -> None:
    """Twenty sweepers for three leases, while every member has yet to begin."""
    gate, lease_ms = Gate(), 1_000
    async with a_run(valkey_url, run_name, lease_ms=lease_ms) as run:
        run.worker(generate=gate, slots=32).start()
        for gid in range(8):
            await run.enqueue(gid, 4)
        await wait_in_loop(lambda: len(gate.started) == 32)
        swept, clock = 0, 0
        while clock < 3 * lease_ms:
            pages = await asyncio.gather(*(run.queue.call(calls.sweep()) for _ in range(20)))
            assert not any(page.expired for page in pages)
            swept += len(pages)
            info = await run.queue.info()
            assert info is not None
            clock = info.clock_ms
            await asyncio.sleep(0.01)
        assert swept > 100
        for gid in range(8):
            gate.end(gid, *range(4))
        await run.ready(8)
        assert len(gate.started) == 32
        assert {k: await run.counter(k) for k in ("crashes", "fenced", "completed")} == {
            "crashes": 0, "fenced": 0, "completed": 32,
        }  # fmt: skip


# --- 6: rq/rq#1450 -------------------------------------------------------------------------------
@pytest.mark.parametrize("after", ["completion", "the end of the group", "the end of the run"])
def test_a_beat_that_comes_late_creates_no_key(bench: Bench, after: str) -> None:
    """A late heartbeat made a deleted key anew, without an expiry."""
    bench.connect()
    bench.enqueue(0, n=2)
    leases = bench.lease()
    bench.complete(leases)
    if after == "the end of the group":
        assert bench.ack(0) == ["acked"]
    if after == "the end of the run":
        for key in bench.key_names():
            bench.client.delete(bench.key + key)
    before = bench.key_names()
    answer = bench.call(calls.beat("worker", [lease.id for lease in leases]))
    if after == "the end of the run":
        assert answer.state == "lost"
    else:
        assert answer.lost == [lease.id for lease in leases]
    assert bench.key_names() == before


# --- 15: rq/rq#1955 ------------------------------------------------------------------------------
async def test_a_record_that_vanishes_under_a_lease_fences_its_results_and_stops_nobody(
    valkey_url: str, run_name: str
) -> None:
    """An evicted hash left an id behind that every later call tripped over."""
    gate = Gate()
    async with a_run(valkey_url, run_name) as run:
        parts = run.worker(generate=gate)
        parts.start()
        for gid in range(2):
            await run.enqueue(gid, 2)
        await wait_in_loop(lambda: len(gate.started) == 4)
        await run.queue.client.delete(f"{run.queue.prefix}g:0")
        for gid in range(2):
            gate.end(gid, 0, 1)
        await run.ready(1)
        assert await run.state_of(1, 2) == "ready"
        await wait_in_loop(lambda: parts.shift.num_busy == 0)
        assert await run.counter("completed") == 2
        assert await run.counter("fenced") == 2
        await run.enqueue(2, 2)
        await wait_in_loop(lambda: len(gate.started) == 6)
        gate.end(2, 0, 1)
        await run.ready(2)
        assert parts.working is not None
        assert not parts.working.done()


# --- case 113: PrimeIntellect-ai/verifiers#1565 --------------------------------------------------
def test_a_result_that_comes_twice_and_one_that_comes_late_count_once(run: Backstage) -> None:
    """(group 7, member 2) of attempt 1 twice, then attempt 0: one sample, two refusals, n of n."""
    run.enqueue(7, n=4)
    first = run.lease()
    late = first[2]
    again = calls.fail(late, Report.RETRY, MemberReason.ENGINE_ERROR, "reset")
    assert run.queue.call(again) == "again"
    (retried,) = run.lease()
    assert (retried.member, retried.token != late.token) == (2, True)

    def submit(lease: Lease, body: bytes) -> str:
        (answer,) = run.queue.call(calls.complete([Completion(lease, b"header", body)]))
        return answer.outcome

    assert [submit(retried, b"attempt 1"), submit(retried, b"twice")] == ["ok", "dup"]
    assert submit(late, b"attempt 0") == "fenced"
    (group,) = run.queue.groups([("7", 4)])
    assert (group.state, group.bodies[2]) == ("open", b"attempt 1")
    assert [submit(lease, b"x") for lease in first if lease.member != 2] == ["ok"] * 3
    (group,) = run.queue.groups([("7", 4)])
    assert (group.state, group.bodies) == ("full", [b"x", b"x", b"attempt 1", b"x"])
    counters = run.queue.counters()
    assert (counters["completed"], counters["fenced"]) == (4, 1)


# --- 19: python-arq/arq#196 ----------------------------------------------------------------------
def test_fifty_workers_with_connections_of_their_own_get_one_sample_once(
    run: Backstage, valkey_url: str
) -> None:
    got: list[Lease] = []
    start = threading.Barrier(50)

    def work(number: int) -> None:
        queue = BlockingQueue.connect(valkey_url, run.queue.run)
        queue.info()  # connected
        start.wait(45)
        answer = queue.call(calls.lease(f"{number:012x}", 1, 8))
        got.extend(m.lease for group in answer.groups for m in group.members)
        queue.close()

    run.enqueue(0, n=1)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    run.complete(got)
    assert run.queue.counters()["completed"] == 1
    assert run.queue.counters().get("attempts", 0) == 0


# --- 14: rq/rq#1615 and 31: Bogdanp/dramatiq#431 -------------------------------------------------
def test_members_that_end_on_twenty_connections_at_once_make_each_group_full_once(
    run: Backstage, valkey_url: str
) -> None:
    """Ten rounds in which the last members of eight groups end at the same moment."""
    for _ in range(10):
        first = int(run.queue.counters().get("enqueued", 0))
        ids = range(first, first + 8)
        run.enqueue(*ids, n=20)
        leases = run.lease()
        by_member = [[x for x in leases if x.member == member] for member in range(20)]
        start = threading.Barrier(20)

        def end(mine: list[Lease], start: threading.Barrier = start) -> None:
            queue = BlockingQueue.connect(valkey_url, run.queue.run)
            queue.info()
            start.wait(45)
            for lease in mine:
                queue.call(calls.complete([Completion(lease, b"h", b"b")]))
            queue.close()

        threads = [threading.Thread(target=end, args=(mine,)) for mine in by_member]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        entries = run.queue.read_full("a", count=100, block_s=0)
        assert Counter(int(e.group_index) for e in entries) == Counter(ids)
        for entry in entries:
            drop = calls.verdict(entry.group_index, entry.message_id, drop=DropReason.ZERO_STD)
            assert run.queue.call(drop) == "dropped"


def test_twenty_sweepers_on_connections_of_their_own_promote_each_delayed_member_once(
    run: Backstage, valkey_url: str
) -> None:
    run.enqueue(*range(8), n=32)
    for lease in run.lease():
        back = calls.fail(lease, Report.BACK, MemberReason.NO_ENGINE, "", delay_s=0.2)
        assert run.queue.call(back) == "back"
    promoted: list[int] = []
    done = threading.Event()

    def sweep() -> None:
        queue = BlockingQueue.connect(valkey_url, run.queue.run)
        while not done.is_set():
            promoted.append(queue.call(calls.sweep(8)).promoted)
        queue.close()

    threads = [threading.Thread(target=sweep) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: run.queue.depths()["d"] == 0)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert sum(promoted) == 256
    assert run.queue.depths()["q"] == 256
    leased = Counter((x.group_index, x.member) for x in run.lease())
    assert set(leased.values()) == {1}
    assert len(leased) == 256
    assert run.queue.call(calls.audit(deep=True)).problems == []


# --- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [-1, "", "x", "e: a", "e:a b", "e:a\nb", "e:é", "٣", "1 2", "+1"])
def test_a_group_whose_name_would_break_a_record_is_refused(name: int | str) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        calls.enqueue(name, 1, b"p")


def test_evaluations_run_before_all_training_and_training_by_priority_then_age(
    bench: Bench,
) -> None:
    bench.enqueue(0, n=1, priority=5)
    bench.enqueue(1, 2, n=1)
    bench.enqueue(3, n=1, priority=5)
    bench.enqueue("e:math:1", n=2)
    bench.enqueue(4, n=1)
    order = [bench.lease(limit=1)[0].group_index for _ in range(7)]
    assert order == ["e:math:1", "e:math:1", "1", "2", "4", "0", "3"]


# --- 8: rq/rq#597 --------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_hundred_thousand_expired_leases_are_swept_in_pages_while_others_are_answered(
    valkey_url: str, run_name: str
) -> None:
    """Cleaning up a million entries blocked the worker. (How long a page takes: benchmarks.)"""
    leases = 100_000
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        bench = Bench(client, run_name, cap=leases)
        for first in range(0, leases // 8, 500):
            ids = range(first, first + 500)
            bench.queue.call_many([calls.enqueue(gid, 8, b"p") for gid in ids])
        while bench.lease():
            pass
        assert bench.queue.depths()["l"] == leases
        for _ in range(3):  # a lease, by less than half a lease a call
            bench.set_clock(bench.now_ms + 7_000)
            page = bench.call(calls.sweep())
        expired, num_calls = page.expired, 1
        while page.more:
            page = bench.call(calls.sweep())
            assert page.expired <= 64
            expired, num_calls = expired + page.expired, num_calls + 1
            if num_calls % 100 == 0:  # somebody else's call comes in between
                assert bench.call(calls.beat("another", [])).state == "running"
        assert expired == leases
        assert num_calls <= leases // 64 + 2
        assert bench.queue.depths()["q"] == leases
        assert bench.counters()["crashes"] == leases
