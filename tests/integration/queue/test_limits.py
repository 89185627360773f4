"""What only a real server shows: limits of Lua, full memory, flat memory, real concurrency."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from examples.devserver import DevServer
from rollstream.errors import DropReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease, LeaseAnswer
from rollstream.queue.calls import Completion
from rollstream.queue.keys import SCHEMA
from rollstream.queue.queue import Queue
from tests.builders import budgets
from tests.queue_bench import Bench
from tests.unit.queue.test_repeats import CASES


@pytest.fixture
async def queue(valkey_url: str, run_name: str) -> AsyncIterator[Queue]:
    queue = Queue.connect(valkey_url, run_name)
    await queue.call(calls.open_run(SCHEMA, "source", budgets()))
    yield queue
    await queue.aclose()


def leases_of(answer: LeaseAnswer) -> list[Lease]:
    return [member.lease for group in answer.groups for member in group.members]


def lease_all(bench: Bench) -> list[Lease]:
    found: list[Lease] = []
    while more := bench.lease():
        found += more
    return found


# --- many ids in one call ------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1000, 5000])
def test_a_group_of_thousands_goes_all_the_way(bench: Bench, n: int) -> None:
    """Bogdanp/dramatiq#258: "too many results to unpack"."""
    bench.connect()
    assert bench.enqueue(0, n=n, timeout_ms=10**6) == ["new"]
    leases = lease_all(bench)
    assert len(leases) == n
    ids = [lease.id for lease in leases]
    assert bench.call(calls.beat("worker", [*ids, *(f"0:{i}:none" for i in range(n))])).lost == [
        f"0:{i}:none" for i in range(n)
    ]
    assert set(bench.complete(leases[:n])) == {"ok"}
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    assert len(bench.queue.headers([entry])[0].headers) == n
    headers = dict.fromkeys(range(n), b"new")
    assert bench.call(calls.verdict("0", entry.message_id, headers=headers)) == "ready"
    entries = bench.queue.read_ready(count=1, block_s=0)
    found = bench.queue.deliver_and_fetch("trainer", entries, text=True)
    assert found.groups[0] is not None
    assert found.groups[0].bodies == [b"body"] * n
    bench.audit()
    assert bench.ack(0) == ["acked"]


@pytest.mark.parametrize("n", [1000, 5000])
def test_a_group_of_thousands_ends_wherever_its_members_are(bench: Bench, n: int) -> None:
    bench.enqueue(0, 1, n=n, timeout_ms=20_000)
    leases = lease_all(bench)
    for lease in leases[:30]:
        bench.fail(lease, Report.BACK, delay_s=100)
    assert bench.call(calls.withdraw("1")) == "dropped"
    bench.advance(20_001)
    (group,) = bench.queue.groups([("0", n)])
    assert group.state == "full"
    assert Counter(error and error[0] for error in group.errors) == {"deadline": n}
    bench.audit()
    bench.call(calls.abort_run())
    bench.sweep()
    bench.audit()


def test_thousands_of_groups_in_one_deliver_and_one_ack(client: redis.Redis, run_name: str) -> None:
    bench = Bench(client, run_name, cap=10_000)
    bench.connect()
    ids = range(5000)
    bench.queue.call_many([calls.enqueue(gid, 1, b"p") for gid in ids])
    bench.complete(lease_all(bench))
    entries = bench.queue.read_full("a", count=5000, block_s=0)
    bench.queue.call_many([calls.verdict(e.group_index, e.message_id) for e in entries])
    assert set(bench.deliver(*ids)) == {"ok"}
    assert set(bench.ack(*reversed(ids))) == {"acked"}
    assert bench.call(calls.state()).frontier == 5000


def test_every_expired_lease_is_swept_in_bounded_pages(bench: Bench) -> None:
    bench.enqueue(0, n=4000)
    assert len(lease_all(bench)) == 4000
    bench.set_clock(bench.now_ms + 7400)
    bench.sweep()
    bench.set_clock(bench.now_ms + 7400)
    bench.sweep()
    bench.set_clock(bench.now_ms + 7400)
    pages = []
    while not pages or pages[-1].more:
        pages.append(bench.call(calls.sweep()))
    assert max(page.expired for page in pages) == 64
    assert sum(page.expired for page in pages) == 4000
    assert bench.queue.depths()["q"] == 4000


# --- at the same time ----------------------------------------------------------------------------
async def test_the_last_two_members_make_a_group_full_exactly_once(queue: Queue) -> None:
    """rq/rq#1615: parents that finished together left the child behind."""
    rounds = 40
    for gid in range(rounds):
        await queue.call(calls.enqueue(gid, 2, b"p"))
        leases = leases_of(await queue.call(calls.lease("w", gid + 1, 2)))
        answers = await asyncio.gather(
            *(queue.call(calls.complete([Completion(lease, b"h", b"b")])) for lease in leases)
        )
        assert sorted(a.left for (a,) in answers if a.left is not None) == [0, 1]
    entries = await queue.read_full("a", count=1000, block_s=0)
    assert [entry.group_index for entry in entries] == [str(gid) for gid in range(rounds)]


