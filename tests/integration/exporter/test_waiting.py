"""Whether the trainer waits, whether it is there, and how long producers were blocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.batch import Batch
from rollstream.errors import StreamStalled
from rollstream.queue.calls import ScriptCall
from rollstream.stream import GroupStream
from tests.backstage import Backstage, Connect
from tests.integration.producer.scene import Trainer, producing, rows_file, settings_of
from worker.exporter import reader

from .scene import Watching, watching

WAIT_S = 30.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """For calls of a trainer that wait."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have connections listed at every look."""
    monkeypatch.setattr(reader, "CLIENTS_EVERY_S", 0.0)


def waits(thread: ThreadPoolExecutor, stream: GroupStream, groups: int) -> Future[Any]:
    return thread.submit(stream.next_batch, groups, WAIT_S)


def seen(it: Watching) -> tuple[float, float]:
    return it.value("trainer_waiting"), it.value("trainer_connected")


async def test_a_trainer_waits_until_its_batch_is_full_and_not_while_it_trains(
    valkey_url: str, run: Backstage, connect: Connect, thread: ThreadPoolExecutor
) -> None:
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert seen(it) == (0, 0)
        stream = connect()
        await it.look()
        assert seen(it) == (0, 1)
        waiting = waits(thread, stream, 2)
        await it.until(lambda: seen(it) == (1, 1))
        run.finish(0)
        # Half a batch is none.
        await it.until(
            lambda: it.value("queue_depth", queue="delivered") == 1 and seen(it) == (1, 1)
        )
        run.finish(1)
        batch: Batch = await asyncio.wrap_future(waiting)
        await it.look()
        assert seen(it) == (0, 1)
        batch.ack()
        await it.look()
        assert seen(it) == (0, 1)


@pytest.mark.slow
async def test_a_trainer_goes_on_to_wait_for_as_long_as_nothing_comes(
    valkey_url: str, run: Backstage, connect: Connect, thread: ThreadPoolExecutor
) -> None:
    """What it said is believed for 1.5 s: it has to say it again."""
    stream = connect()
    async with watching(valkey_url, run.queue.run) as it:
        said: set[str] = set()

        def says() -> bool:
            found: Any = run.queue.client.hget(f"{run.queue.prefix}m", "trainer")
            said.add(found.decode().split()[-1])
            return len(said - {"here"}) >= 3

        waiting = waits(thread, stream, 1)
        await it.until(lambda: seen(it) == (1, 1))
        await it.until(says)
        await it.until(lambda: seen(it) == (1, 1))
        run.finish(0)
        await asyncio.wrap_future(waiting)


