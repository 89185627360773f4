"""Groups over the death of whoever works on them, on a real server with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer
from rollstream.errors import DropReason, EngineFault, ProducerGone
from rollstream.group import FinishedGroup
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.integration.producer.scene import rows_file
from tests.integration.producer.test_process import started
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.integration.worker.processes import Sim, workers
from tests.unit.worker.works import answer, plain
from worker.aggregate.aggregator import CONSUMER
from worker.types import GenerateInput, GenerateOutput

USER = [{"role": "user", "content": "What is 1+7?"}]


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary)
    engine.start()
    yield engine
    engine.kill()


def train(url: str, run: str, groups: int, *, batches: int | None = None) -> list[FinishedGroup]:
    """Train until the run is over, or for so many batches."""
    found: list[FinishedGroup] = []
    with GroupStream.connect(url, run=run, connect_timeout_s=5) as stream:
        while (batch := stream.next_batch(groups, 40)) is not None:
            found += batch.groups
            batch.ack()
            if batches is not None and (batches := batches - 1) == 0:
                break
    return found


# --- case 111: radixark/miles#2254 ---------------------------------------------------------------
WAITING = """
import asyncio
from worker.generate import single_turn

async def generate(given):
    if given.sample.member >= 2:
        await asyncio.sleep(60)
    return await single_turn(given)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_case_111_a_group_whose_worker_is_killed_half_way_arrives_whole_and_once(
    valkey_url: str, run_name: str, sim: Sim, vocabulary: Path, tmp_path: Path
) -> None:
    """Group 42, n = 4: kill -9 after two of its samples landed."""
    function = tmp_path / "half.py"
    function.write_text(WAITING)
    options = {
        "redis.url": valkey_url, "run.name": run_name, "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url, "worker.generate": f"{function}:generate",
        "aggregator.filters": "no_aborted", "sampling.max_new_tokens": "16",
    }  # fmt: skip
    async with a_run(valkey_url, run_name, lease_ms=1_000) as run:
        await run.enqueue(42, 4, prompt=USER, label="8")

        async def left() -> int:
            return int(await run.queue.client.hget(f"{run.queue.prefix}g:42", "left") or 0)

        async def half() -> bool:
            return await left() == 2

        with workers(tmp_path, 1, options) as (first,):
            await wait_until(half, timeout_s=40)
            first.process.send_signal(signal.SIGKILL)
        (before,) = await run.queue.groups([("42", 4)])
        run.worker().start()
        (group,) = await asyncio.to_thread(train, valkey_url, run_name, 1, batches=1)

        samples: list[Any] = group.samples
        assert group.group_index == 42
        assert [sample.member for sample in samples] == [0, 1, 2, 3]
        assert group.missing == []
        # What had landed was not generated again.
        assert [body is not None for body in before.bodies] == [True, True, False, False]
        assert (await run.counter("completed"), await run.counter("crashes")) == (4, 2)
        assert (await run.counter("enqueued"), await run.counter("acked")) == (1, 1)
        await run.audit()


# --- 13: rq/rq#1436, #1093 -----------------------------------------------------------------------
async def member_two_fails(given: GenerateInput) -> GenerateOutput:
    if given.sample.member == 2:
        raise EngineFault("the engine answers 500", retryable=True)
    return await plain(given)


async def test_a_group_is_published_with_n_minus_1_when_a_member_fails_for_good(
    valkey_url: str, run_name: str
) -> None:
    """Dependents of a failed job waited for ever."""
    async with a_run(valkey_url, run_name, max_attempts=2) as run:
        run.worker(generate=member_two_fails, min_samples=3).start()
        await run.enqueue(0, 4)
        (group,) = await asyncio.to_thread(train, valkey_url, run_name, 1, batches=1)
        assert [(m.member, m.reason) for m in group.missing] == [(2, "engine_error")]
        samples: list[Any] = group.samples
        assert [sample.member for sample in samples] == [0, 1, 3]
        assert await run.counter("completed") == 3
        assert await run.counter("attempts") == 2
        await run.audit()


