"""A server that makes it hard: it cuts connections, forgets scripts, and stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from examples.devserver import DevServer
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from rollstream.wire import encode_prompt
from tests.backstage import Backstage
from tests.builders import a_prompt
from tests.integration.worker.parts import Run, a_run
from tests.unit.worker.works import plain
from worker.types import GenerateInput, GenerateOutput

GROUPS = 120


@contextmanager
def harassed(url: str, harass: Callable[[redis.Redis], object]) -> Iterator[list[int]]:
    """Do something to the server fifty times a second; yields how often it was done."""
    count, stop = [0], threading.Event()

    def go_on() -> None:
        with redis.Redis.from_url(url) as client:
            while not stop.wait(0.02):
                harass(client)
                count[0] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


def cut_connections(client: redis.Redis) -> None:
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def forget_scripts(client: redis.Redis) -> None:
    client.script_flush()


async def produce(run: Run) -> None:
    """Enqueue as a producer that asks again after every outage."""
    for gid in range(GROUPS):
        prompt = encode_prompt(a_prompt(gid, 2))
        while True:
            try:
                answer = await run.queue.call(calls.enqueue(gid, 2, prompt))
            except redis.ConnectionError:
                await asyncio.sleep(0.01)
                continue
            if answer in ("new", "dup"):
                break
            await asyncio.sleep(0.01)


def train(url: str, run: str) -> list[int]:
    trained: list[int] = []
    with GroupStream.connect(url, run=run, connect_timeout_s=10) as stream:
        while len(trained) < GROUPS and (batch := stream.next_batch(4, 15)) is not None:
            trained += batch.group_indexes
            batch.ack()
    return trained


@pytest.mark.parametrize("harass", [cut_connections, forget_scripts])
async def test_every_group_is_trained_once_while_the_server(
    harass: Callable[[redis.Redis], object], run_name: str
) -> None:
    """CLIENT KILL and SCRIPT FLUSH, without a pause."""
    with DevServer() as server:
        async with a_run(server.url, run_name, cap=32, lease_ms=2_000) as run:
            for _ in range(2):
                run.worker().start()
            with harassed(server.url, harass) as count:
                producing = asyncio.create_task(produce(run))
                trained = await asyncio.to_thread(train, server.url, run_name)
                await producing
            assert count[0] > 10
            assert sorted(trained) == list(range(GROUPS))
            counters = await run.queue.counters()
            assert (counters["enqueued"], counters["acked"]) == (GROUPS, GROUPS)
            await run.audit()


def test_a_script_that_is_forgotten_again_at_once_is_an_outage_and_no_bug(
    run: Backstage, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover between loading it and running it."""
    queue = run.queue
    monkeypatch.setattr(queue, "_load", lambda _: None)
    queue.client.script_flush()
    with pytest.raises(redis.ConnectionError, match="forgot a script"):
        queue.call(calls.sweep())
    with pytest.raises(redis.ConnectionError, match="forgot a script"):
        queue.call_many([calls.sweep(), calls.sweep()])
    monkeypatch.undo()
    assert not queue.call(calls.sweep()).lost
    assert isinstance(queue, BlockingQueue)

    async def alike() -> None:
        other = Queue.connect(valkey_url, queue.run)

        async def nothing(_: object) -> None:
            return None

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(other, "_load", nothing)
            queue.client.script_flush()
            with pytest.raises(redis.ConnectionError, match="forgot a script"):
                await other.call(calls.sweep())
        assert not (await other.call(calls.sweep())).lost
        await other.aclose()

    asyncio.run(alike())


async def test_a_server_that_stands_still_for_several_leases_charges_nobody(run_name: str) -> None:
    """SIGSTOP of the server: nobody could beat, so nothing may expire."""
    with DevServer() as server:
        assert server.process is not None
        async with a_run(server.url, run_name, lease_ms=500) as run:
            release = asyncio.Event()
            started: list[GenerateInput] = []

            async def generate(given: GenerateInput) -> GenerateOutput:
                started.append(given)
                await release.wait()
                return await plain(given)

            run.worker(generate=generate, slots=16).start()
            for gid in range(8):
                await run.enqueue(gid, 2)
            async with asyncio.timeout(10):
                while len(started) < 16:
                    await asyncio.sleep(0.01)
            os.kill(server.process.pid, signal.SIGSTOP)
            await asyncio.sleep(2.0)
            os.kill(server.process.pid, signal.SIGCONT)
            release.set()
            await run.ready(8)
            assert len(started) == 16
            assert await run.counter("crashes") == 0
            await run.audit()
