"""What grows with groups or members is done a page a call, and nothing of it is forgotten."""

from __future__ import annotations

from collections import Counter

import pytest
import redis

from rollstream.queue import calls
from rollstream.queue.answers import Lease, RewindAnswer
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.queue_bench import Bench, pack_ids

PAGE = 64
CHUNK = 512


@pytest.fixture
def bench(valkey_url: str, run_name: str) -> Bench:
    client = redis.Redis.from_url(valkey_url, protocol=2)
    return Bench(client, run_name, cap=10_000, lease_ms=10_000)


def lease_all(bench: Bench) -> list[Lease]:
    found: list[Lease] = []
    while more := bench.lease():
        found += more
    return found


# --- a rewind ------------------------------------------------------------------------------------
def rewound(
    bench: Bench, *, live: int, seen: int
) -> tuple[RewindAnswer, calls.ScriptCall[RewindAnswer]]:
    """Rewind a run of `live` groups to a checkpoint that counts the first `seen` as ended."""
    bench.connect()
    bench.queue.call_many([calls.enqueue(gid, 1, b"p") for gid in range(live)])
    call = calls.rewind("trainer", "r1", 0, pack_ids(0, set(range(seen))))
    return bench.call(call), call


@pytest.mark.parametrize("live", [600, 2000])  # a set of integers below 513, and above
def test_rewind_drops_at_most_a_page_of_groups_a_call(bench: Bench, live: int) -> None:
    answer, call = rewound(bench, live=live, seen=300)
    assert (answer.frontier, answer.epoch, answer.seen) == (300, 2, PAGE)
    pages = [answer]
    while pages[-1].more:
        bench.audit()
        pages.append(bench.call(call))
    assert sum(page.seen for page in pages) == 300
    assert max(page.seen for page in pages) <= PAGE
    assert {page.epoch for page in pages} == {2}
    assert bench.counters()["dropped:seen"] == 300
    bench.audit()
    assert bench.queue.depths()["live"] == live - 300
    again = bench.call(call)
    assert (again.seen, again.more, again.epoch) == (0, False, 2)


def test_rewind_bounds_the_members_of_the_groups_that_it_drops(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(*range(6), n=400)
    call = calls.rewind("trainer", "r1", 0, pack_ids(0, set(range(6))))
    assert [bench.call(call).seen for _ in range(4)] == [2, 2, 2, 0]
    bench.audit()


def test_sweep_ends_a_rewind_whose_trainer_died(bench: Bench) -> None:
    answer, _ = rewound(bench, live=200, seen=200)
    assert answer.more
    bench.sweep()
    assert bench.counters()["dropped:seen"] == 200
    bench.audit()
    assert "rewinding" not in {name.decode() for name in bench.client.hkeys(f"{bench.key}m")}


def test_another_rewind_begins_its_pages_anew(bench: Bench) -> None:
    answer, _ = rewound(bench, live=300, seen=300)
    assert answer.more
    other = calls.rewind("trainer", "r2", 0, pack_ids(0, set(range(250, 300))))
    while bench.call(other).more:
        pass
    # What neither checkpoint counts stays live, but for what the first had dropped by then.
    dropped = bench.counters()["dropped:seen"]
    assert PAGE + 50 - 1 <= dropped <= PAGE + 50
    assert bench.terminal() == set(range(250, 300))
    bench.audit()


def test_trainer_that_rewinds_far_waits_for_every_page(valkey_url: str, run_name: str) -> None:
    with Backstage(valkey_url, run_name, cap=1000) as run:
        run.open()
        run.finish(*range(300), n=1)
        with GroupStream.connect(valkey_url, run=run_name) as first:
            batch = first.next_batch(200, 10)
            assert batch is not None
            batch.ack()
            state = first.state_dict()
        run.queue.call(calls.connect("other", 1 << 50))
        run.queue.call(calls.rewind("other", "r", 0, b""))  # all of it comes again
        assert set(run.enqueue(*range(200), n=1)) == {"new"}
        with GroupStream.connect(valkey_url, run=run_name, state=state) as second:
            assert run.queue.counters()["dropped:seen"] == 200
            rest = second.next_batch(100, 10)
            assert rest is not None
            assert sorted(rest.group_indexes) == list(range(200, 300))


# --- deadlines, staleness, aborts ----------------------------------------------------------------
def test_deadline_of_a_large_group_ends_some_hundred_members_a_call(bench: Bench) -> None:
    n = 3000
    bench.enqueue(0, n=n, timeout_ms=4000)
    leases = lease_all(bench)
    bench.complete(leases[:100])
    bench.fail(leases[100], delay_s=1000)
    bench.set_clock(bench.now_ms + 4001)
    ended, pages = 100, 0
    while bench.state(0) == "open":
        page = bench.call(calls.sweep())
        pages += 1
        left = int(bench.client.hget(f"{bench.key}g:0", "left"))  # type: ignore[arg-type]  # bytes
        assert n - left - ended <= 2 * CHUNK
        ended = n - left
        assert page.deadlines == (0 if left else 1)
        assert page.more == bool(left)
        bench.audit()
    assert pages >= 4
    (group,) = bench.queue.groups([("0", n)])
    assert Counter(error and error[0] for error in group.errors) == {"deadline": n - 100, None: 100}
    assert bench.counters()["member_failed:deadline"] == n - 100
    assert bench.queue.depths() | {"full": 1} == {
        "q": 0, "d": 0, "s": 0, "l": 0, "full": 1, "ready": 0, "eval": 0, "live": 1,
        "delivered": 0, "evaluations": 0,
    }  # fmt: skip


def test_abort_and_eviction_bound_the_members_a_call(bench: Bench) -> None:
    bench.call(calls.set_budget("max_stale", 0))
    bench.enqueue(*range(10), n=1024)
    lease_all(bench)
    bench.call(calls.set_version(1))
    first = bench.call(calls.sweep())
    assert (first.evicted, first.more) == (1, True)
    bench.call(calls.abort_run())
    page = bench.call(calls.sweep())
    assert page.evicted + page.aborted <= 2
    bench.sweep()
    assert bench.m("state") == "ended"
    bench.audit()


# --- expired leases ------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [8, 1000])
def test_sweep_of_many_expired_leases_takes_a_page_a_call(bench: Bench, n: int) -> None:
    num_leases = 8000
    bench.queue.call_many([calls.enqueue(gid, n, b"p") for gid in range(num_leases // n)])
    assert len(lease_all(bench)) == num_leases
    bench.client.zunionstore(f"{bench.key}l", {f"{bench.key}l": 0})
    pages = []
    while not pages or pages[-1].more:
        pages.append(bench.call(calls.sweep()))
    assert sum(page.expired for page in pages) == num_leases
    assert max(page.expired for page in pages) == PAGE
    assert len(pages) == num_leases // PAGE + 1
    assert bench.queue.depths()["q"] == num_leases
    bench.audit()
