"""Groups of thousands in every call, results of any size: bounded, and refused by their name."""

from __future__ import annotations

import random

import pytest
import redis

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.keys import PAST_MEMBERS
from rollstream.stream import GroupStream
from tests.integration.bounds.meter import Meter
from tests.integration.worker.parts import a_run, wait_until
from tests.queue_bench import Bench
from tests.unit.worker.works import answer
from worker.types import GenerateInput, GenerateOutput

SIZES = [1024, 4096]


@pytest.fixture
def bench(valkey_url: str, run_name: str) -> Bench:
    bench = Bench(redis.Redis.from_url(valkey_url, protocol=2), run_name, max_requeues=5)
    bench.connect()
    return bench


def lease_all(bench: Bench) -> list[Lease]:
    found: list[Lease] = []
    while more := bench.lease():
        found += more
    return found


def spread(bench: Bench, leases: list[Lease]) -> None:
    """Bring the members of a group everywhere that a member can be."""
    rng = random.Random(3)
    parked, failed, delayed, given_back, done, leased = (leases[j::6] for j in range(6))
    del leased
    bench.queue.call_many([calls.park(lease, b"half" * 10) for lease in parked])
    for lease in failed:
        bench.fail(lease, Report.FINAL, rng.choice(list(MemberReason)))
    for lease in delayed:
        bench.fail(lease, Report.RETRY, delay_s=1000)
    for lease in given_back:
        bench.fail(lease, Report.BACK)
    for start in range(0, len(done), 128):
        bench.complete(done[start : start + 128])


@pytest.mark.parametrize("n", SIZES)
def test_group_of_thousands_is_requeued_from_wherever_its_members_are(bench: Bench, n: int) -> None:
    assert bench.enqueue(0, n=n) == ["new"]
    spread(bench, lease_all(bench))
    bench.audit()
    assert bench.call(calls.requeue("0", 0)) == "requeued"
    bench.audit()
    assert bench.queue.depths() == {
        "q": n, "d": 0, "s": 0, "l": 0, "full": 0, "ready": 0, "eval": 0, "live": 1,
        "delivered": 0, "evaluations": 0,
    }  # fmt: skip
    leases = lease_all(bench)
    assert len(leases) == n
    for start in range(0, n, 128):
        assert set(bench.complete(leases[start : start + 128])) == {"ok"}
    (entry,) = bench.queue.read_full("a", count=2, block_s=0)
    assert entry.num_bytes == n * len(b"bodytext")
    assert bench.call(calls.requeue("0", 1)) == "requeued"
    assert bench.judge(entry) == "noop"
    bench.audit()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("how", ["withdraw", "ack", "abort", "seen"])
def test_group_of_thousands_ends_from_wherever_its_members_are(
    bench: Bench, n: int, how: str
) -> None:
    bench.enqueue(0, n=n)
    spread(bench, lease_all(bench))
    if how == "withdraw":
        assert bench.call(calls.withdraw("0")) == "dropped"
    elif how == "ack":
        assert bench.ack(0) == ["acked"]
    elif how == "abort":
        bench.call(calls.abort_run())
        bench.sweep()
    else:
        assert bench.call(calls.rewind("trainer", "r", 1, b"")).seen == 1
    assert not any(bench.queue.depths().values())
    assert not {name for name in bench.key_names() if name[:2] in ("g:", "b:")}
    bench.audit()


@pytest.mark.parametrize("n", SIZES)
def test_group_of_thousands_goes_to_the_trainer_and_is_acked(bench: Bench, n: int) -> None:
    bench.enqueue(0, n=n)
    leases = lease_all(bench)
    bench.fail(leases[0], Report.FINAL)
    for start in range(1, n, 128):
        bench.complete(leases[start : start + 128])
    (entry,) = bench.queue.read_full("a", count=2, block_s=0)
    assert bench.judge(entry) == "ready"
    found = bench.queue.deliver_and_fetch("trainer", bench.queue.read_ready(count=1, block_s=0))
    assert found.answers == ["ok"]
    assert found.groups[0] is not None
    failed = leases[0].member
    assert [i for i, body in enumerate(found.groups[0].bodies) if body is None] == [failed]
    assert bench.ack(0) == ["acked"]
    bench.audit()


def test_drop_of_a_large_group_keeps_a_short_record(bench: Bench) -> None:
    bench.enqueue(0, n=2000)
    for lease in lease_all(bench):
        bench.fail(lease, Report.FINAL)
    (entry,) = bench.queue.read_full("a", count=2, block_s=0)
    bench.judge(entry, DropReason.SHORT_GROUP)
    (drop,) = bench.queue.past()
    assert drop["n"] == 2000
    assert 8 < len(drop["errors"]) <= PAST_MEMBERS
    assert bench.client.memory_usage(f"{bench.key}past", samples=0) < 20_000


# --- results that are too large ------------------------------------------------------------------
async def test_result_over_the_limit_never_reaches_redis_and_its_group_says_why(
    valkey_url: str, run_name: str
) -> None:
    limit = 4096
    port = int(valkey_url.rpartition(":")[2])

    async def generate(given: GenerateInput) -> GenerateOutput:
        is_large = given.sample.group_index == 0 and given.sample.member == 1
        ids = tuple(range(5, 5 + (3000 if is_large else 20)))
        return GenerateOutput(answer(given, reward=float(given.sample.member), ids=ids))

    with Meter(port) as meter:
        async with a_run(meter.url, run_name, max_body=limit, cap=2) as run:
            await run.enqueue(0, 2)
            await run.enqueue(1, 2)
            parts = run.worker(generate=generate, slots=4)
            info = await run.queue.info()
            assert info is not None
            parts.view.opened(info)  # as the app does before its first lease
            parts.start()
            await wait_until(lambda: run.counter("dropped:too_large"))
            await run.ready(1)
            (drop,) = await run.queue.past()
            assert (drop["group_index"], drop["reason"], drop["why"]) == (
                "0", "too_large", "too_large"
            )  # fmt: skip
            assert f"worker.max_body_bytes is {limit}" in drop["errors"][1][1]
            await run.enqueue(2, 2)  # its capacity came back
            await run.ready(2)
            await run.audit()
        largest = max(len(trip.asked) for trip in meter.trips if b"EVALSHA" in trip.asked)
        assert largest < 3 * limit
    with GroupStream.connect(valkey_url, run=run_name) as stream:
        batch = stream.next_batch(2, 5)
        assert batch is not None
        assert batch.group_indexes == [1, 2]


def test_drop_keeps_what_befell_every_member_of_a_usual_group_and_says_where_it_was_cut(
    bench: Bench,
) -> None:
    for group_index, (text, n) in enumerate((("it broke", 64), ("x" * 2000, 200))):
        bench.enqueue(group_index, n=n)
        for lease in lease_all(bench):
            bench.call(calls.fail(lease, Report.FINAL, MemberReason.ENGINE_ERROR, text))
        (entry,) = bench.queue.read_full("a", count=2, block_s=0)
        bench.judge(entry, DropReason.SHORT_GROUP)
    long, usual = bench.queue.past()
    assert usual["errors"] == [("engine_error", "it broke")] * 64
    assert None not in long["errors"], "members that were cut off are not told as unfinished"
    texts = [len(error[1]) for error in long["errors"] if error]
    assert texts[0] == 2000
    assert 8 <= len(texts) < 64
    assert sum(texts) <= 16_384