async def test_a_trainer_whose_groups_lie_ready_never_says_that_it_waits(
    valkey_url: str, run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(*range(8))
    for _ in range(4):
        batch = stream.next_batch(2, WAIT_S)
        assert batch is not None
        said: Any = run.queue.client.hget(f"{run.queue.prefix}m", "trainer")
        assert said.decode().endswith(" here")
        batch.ack()


@pytest.mark.slow
async def test_a_trainer_that_gave_up_is_soon_one_that_does_not_wait(
    valkey_url: str, run: Backstage, connect: Connect
) -> None:
    stream = connect()
    async with watching(valkey_url, run.queue.run) as it:
        with pytest.raises(StreamStalled):
            await asyncio.to_thread(stream.next_batch, 1, 0.3)
        await it.until(lambda: seen(it) == (0, 1))


@pytest.mark.slow
async def test_an_asyncio_trainer_that_waits_is_seen_and_one_that_is_cancelled_is_not(
    valkey_url: str, run: Backstage
) -> None:
    async with watching(valkey_url, run.queue.run) as it:
        async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
            task = asyncio.create_task(stream.next_batch(1, WAIT_S))
            await it.until(lambda: seen(it) == (1, 1))
            task.cancel()
            await asyncio.wait([task])
            await it.until(lambda: seen(it) == (0, 1))
            task = asyncio.create_task(stream.next_batch(1, WAIT_S))
            await it.until(lambda: seen(it) == (1, 1))
            run.finish(0)
            batch = await task
            assert batch is not None
            await it.look()
            assert seen(it) == (0, 1)
        await it.look()
        assert seen(it) == (0, 0)


async def test_a_trainer_that_was_killed_while_it_trained_is_not_connected(
    valkey_url: str, run: Backstage, connect: Connect, listed: None
) -> None:
    stream = connect()
    run.finish(0)
    assert stream.next_batch(1, WAIT_S) is not None
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert seen(it) == (0, 1)
        stream._hold.queue.close()  # as its kernel does; it says nothing
        await it.until(lambda: seen(it) == (0, 0))
        connect()
        await it.look()
        assert seen(it) == (0, 1)


async def test_a_trainer_that_was_taken_over_says_nothing_of_the_one_that_is_there(
    valkey_url: str, run: Backstage, connect: Connect, thread: ThreadPoolExecutor
) -> None:
    old = connect()
    waiting = waits(thread, connect(), 1)
    async with watching(valkey_url, run.queue.run) as it:
        await it.until(lambda: seen(it) == (1, 1))
        old.close()
        await it.look()
        assert seen(it) == (1, 1)
        run.finish(0)
        await asyncio.wrap_future(waiting)


async def test_a_producer_is_blocked_while_there_is_no_room_and_not_while_there_is(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 6)
    settings = settings_of(valkey_url, run_name, path, "--producer.capacity_groups=4")
    async with watching(valkey_url, run_name) as it, Trainer(valkey_url, run_name) as trainer:
        async with producing(settings) as it_produces:
            blocked = it_produces.gate._blocked
            await it.until(lambda: it.value("producer_blocked_seconds_total") > 0.3)
            await trainer.ack(0, 1)
            await trainer.until_done()
            total_s = blocked.total_s
            await it.until(
                lambda: it.value("producer_blocked_seconds_total") == int(total_s * 1000) / 1000
            )
            assert blocked.total_s == total_s  # all is enqueued: nothing is held back
            await it_produces.gate.leave()
        await it.look()
        assert it.value("producer_blocked_seconds_total") == int(total_s * 1000) / 1000


async def test_a_producer_that_fills_each_place_that_comes_free_is_blocked_in_between(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    """The bell rings before anybody read that there is no room."""
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 12), "--producer.capacity_groups=4"
    )
    async with producing(settings) as it_produces, Trainer(valkey_url, run_name) as trainer:
        held_s = 0.0
        for done in range(6):
            await trainer.until_live(range(done, done + 4))
            seen_mono_s = time.monotonic()
            await asyncio.sleep(0.05)
            held_s += time.monotonic() - seen_mono_s
            await trainer.ack(done)
        # Only in the first of six places a prompt was refused; the gate hears a bit later of each.
        assert it_produces.gate._blocked.total_s >= held_s / 2


async def test_a_producer_whose_source_is_slow_is_not_blocked_meanwhile(
    valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 6), "--producer.capacity_groups=4"
    )
    async with producing(settings) as it_produces, Trainer(valkey_url, run_name) as trainer:
        started_mono_s, slow_s = time.monotonic(), 0.0
        await trainer.until_live(range(4))
        supply = it_produces.gate._supply
        make_call = supply.call

        def slowly(group_index: int) -> ScriptCall[str]:
            nonlocal slow_s
            began = time.monotonic()
            time.sleep(0.3)
            slow_s += time.monotonic() - began
            return make_call(group_index)

        monkeypatch.setattr(supply, "call", slowly)
        await trainer.ack(0)
        await trainer.until_live(range(1, 5))
        slow_now_s, total_s = slow_s, it_produces.gate._blocked.total_s
        assert total_s <= time.monotonic() - started_mono_s - slow_now_s


@pytest.mark.slow
async def test_two_producers_one_behind_the_other_add_up(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 6)
    settings = settings_of(valkey_url, run_name, path, "--producer.capacity_groups=4")
    totals: list[int] = []

    def is_blocked() -> bool:
        return it.value("producer_blocked_seconds_total") > sum(totals) / 1000

    async with watching(valkey_url, run_name) as it:
        for _ in range(2):
            async with producing(settings, name="host:1") as it_produces:
                blocked = it_produces.gate._blocked
                await it.until(is_blocked)
                await it_produces.kill()
                blocked.stop()
                await it_produces.gate.leave()
                totals.append(int(blocked.total_s * 1000))
        await it.look()
        assert it.value("producer_blocked_seconds_total") == sum(totals) / 1000


def test_a_trainer_that_may_not_name_its_connections_waits_all_the_same(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    stream._hold.queue._name = ""
    stream._hold.attend(1.5)
    found: Any = run.queue.client.hget(f"{run.queue.prefix}m", "trainer")
    assert found.decode().split()[1] == "-"