async def test_a_group_is_dropped_by_name_where_a_member_that_failed_is_one_too_many(
    valkey_url: str, run_name: str
) -> None:
    async with a_run(valkey_url, run_name, max_attempts=2) as run:
        run.worker(generate=member_two_fails).start()
        await run.enqueue(0, 4)

        async def dropped() -> bool:
            return await run.drops() == {DropReason.SHORT_GROUP: 1}

        await wait_until(dropped)
        (record,) = await run.queue.past()
        assert (record["why"], record["errors"][2][0]) == ("engine_error", "engine_error")
        await run.audit()


# --- 37: radixark/miles#2800 ---------------------------------------------------------------------
async def test_an_infrastructure_fault_of_one_sample_neither_drops_its_group_nor_trains_a_zero(
    valkey_url: str, run_name: str
) -> None:
    """It is tried again; one that stays ends its group by name, and another takes its room."""
    broken: set[int] = set()

    async def generate(given: GenerateInput) -> GenerateOutput:
        gid = given.sample.group_index or 0
        if given.sample.member == 1 and (gid == 1 or gid not in broken):
            broken.add(gid)
            raise EngineFault("aborted by the engine", retryable=True)
        return GenerateOutput(answer(given, reward=1.0))

    async with a_run(valkey_url, run_name, max_attempts=2, cap=2) as run:
        run.worker(generate=generate).start()
        await run.enqueue(0, 4)
        await run.enqueue(1, 4)

        async def one_dropped() -> bool:
            return await run.drops() == {DropReason.SHORT_GROUP: 1}

        await wait_until(one_dropped)
        await run.enqueue(2, 4)  # there is room again
        found = await asyncio.to_thread(train, valkey_url, run_name, 1, batches=2)
        assert sorted(group.group_index for group in found) == [0, 2]
        samples: list[Any] = [sample for group in found for sample in group.samples]
        assert [sample.reward for sample in samples] == [1.0] * 8
        # A fault is never a result: only what ended was completed.
        assert await run.counter("completed") == 11
        assert await run.counter("attempts") == 4
        await run.audit()


# --- 5: rq/rq#1164 -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_lease_is_older_than_a_lease_and_a_beat_after_its_container_was_killed(
    valkey_url: str, run_name: str, sim: Sim, vocabulary: Path, tmp_path: Path
) -> None:
    """The container was killed, and the job was "started" for ever."""
    lease_ms, beat_ms = 1_000, 200
    function = tmp_path / "never.py"
    function.write_text(
        "import asyncio\n\nasync def generate(given):\n    await asyncio.sleep(60)\n"
    )
    options = {
        "redis.url": valkey_url, "run.name": run_name, "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url, "worker.generate": f"{function}:generate",
    }  # fmt: skip
    async with a_run(valkey_url, run_name, lease_ms=lease_ms, max_crashes=9) as run:
        for gid in range(4):
            await run.enqueue(gid, 4)

        async def leases() -> list[tuple[bytes, float]]:
            found = await run.queue.client.zrange(f"{run.queue.prefix}l", 0, -1, withscores=True)
            return list(found)

        async def all_leased() -> bool:
            return len(await leases()) == 16

        async def overdue_ms() -> float:
            """How long ago the oldest lease expired; nothing does while the clock has a gap."""
            swept = await run.queue.call(calls.sweep())
            info = await run.queue.info()
            assert info is not None
            late = (info.clock_ms - score for _, score in await leases())
            return 0.0 if swept.grace else max(late, default=0.0)

        with workers(tmp_path, 1, options) as (one,):
            await wait_until(all_leased, timeout_s=40)
            one.process.kill()
            while await leases():
                assert await overdue_ms() <= beat_ms
                await asyncio.sleep(beat_ms / 2000)
        assert await run.counter("crashes") == 16
        assert (await run.queue.depths())["q"] == 16
        await run.audit()