async def test_fifty_workers_get_a_single_sample_once(queue: Queue) -> None:
    """python-arq/arq#196: a unique job ran on several workers."""
    for gid in range(5):
        await queue.call(calls.enqueue(gid, 1, b"p"))
        answers = await asyncio.gather(
            *(queue.call(calls.lease(f"w{j}", gid + 1, 8)) for j in range(50))
        )
        assert sum(len(leases_of(answer)) for answer in answers) == 1


async def test_twenty_sweepers_promote_a_delayed_member_once(queue: Queue) -> None:
    """Bogdanp/dramatiq#431: delayed messages were duplicated."""
    await queue.call(calls.enqueue(0, 64, b"p"))
    for lease in leases_of(await queue.call(calls.lease("w", 1, 64))):
        call = calls.fail(lease, Report.BACK, "shutdown", "", delay_s=0.05)  # type: ignore[arg-type]  # no reason
        assert await queue.call(call) == "back"
    promoted = 0
    while promoted < 64:
        await asyncio.sleep(0.02)
        pages = await asyncio.gather(*(queue.call(calls.sweep(8)) for _ in range(20)))
        promoted += sum(page.promoted for page in pages)
    assert promoted == 64
    assert (await queue.depths())["q"] == 64
    assert (await queue.call(calls.audit(deep=True))).problems == []


# --- memory --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def full_server() -> Iterator[redis.Redis]:
    """A server of its own, whose memory a test can fill."""
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        yield client


@pytest.mark.parametrize("name", CASES)
def test_with_full_memory_only_enqueue_is_refused(full_server: redis.Redis, name: str) -> None:
    full_server.config_set("maxmemory", 0)
    full_server.flushall()
    bench, case = Bench(full_server), CASES[name]
    call = case.prepare(bench)
    full_server.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        full_server.set("x", "y")
    answer = bench.call(call)
    if name == "enqueue":
        assert answer == "full"
        assert "g:3" not in bench.key_names()
    else:
        assert case.first(answer) if callable(case.first) else answer == case.first


def test_with_full_memory_reads_and_waits_go_on(full_server: redis.Redis) -> None:
    full_server.config_set("maxmemory", 0)
    full_server.flushall()
    bench = Bench(full_server)
    bench.connect()
    bench.enqueue(0, 1)
    bench.complete(bench.lease())
    full_server.config_set("maxmemory", 1)
    first = bench.queue.read_full("a", count=1, block_s=0)
    bench.judge(first[0])
    (claimed,) = bench.queue.read_full("a", count=1, block_s=0)
    assert bench.queue.claim_full("b", idle_s=0, count=5)[0].message_id == claimed.message_id
    entries = bench.queue.read_ready(count=1, block_s=0)
    assert bench.queue.deliver_and_fetch("trainer", entries).answers == ["ok"]
    assert bench.queue.pending_ready(count=5) == entries
    assert bench.ack(0) == ["acked"]
    assert bench.queue.wait_room(0.1)
    full_server.config_set("maxmemory", 0)


def test_memory_stays_flat_over_thousands_of_samples(full_server: redis.Redis) -> None:
    """rq/rq#1143, #519: failed hashes and finished sets grew for ever."""
    full_server.config_set("maxmemory", 0)
    full_server.flushall()
    bench = Bench(full_server)
    bench.connect()
    used = []
    for first in range(0, 8000, 2000):
        for start in range(first, first + 2000, 200):
            live_a_generation(bench, range(start, start + 200))
        full_server.slowlog_reset()  # how much it keeps there is the machine's doing
        used.append(int(full_server.info("memory")["used_memory"]))
    assert bench.key_names() == {
        "m", "c", "w", "wl", "cur", "full", "ready", "ctl", "past", "bell", "room"
    }  # fmt: skip
    assert bench.queue.depths()["live"] == 0
    # The record of drops is at its length after the first thousand of them.
    assert used[-1] - used[-2] < 32_000, used


def live_a_generation(bench: Bench, ids: range) -> None:
    """Bring 200 groups to their end: one in ten members fails for good, every other group drops."""
    bench.queue.call_many([calls.enqueue(gid, 1, b"p" * 200) for gid in ids])
    leases = bench.lease()
    bad, good = leases[::10], [lease for j, lease in enumerate(leases) if j % 10]
    for lease in bad:
        bench.fail(lease, Report.FINAL)
    bench.complete(good, b"b" * 400)
    entries = bench.queue.read_full("a", count=500, block_s=0)
    judged = [
        calls.verdict(e.group_index, e.message_id, drop=DropReason.ZERO_STD if j % 2 else None)
        for j, e in enumerate(entries)
    ]
    bench.queue.call_many(judged)
    kept = [int(e.group_index) for e in bench.queue.read_ready(count=500, block_s=0)]
    bench.deliver(*kept)
    bench.ack(*kept)
    bench.sweep()
