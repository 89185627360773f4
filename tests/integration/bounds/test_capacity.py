"""Back-pressure: capacity comes back with every kind of end, and until then the producer waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from rollstream.async_stream import AsyncGroupStream
from rollstream.errors import CapacityTooSmall, DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Parts, wait_until
from tests.queue_bench import Bench, pack_ids

# --- every kind of end ---------------------------------------------------------------------------
LEASE_MS = 4000


def acked(bench: Bench) -> None:
    bench.ready(0)
    bench.deliver(0)
    assert bench.ack(0) == ["acked"]


def acked_while_open(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.ack(0) == ["acked"]


def judged(reason: DropReason) -> Callable[[Bench], None]:
    def end(bench: Bench) -> None:
        assert bench.judge(bench.full(0), reason) == "dropped"

    return end


def short(report: Report, reason: MemberReason, drop: DropReason) -> Callable[[Bench], None]:
    """A member that failed for good, and the aggregator's verdict on what is left."""

    def end(bench: Bench) -> None:
        bench.enqueue(0)
        first, second = bench.lease()
        bench.fail(first, report, reason)
        bench.complete([second])
        (entry,) = bench.queue.read_full("a", count=1, block_s=0)
        assert bench.judge(entry, drop) == "dropped"

    return end


def too_large(bench: Bench) -> None:
    bench.call(calls.set_budget("max_body", 10))
    bench.enqueue(0)
    assert bench.complete(bench.lease(), b"x" * 100) == ["too_large", "too_large"]
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    assert bench.queue.headers([entry])[0].why == "too_large"
    bench.judge(entry, DropReason.TOO_LARGE)


def deadline(bench: Bench) -> None:
    bench.enqueue(0, timeout_ms=100)
    bench.lease()
    bench.advance(101)
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    bench.judge(entry, DropReason.DEADLINE)


