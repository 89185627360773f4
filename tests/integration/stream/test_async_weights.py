"""The asyncio twin of updates and evaluations, whose cancelled tasks leave nothing half done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.errors import PauseNotConfirmed, StreamError
from rollstream.queue import calls
from rollstream.updates.weights import WeightUpdate
from tests.backstage import Backstage, wait_until
from tests.integration.stream.crew import Hand, an_engine
from tests.integration.stream.test_evaluate import at_work, nothing_left
from tests.unit.stream.test_engine_posts import engines

Hire = Callable[..., Hand]


@pytest.fixture
async def stream(run: Backstage, valkey_url: str) -> AsyncIterator[AsyncGroupStream]:
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as connected:
        yield connected


def stands(run: Backstage) -> tuple[str, int]:
    info = run.queue.info()
    assert info is not None
    return info.state, info.version


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_until, condition)


async def test_async_update_is_the_same_and_leaves_the_loop_free(
    run: Backstage, stream: AsyncGroupStream, hire: Hire
) -> None:
    with engines(1) as servers:
        hand = hire(engines=[an_engine(servers[0].url)], in_flight=1)
        asyncio.get_running_loop().call_later(0.1, setattr, hand, "in_flight", 0)
        async with stream.updating_weights(2, "abort", label="v2") as update:
            assert stands(run) == ("paused", 0)
            assert await stream.engines() == update.engines == [servers[0].url]
            with pytest.raises(RuntimeError, match="inside updating_weights"):
                await stream.resume()
            with pytest.raises(RuntimeError, match="nothing is sampled"):
                await stream.evaluate("m", ["a"])
        assert servers[0].got[0][1] == {"new_version": "v2", "abort_all_requests": False}
    assert stands(run) == ("running", 2)
    assert stream.version == 2


async def test_async_update_that_fails_leaves_the_run_as_it_was(
    run: Backstage, stream: AsyncGroupStream, hire: Hire
) -> None:
    hand = hire()
    with pytest.raises(ZeroDivisionError):
        async with stream.updating_weights(2, post=False):
            raise ZeroDivisionError
    assert stands(run) == ("running", 0)
    hand.obeys = False
    with pytest.raises(PauseNotConfirmed):
        async with stream.updating_weights(2, confirm_s=0.2):
            raise AssertionError("entered")
    hand.obeys = True
    async with stream.updating_weights(2, post=False):
        pass
    assert stands(run) == ("running", 2)


async def test_a_task_that_is_cancelled_on_its_way_into_an_update_resumes_the_run(
    run: Backstage, stream: AsyncGroupStream, hire: Hire
) -> None:
    hire(obeys=False)

    async def update() -> None:
        async with stream.updating_weights(2):
            raise AssertionError("entered")

    task = asyncio.create_task(update())
    await until(lambda: stands(run)[0] == "paused")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stands(run) == ("running", 0)
    await stream.set_weight_version(1)  # nothing of the update is left


async def test_a_task_that_is_cancelled_in_its_block_resumes_the_run(
    run: Backstage, stream: AsyncGroupStream
) -> None:
    inside = asyncio.Event()

    async def update() -> None:
        async with stream.updating_weights(2, post=False):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(update())
    await inside.wait()
    assert stands(run) == ("paused", 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stands(run) == ("running", 0)
    await stream.set_weight_version(1)


async def test_async_pause_drain_and_engines_are_those_of_the_stream(
    run: Backstage, stream: AsyncGroupStream, hire: Hire
) -> None:
    hand = hire(in_flight=1)
    await stream.set_engines(["http://a/"])
    assert await stream.engines() == ["http://a"]
    await stream.set_engines(None)
    draining = asyncio.create_task(stream.drain(timeout_s=20))
    await until(lambda: stands(run)[0] == "paused")
    # Beside it everything goes on.
    await stream.metrics()
    hand.in_flight = 0
    await draining
    assert stands(run)[0] == "paused"
    await stream.resume()
    hand.in_flight = 1
    draining = asyncio.create_task(stream.drain(timeout_s=20))
    await until(lambda: stands(run)[0] == "paused")
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    await until(lambda: stands(run)[0] == "running")
    await stream.pause("abort", deadline_s=0.1)
    await until(lambda: run.queue.call(calls.sweep()) and stands(run)[0] == "running")


async def test_async_evaluate_goes_on_beside_batches_and_ends_with_its_task(
    run: Backstage, stream: AsyncGroupStream, valkey_url: str
) -> None:
    waiting = asyncio.create_task(stream.next_batch(1, 20))
    with at_work(run, valkey_url):
        result = await stream.evaluate("m", ["a", "b"], 2, timeout_s=20)
    assert len(result.flat()) == 4
    cancelled = asyncio.create_task(stream.evaluate("m", ["a"], timeout_s=60))
    ge = f"{run.queue.prefix}ge"
    await until(lambda: run.queue.client.scard(ge) == 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await until(lambda: run.queue.client.scard(ge) == 0)
    nothing_left(run)
    run.finish(0)
    batch = await waiting
    assert batch is not None
    assert batch.group_indexes == [0]


async def test_closing_an_async_stream_ends_its_evaluation(run: Backstage, valkey_url: str) -> None:
    stream = await AsyncGroupStream.connect(valkey_url, run=run.queue.run)
    evaluating = asyncio.create_task(stream.evaluate("m", ["a"], timeout_s=60))
    ge = f"{run.queue.prefix}ge"
    await until(lambda: run.queue.client.scard(ge) == 1)
    await stream.aclose()
    with pytest.raises(StreamError, match="closed"):
        await evaluating
    assert run.queue.client.scard(ge) == 0
    with pytest.raises(StreamError, match="closed"):
        stream.updating_weights(1)


async def test_an_update_that_was_entered_as_its_task_was_cancelled_is_ended(
    run: Backstage, stream: AsyncGroupStream
) -> None:
    updating = stream.updating_weights(2, post=False)
    entered, go_on = threading.Event(), threading.Event()
    enter = updating._updating.enter

    def slow(interrupt: threading.Event) -> WeightUpdate:
        update = enter(interrupt)
        entered.set()
        go_on.wait(20)
        return update

    updating._updating.enter = slow  # type: ignore[method-assign]

    async def update() -> None:
        async with updating:
            raise AssertionError("entered")

    task = asyncio.create_task(update())
    await until(entered.is_set)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stands(run) == ("running", 0)
    await stream.set_weight_version(1)
