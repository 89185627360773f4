"""The asyncio twin: the same batches, and cancellation that loses nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.errors import RunLost, StreamError, StreamStalled
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until


def test_async_stream_has_every_method_of_the_stream() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    only_sync = public(GroupStream) - public(AsyncGroupStream)
    assert only_sync == {"close", "take_back"}


async def test_async_stream_is_the_same_loop(run: Backstage, valkey_url: str) -> None:
    run.finish(0, 1, 2)
    run.end_of_data()
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        seen = []
        async for batch in stream.batches(groups=2, timeout_s=5):
            seen.append(batch.group_indexes)
            with pytest.raises(StreamError, match="not acked"):
                await stream.state_dict()
            await stream.ack(batch)
        await stream.set_weight_version(2)
        state = await stream.state_dict()
        figures = await stream.metrics()
    assert seen == [[0, 1], [2]]
    assert (state["frontier"], state["weight_version"]) == (3, 2)
    assert figures["stream/acked"] == 3
    async with await AsyncGroupStream.connect(
        valkey_url, run=run.queue.run, state=state
    ) as restored:
        assert [b async for b in restored.batches(groups=2)] == []
        assert restored.version == 2


async def test_async_stream_waits_without_holding_the_loop(run: Backstage, valkey_url: str) -> None:
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        waiting = asyncio.create_task(stream.next_batch(1, 10))
        # An ack of another batch, metrics and the loop itself go on meanwhile.
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 5:
                await stream.metrics()
                run.finish(0)
        batch = await waiting
        assert batch is not None
        assert batch.group_indexes == [0]
        assert ticks >= 5


async def test_async_stream_loses_no_group_to_a_cancelled_wait(
    run: Backstage, valkey_url: str
) -> None:
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        run.finish(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stream.next_batch(2, 10)
        run.finish(1, 2)
        batch = await stream.next_batch(3, 10)
        assert batch is not None
        assert batch.group_indexes == [0, 1, 2]


async def test_async_stream_takes_a_batch_back_that_a_cancelled_task_never_saw(
    run: Backstage, valkey_url: str
) -> None:
    run.finish(0, 1)
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        for delay in range(8):
            task = asyncio.create_task(stream.next_batch(2, 10))
            await asyncio.sleep(delay / 500)
            if not task.done():
                task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, asyncio.CancelledError):
                assert done is not None
                assert not isinstance(done, BaseException)
                stream._stream.take_back(done)
        batch = await stream.next_batch(2, 10)
        assert batch is not None
        assert batch.group_indexes == [0, 1]
        await stream.ack(batch)
        run.end_of_data()
        assert await stream.next_batch(2, 10) is None


async def test_async_stream_raises_what_the_stream_raises(run: Backstage, valkey_url: str) -> None:
    with pytest.raises(RunLost):
        await AsyncGroupStream.connect(valkey_url, run="nobody", connect_timeout_s=0.2)
    run.enqueue(0)
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        with pytest.raises(StreamStalled):
            await stream.next_batch(1, 0.5)


async def test_async_stream_that_is_closed_ends_its_wait(run: Backstage, valkey_url: str) -> None:
    stream = await AsyncGroupStream.connect(valkey_url, run=run.queue.run)
    waiting = asyncio.create_task(stream.next_batch(1, 10))
    await asyncio.sleep(0.05)
    await stream.aclose()
    async with asyncio.timeout(5):
        with pytest.raises(StreamError, match="closed"):
            await waiting


async def test_async_connect_that_is_cancelled_leaves_no_trainer_behind(
    valkey_url: str, run_name: str
) -> None:
    with Backstage(valkey_url, run_name) as run:
        connecting = asyncio.create_task(
            AsyncGroupStream.connect(valkey_url, run=run_name, connect_timeout_s=10)
        )
        await asyncio.sleep(0.1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        run.open()
        with GroupStream.connect(valkey_url, run=run_name) as stream:
            threads = threading.enumerate
            wait_until(lambda: not [t for t in threads() if t.name.startswith("rollstream-c")])
            run.finish(0)
            assert next(stream.batches(groups=1)).group_indexes == [0]
        told = run.queue.client.xrange(f"{run.queue.prefix}ctl")
        assert [fields[b"op"] for _, fields in told] == [b"connect"]


async def test_async_stream_that_was_closed_says_so_and_may_be_closed_again(
    run: Backstage, valkey_url: str
) -> None:
    stream = await AsyncGroupStream.connect(valkey_url, run=run.queue.run)
    waiting = asyncio.create_task(stream.next_batch(1, 30))
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    for call in (stream.pause(), stream.metrics(), stream.next_batch(1, 1), waiting):
        with pytest.raises(StreamError, match="the stream was closed"):
            await call