def poison(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    while bench.lease():
        bench.advance(LEASE_MS + 1)
    (entry,) = bench.queue.read_full("a", count=1, block_s=0)
    assert bench.queue.headers([entry])[0].why == "crashed"
    bench.judge(entry, DropReason.SHORT_GROUP)


def withdrawn(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.call(calls.withdraw("0")) == "dropped"


def skipped(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.call(calls.skip(0)) == "dropped"


def retired(bench: Bench) -> None:
    bench.ready(0)
    bench.deliver(0)
    assert bench.call(calls.retire("trainer", "0", DropReason.STALE)) == "dropped"


def evicted(bench: Bench) -> None:
    bench.call(calls.set_budget("max_stale", 0))
    bench.enqueue(0)
    bench.lease()
    bench.call(calls.set_version(5))
    assert bench.sweep().evicted == 1


def evicted_for_the_last_time(bench: Bench) -> None:
    bench.call(calls.set_budget("on_stale", "requeue"))
    bench.call(calls.set_budget("max_stale", 0))
    bench.enqueue(0)
    for version in (1, 2):
        assert bench.lease(f"w{version}")
        bench.call(calls.set_version(version))
        assert bench.enqueue(1) == ["full"], "a group that begins anew keeps its place"
        assert bench.sweep().evicted == 1


def stale_at_the_door(bench: Bench) -> None:
    bench.ready(0)
    bench.call(calls.set_budget("max_stale", 0))
    bench.call(calls.set_version(5))
    assert bench.deliver(0) == ["stale"]


def seen(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.call(calls.rewind("trainer", "r", 0, pack_ids(0, {0}))).seen == 1


def beyond(bench: Bench) -> None:
    bench.ready(5)
    bench.call(calls.set_budget("W", 3))
    assert bench.call(calls.rewind("trainer", "r", 0, b"")).beyond == 1


def dangling(bench: Bench) -> None:
    bench.enqueue(0)
    bench.lease()
    bench.client.delete(f"{bench.key}g:0")
    for _ in range(20):
        bench.advance(LEASE_MS)
        if not bench.queue.depths()["live"]:
            return
    raise AssertionError("a group without a record stays live")


ENDS: dict[str, Callable[[Bench], None]] = {
    "ack": acked,
    "ack of an open group": acked_while_open,
    **{str(reason): judged(reason) for reason in DropReason},
    "too_large, by its members": too_large,
    "short group": short(Report.FINAL, MemberReason.ENGINE_ERROR, DropReason.SHORT_GROUP),
    "filter_error": short(Report.FINAL, MemberReason.REWARD_ERROR, DropReason.FILTER_ERROR),
    "deadline, by its members": deadline,
    "poison": poison,
    "withdraw": withdrawn,
    "skip": skipped,
    "retire": retired,
    "evicted": evicted,
    "stale again, and begun anew as often as it may": evicted_for_the_last_time,
    "stale when handed out": stale_at_the_door,
    "seen in a checkpoint": seen,
    "beyond the window": beyond,
    "dangling": dangling,
}


@pytest.mark.parametrize("name", ENDS)
def test_capacity_comes_back_with_every_kind_of_end(
    valkey_url: str, run_name: str, name: str
) -> None:
    bench = Bench(redis.Redis.from_url(valkey_url, protocol=2), run_name, cap=1, lease_ms=LEASE_MS)
    bench.connect()
    bench.client.delete(f"{bench.key}room")
    ENDS[name](bench)
    assert bench.queue.depths() == {
        "q": 0, "d": 0, "s": 0, "l": 0, "full": 0, "ready": 0, "live": 0, "delivered": 0,
        "eval": 0, "evaluations": 0,
    }  # fmt: skip
    assert bench.queue.wait_room(0.5), "nobody woke the producer"
    assert bench.enqueue(1, 2) == ["new", "full"]
    bench.audit()
    counters = bench.counters()
    ended = counters.get("acked", 0) + sum(
        count for key, count in counters.items() if key.startswith("dropped:")
    )
    assert ended == 1


def test_capacity_comes_back_with_the_end_of_an_aborted_run(valkey_url: str, run_name: str) -> None:
    bench = Bench(redis.Redis.from_url(valkey_url, protocol=2), run_name, cap=40)
    bench.enqueue(*range(40))
    bench.lease()
    bench.call(calls.abort_run())
    bench.sweep()
    assert bench.queue.depths()["live"] == 0
    assert bench.counters()["dropped:run_aborted"] == 40
    assert bench.m("state") == "ended"


# --- a trainer that stops ------------------------------------------------------------------------
@pytest.mark.slow
async def test_trainer_that_stops_acking_stops_the_producer_within_one_capacity(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    capacity, rows = 8, 40
    path = rows_file(tmp_path, rows)
    settings = settings_of(
        valkey_url, run_name, path, f"--producer.capacity_groups={capacity}",
        "--worker.lease_s=0.5", "--reward.kind=none",
    )  # fmt: skip
    queue = Queue.connect(valkey_url, run_name)

    async def counts() -> tuple[int, int]:
        counters, depths = await queue.counters(), await queue.depths()
        assert depths["live"] <= capacity
        return counters.get("enqueued", 0), counters.get("acked", 0)

    async with producing(settings) as producer:
        parts = Parts(queue, filters=[])
        parts.start()
        async with await AsyncGroupStream.connect(valkey_url, run=run_name) as stream:
            batches = [await stream.next_batch(4, 10) for _ in range(2)]
            # Everything that may be live is in the trainer's hands, and it does not ack.
            with pytest.raises(CapacityTooSmall, match="capacity is 8 and 8 are live"):
                await stream.next_batch(4, 10)
            tried = len(producer.queue.trips)
            await wait_until(lambda: len(producer.queue.trips) >= tried + 5, what="five more tries")
            assert await counts() == (capacity, 0)
            assert batches[0] is not None
            await stream.ack(batches[0])
            await wait_until(lambda: _is(counts, (capacity + 4, 4)), what="the producer goes on")
            assert batches[1] is not None
            await stream.ack(batches[1])
            seen = [g for batch in batches if batch for g in batch.group_indexes]
            async for batch in stream.batches(groups=4, timeout_s=45):
                seen += batch.group_indexes
                await stream.ack(batch)
                await counts()
            assert sorted(seen) == list(range(rows))
        await parts.stop()
    assert await counts() == (rows, rows)
    await queue.aclose()


async def _is(ask: Callable[[], object], wanted: object) -> bool:
    found = await ask()  # type: ignore[misc]  # a coroutine
    return bool(found == wanted)


# --- configurations that can never fill ----------------------------------------------------------
def test_batches_larger_than_the_capacity_are_refused_before_the_first_wait(
    valkey_url: str, run_name: str
) -> None:
    with (
        Backstage(valkey_url, run_name, cap=8) as run,
        GroupStream.connect(valkey_url, run=run.open().queue.run) as stream,
    ):
        with pytest.raises(CapacityTooSmall) as error:
            stream.batches(groups=9)
        assert (error.value.groups, error.value.capacity, error.value.live) == (9, 8, 0)
        run.finish(*range(8))
        batch = next(stream.batches(groups=8, timeout_s=5))
        assert len(batch.group_indexes) == 8


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_unacked_batches_and_a_buffer_that_hold_all_capacity_are_refused(
    valkey_url: str, run_name: str, groups: int
) -> None:
    """Four are handed out, four wait in the buffer at most: five or more can never come."""
    with Backstage(valkey_url, run_name, cap=8, lease_ms=500) as run:
        run.open().finish(*range(8))
        with GroupStream.connect(valkey_url, run=run_name) as stream:
            first = stream.next_batch(4, 5)
            assert first is not None
            for _ in range(4 // groups):
                batch = stream.next_batch(groups, 5)
                assert batch is not None
                assert len(batch.group_indexes) == groups
            with pytest.raises(CapacityTooSmall) as error:
                stream.next_batch(groups, 5)
            assert (error.value.groups, error.value.capacity, error.value.live) == (groups, 8, 8)
            first.ack()
            run.finish(*range(8, 8 + 4))
            after = stream.next_batch(groups, 5)
            assert after is not None
            assert len(after.group_indexes) == groups


async def test_cancelled_wait_gives_its_groups_and_their_capacity_back(
    valkey_url: str, run_name: str
) -> None:
    with Backstage(valkey_url, run_name, cap=4) as run:
        run.open().finish(0, 1)
        async with await AsyncGroupStream.connect(valkey_url, run=run_name) as stream:
            waiting = asyncio.create_task(stream.next_batch(4, 10))
            await wait_until(lambda: run.queue.depths()["delivered"] == 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            batch = await stream.next_batch(2, 10)
            assert batch is not None
            await stream.ack(batch)
            assert run.enqueue(2, 3, 4, 5, 6) == ["new"] * 4 + ["full"]
