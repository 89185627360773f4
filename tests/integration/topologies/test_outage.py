"""Redis away in the middle of samples that run longer than that: delivered later, uncharged."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer, free_port
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import rows_file
from tests.integration.worker.parts import Gate, a_run
from tests.integration.worker.parts import wait_until as until
from tests.integration.worker.processes import WorkerProcess, start, wait_for_url

from .servers import told

OUTAGE_S = 60.0


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer("--appendfsync", "always", aof=True) as server:
        yield server


@pytest.mark.slow
async def test_results_that_end_while_redis_is_away_for_several_leases_land_and_charge_nobody(
    server: DevServer, run_name: str
) -> None:
    """Scenarios 10, 11: two members end during the outage, two run on through it."""
    gate = Gate()
    async with a_run(server.url, run_name, lease_ms=500) as run:
        for group_index in (0, 1):
            await run.enqueue(group_index, 2)
        parts = run.worker(generate=gate, slots=4)
        parts.start()
        await until(lambda: len(gate.started) == 4)
        server.kill()
        await until(lambda: not parts.link.up)
        gate.end(0, 0)
        gate.end(1, 1)
        await asyncio.sleep(2.0)  # four leases: what was leased would have expired
        server.start()
        with told(server.port) as client:
            client.delete(f"{run.queue.prefix}w")  # and nobody is in the registry
        await until(lambda: parts.link.up)

        async def landed() -> bool:
            return await run.counter("completed") == 2

        await until(landed)
        gate.end(0, 1)
        gate.end(1, 0)
        await run.ready(2)
        assert sorted(gate.started) == [(0, 0), (0, 1), (1, 0), (1, 1)]  # each ran once
        for name in ("attempts", "crashes", "given_back", "fenced"):
            assert await run.counter(name) == 0, name
        assert (await run.queue.presence())["workers"] == 1
        await run.audit()


class Trainer(threading.Thread):
    """Trains what comes until the run is over."""

    def __init__(self, url: str, run: str) -> None:
        super().__init__(daemon=True)
        self._url, self._run_name = url, run
        self.trained: list[int] = []
        self.errors: list[Exception] = []
        self.is_connected = threading.Event()

    def run(self) -> None:
        try:
            with GroupStream.connect(self._url, run=self._run_name) as stream:
                self.is_connected.set()
                for batch in stream.batches(groups=2, timeout_s=150):
                    batch.ack()
                    self.trained += batch.group_indexes
        except Exception as error:  # noqa: BLE001 - for the test's own thread
            self.errors.append(error)


@contextlib.contextmanager
def slow_engine(folder: Path, vocabulary: Path, latency_s: float) -> Iterator[str]:
    """A simulated engine whose replies of 16 tokens take so long, each token its part of it."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", folder / "sim.log"
    process = start(
        "worker.engines.sim", "--port", str(port), "--tokenizer", str(vocabulary),
        "--latency-median-s", "0.01", "--latency-sigma", "0", "--token-s", str(latency_s / 16),
        log=log,
    )  # fmt: skip
    try:
        wait_for_url(f"{url}/model_info", process, log)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sixty_seconds_without_redis_in_the_middle_of_longer_samples_cost_nothing(
    server: DevServer, run_name: str, vocabulary: Path, tmp_path: Path
) -> None:
    """Scenarios 10, 11, 24 with real processes: a lease of 3 s, samples of 75 s, 60 s without."""
    common = {"redis.url": server.url, "run.name": run_name, "worker.lease_s": "3"}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(slow_engine(tmp_path, vocabulary, OUTAGE_S + 15))
        backstage = stack.enter_context(Backstage(server.url, run_name))
        flags = [part for key, value in common.items() for part in (f"--{key}", value)]
        producer = start(
            "producer", *flags, "--producer.source", f"jsonl:{rows_file(tmp_path, 4)}",
            "--producer.n_samples_per_prompt", "2", log=tmp_path / "producer.log",
        )  # fmt: skip
        stack.callback(producer.wait)
        stack.callback(producer.kill)
        options = common | {
            "model.tokenizer": str(vocabulary),
            "engine.urls": engine,
            "worker.generate": "single_turn",
            "worker.concurrency": "4",
            "aggregator.filters": "no_aborted",
            "reward.kind": "deterministic_random",
            "sampling.max_new_tokens": "16",
        }
        workers = [WorkerProcess(tmp_path, number, options) for number in range(2)]
        for one in workers:
            stack.callback(one.process.wait)
            stack.callback(one.process.kill)
        for one in workers:
            one.wait_ready()
        trainer = Trainer(server.url, run_name)
        trainer.start()
        queue = backstage.queue
        assert trainer.is_connected.wait(45)
        wait_until(lambda: queue.depths()["l"] == 8, 15)
        server.kill()
        time.sleep(OUTAGE_S)
        server.start()
        with told(server.port) as client:
            client.delete(f"{queue.prefix}w")
        wait_until(lambda: queue.presence()["workers"] == 2, 15)
        trainer.join(60)
        assert trainer.errors == []
        assert sorted(trainer.trained) == [0, 1, 2, 3]
        counters = queue.counters()
        assert (counters["completed"], counters["acked"]) == (8, 4)
        charged = {name: counters.get(name, 0) for name in ("attempts", "crashes", "given_back")}
        assert charged == {"attempts": 0, "crashes": 0, "given_back": 0}
        assert queue.call(calls.audit(deep=True)).problems == []
        for one in workers:
            assert one.process.poll() is None
            said = [event["event"] for event in one.events()]
            assert (said.count("redis_away"), said.count("redis_back")) == (1, 1)
        assert _faults(workers) == []


def _faults(workers: list[WorkerProcess]) -> list[Any]:
    """Return what any worker called a fault: an outage of Redis is none of a sample's."""
    return [
        event
        for one in workers
        for event in one.events()
        if event["event"] in ("sample_failed", "lease_lost")
    ]
