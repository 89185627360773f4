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
from tests.integration.worker.parts import Gate, Run, a_run, wait_until
from tests.unit.worker.works import plain
from worker.types import GenerateInput, GenerateOutput

GROUPS = 120
MOST = 60
"""Then a slow machine may go on in peace."""


@contextmanager
def harassed(url: str, harass: Callable[[redis.Redis], object]) -> Iterator[list[int]]:
    """Do something to the server fifty times a second; yields how often it was done."""
    count, stop = [0], threading.Event()

    def go_on() -> None:
        with redis.Redis.from_url(url) as client:
            while count[0] < MOST and not stop.wait(0.02):
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
                await run.queue.call(calls.present("producer", "p"))
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
        while len(trained) < GROUPS and (batch := stream.next_batch(4, 40)) is not None:
            trained += batch.group_indexes
            batch.ack()
    return trained


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("harass", [cut_connections, forget_scripts])
async def test_every_group_is_trained_once_while_the_server(
    harass: Callable[[redis.Redis], object], run_name: str
) -> None:
    """CLIENT KILL and SCRIPT FLUSH, without a pause."""
    with DevServer() as server:
        async with a_run(server.url, run_name, cap=32, lease_ms=2_000) as run:
            for _ in range(2):
                # What a lost answer had handed out idles first: by default for some leases.
                run.worker(claim_idle_s=None).start()
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
            async with asyncio.timeout(45):
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


# --- 24: celery/celery#5935, #3430 ---------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_rollout_of_many_leases_is_one_attempt_although_redis_restarts_in_its_middle(
    run_name: str,
) -> None:
    """A visibility timeout ran long tasks again; a restart of the broker did too."""
    lease_ms, gate = 500, Gate()
    with DevServer("--appendfsync", "always", aof=True) as server:
        async with a_run(server.url, run_name, lease_ms=lease_ms) as run:
            run.worker(generate=gate).start()
            await run.enqueue(0, 4)
            await wait_until(lambda: len(gate.started) == 4)
            for outage in (False, True, False):
                await clock_moves(run, 4 * lease_ms)
                if outage:
                    await asyncio.to_thread(server.kill)
                    await asyncio.sleep(2 * lease_ms / 1000)
                    await asyncio.to_thread(server.start)
            gate.end(0, *range(4))
            await run.ready(1)
            assert len(gate.started) == 4
            names = ("crashes", "attempts", "fenced", "completed")
            assert [await run.counter(name) for name in names] == [0, 0, 0, 4]
            await run.audit()


async def clock_moves(run: Run, ms: int) -> None:
    """Wait until so much time of the queue has passed: the worker sweeps."""

    async def now() -> int:
        info = await run.queue.info()
        assert info is not None
        return info.clock_ms

    until = await now() + ms

    async def is_there() -> bool:
        return await now() >= until

    await wait_until(is_there)


# --- 11: NeptuneHub/AudioMuse-AI#784 -------------------------------------------------------------
@pytest.mark.parametrize("loss", ["its entry is deleted", "it is forgotten in an outage"])
async def test_a_worker_that_dropped_out_of_the_registry_is_back_with_its_next_beat(
    run_name: str, loss: str
) -> None:
    """A worker that nobody knew of any more worked on invisibly."""
    with DevServer("--appendfsync", "always", aof=True) as server:
        async with a_run(server.url, run_name, lease_ms=600) as run:
            run.worker().start()

            async def seen() -> bool:
                return await run.queue.presence() == {
                    "workers": 1, "producers": 0, "aggregators": 1,
                }  # fmt: skip

            await wait_until(seen)
            if loss == "it is forgotten in an outage":
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await run.queue.client.delete(
                *(f"{run.queue.prefix}{key}" for key in ("w", "wa", "wl"))
            )
            await wait_until(seen)
            await run.enqueue(0, 4)
            await run.ready(1)