# --- 28: celery/celery#2219, #9674, #1700 --------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_producer_killed_between_groups_and_a_poison_member_hang_nobody(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    """A chord waited for ever for a member that failed, or was never created."""
    rows, poisoned = 12, 2
    path = rows_file(tmp_path, rows)
    producing = ("--producer.capacity_groups=4", "--worker.lease_s=0.5")

    async def generate(given: GenerateInput) -> GenerateOutput:
        if given.sample.group_index == poisoned and given.sample.member == 1:
            raise EngineFault("it breaks whatever it is given to", retryable=False)
        return await plain(given)

    run = Run(Queue.connect(valkey_url, run_name), valkey_url)
    async with contextlib.aclosing(run):
        with started(valkey_url, run_name, path, *producing) as process:
            await wait_until(lambda: at_least(run, "enqueued", 4), timeout_s=40)
            process.kill()
        await run.audit()  # a group is whole, or was never there
        run.worker(generate=generate).start()
        trained: list[int] = []

        def go_on(stream: GroupStream) -> None:
            for batch in stream.batches(groups=2, timeout_s=40):
                trained.extend(batch.group_indexes)
                batch.ack()

        with GroupStream.connect(valkey_url, run=run_name, connect_timeout_s=5) as stream:
            with pytest.raises(ProducerGone, match="Start the producer again"):
                await asyncio.to_thread(go_on, stream)
            assert len(trained) == 2
            with started(valkey_url, run_name, path, *producing):
                await wait_until(lambda: a_producer_lives(run), timeout_s=40)
                await asyncio.to_thread(go_on, stream)
        assert sorted(trained) == [g for g in range(rows) if g != poisoned]
        assert await run.drops() == {DropReason.SHORT_GROUP: 1}
        await run.audit()


async def at_least(run: Any, counter: str, count: int) -> bool:
    return bool(await run.counter(counter) >= count)


async def a_producer_lives(run: Run) -> bool:
    return (await run.queue.presence())["producers"] > 0


# --- 34: redis/redis#9745, #8635 -----------------------------------------------------------------
async def test_consumer_names_are_fixed_and_none_is_deleted_while_something_is_pending(
    run_name: str,
) -> None:
    """38 million consumers in one group; and deleting one dropped what it had in hand."""
    with DevServer() as server:
        async with a_run(server.url, run_name) as run:
            prefix, client = run.queue.prefix, run.queue.client
            for gid in range(2):
                await run.enqueue(gid, 1)
            parts = run.worker(claim_idle_s=0.3)
            parts.start(aggregate=False)

            async def all_full() -> bool:
                return (await run.queue.depths())["full"] == 2

            await wait_until(all_full)
            await parts.stop()
            # One entry is in the hands of an aggregator that died; twenty others come and go.
            assert len(await run.queue.read_full(CONSUMER, count=1, block_s=0)) == 1

            async def consumers(stream: str, group: str) -> list[tuple[bytes, int]]:
                found = await client.xinfo_consumers(f"{prefix}{stream}", group)
                return [(consumer["name"], consumer["pending"]) for consumer in found]

            for _ in range(20):
                other = run.worker(claim_idle_s=30.0)
                other.start()
                await run.ready(1)
                await other.stop()
                assert await consumers("full", "aggregators") == [(CONSUMER.encode(), 1)]
            for _ in range(10):
                with GroupStream.connect(server.url, run=run_name) as stream:
                    batch = await asyncio.to_thread(stream.next_batch, 1, 10)
                    assert batch is not None
                assert [name for name, _ in await consumers("ready", "trainer")] in (
                    [],
                    [b"trainer"],
                )
            parts.start()

            async def judged() -> bool:
                return (await run.queue.depths())["full"] == 0

            await wait_until(judged)
            assert await consumers("full", "aggregators") == [(CONSUMER.encode(), 0)]
            used = await client.info("commandstats")
            assert [name for name in used if "delconsumer" in name] == []
            assert "cmdstat_xgroup|create" in used
