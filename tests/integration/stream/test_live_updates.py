"""Updates and evaluations with real workers and a real engine over HTTP, and kills in between."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.evaluation.eval_result import EvalResult
from rollstream.group import EnvRule
from rollstream.queue import calls
from rollstream.queue.keys import SCHEMA
from rollstream.sample import UNKNOWN_VERSION
from rollstream.stream import GroupStream
from rollstream.wire import encode_envs
from tests.backstage import Backstage, wait_until
from tests.integration.worker.processes import Sim, WorkerProcess, workers

Connect = Callable[..., GroupStream]
N, GROUPS, BATCH = 2, 12, 3
# A worker starts in two seconds; where the machine does much else, in many more.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary, latency_s=0.1)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def options(sim: Sim, vocabulary: Path, run: Backstage, valkey_url: str) -> dict[str, str]:
    return {
        "redis.url": valkey_url,
        "run.name": run.queue.run,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "engine.probe_interval_s": "0.1",
        "worker.generate": "single_turn",
        "worker.concurrency": "6",
        "worker.drain_s": "0",
        "aggregator.filters": "no_aborted",
        "reward.kind": "none",
        "weights.partial": "true",
        "sampling.max_new_tokens": "64",
    }


def label_of(sim: Sim) -> str:
    with urllib.request.urlopen(f"{sim.url}/model_info", timeout=10) as reply:
        return str(json.loads(reply.read())["weight_version"])


def in_flight(sim: Sim) -> int:
    """Return how many calls the engine has, whoever asked for them."""
    with urllib.request.urlopen(f"{sim.url}/sim", timeout=10) as reply:
        return int(json.loads(reply.read())["in_flight"])


def train(
    stream: GroupStream, run: Backstage, sim: Sim, versions: list[int], busy: list[int], mode: Any
) -> None:
    for batch in stream.batches(groups=BATCH, timeout_s=60):
        with stream.updating_weights(stream.version + 1, mode, ack=batch):
            busy.append(in_flight(sim))
        if batch.number == 1:
            # What was leased before may all have ended under the weights before.
            run.enqueue(*range(GROUPS // 2, GROUPS), n=N)
            run.end_of_data()
        for sample in batch.flat():
            versions += [v for call in sample.calls for v, _, _ in call.versions]


@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.slow), "abort"])
def test_live_workers_obey_updates_and_evaluate_in_between(
    run: Backstage, connect: Connect, sim: Sim, options: dict[str, str], tmp_path: Path, mode: str
) -> None:
    rule = encode_envs({"default": EnvRule(needs_reward=False)})
    run.queue.call(calls.open_run(SCHEMA, "data", run.budgets | {"cap": 64, "envs": rule}))
    first_version = int(label_of(sim)) if label_of(sim).isdigit() else 0
    stream = connect(state="fresh")
    stream.set_weight_version(first_version)
    run.enqueue(*range(GROUPS // 2), n=N)
    versions: list[int] = []
    busy: list[int] = []
    with workers(tmp_path, 1 if mode == "abort" else 2, options):
        # A worker says with its first beat, a moment behind its readiness, which engines it found.
        wait_until(lambda: stream.engines() == [sim.url])
        training = threading.Thread(target=train, args=(stream, run, sim, versions, busy, mode))
        training.start()
        results: list[EvalResult] = []
        while training.is_alive() and len(results) < 3:
            results.append(stream.evaluate("m", ["What is 1+7?"] * 3, N, timeout_s=60))
        training.join(100)
        assert not training.is_alive()
    last = stream.version
    assert last == first_version + GROUPS // BATCH
    assert label_of(sim) == str(last)
    assert len(versions) >= GROUPS * N
    # In `keep` an engine may have new weights and no name for them yet: nobody knows whose those
    # tokens are.
    may_be = {*range(first_version, last + 1)} | ({UNKNOWN_VERSION} if mode == "keep" else set())
    assert set(versions) <= may_be
    assert max(versions) > first_version
    assert [len(result.flat()) for result in results] == [6] * len(results)
    assert all(set(result.versions) <= may_be for result in results)
    if mode == "abort":
        assert busy == [0] * (GROUPS // BATCH)
    figures = stream.metrics()
    assert figures["stream/acked"] == GROUPS
    assert (figures["stream/updates"], figures["stream/updates_failed"]) == (GROUPS // BATCH, 0)
    assert run.queue.call(calls.audit(deep=True)).problems == []


@pytest.mark.slow
def test_a_worker_that_is_killed_or_frozen_while_an_update_waits_delays_it_by_a_lease_at_most(
    run: Backstage, connect: Connect, sim: Sim, options: dict[str, str], tmp_path: Path
) -> None:
    run.budgets["weights_mode"] = "colocated"
    run.open()
    stream = connect()
    run.enqueue(*range(8), n=N)
    with workers(tmp_path, 3, options) as (first, second, third):
        wait_until(lambda: len(run.queue.confirmations()) >= 3)
        for victim, act in ((first, "kill"), (second, "freeze")):
            alive = update_while(stream, run, sim, victim, act)
            assert len(alive) <= 2
        assert third.process.poll() is None
    assert run.queue.call(calls.audit(deep=True)).problems == []


def update_while(
    stream: GroupStream, run: Backstage, sim: Sim, victim: WorkerProcess, act: str
) -> list[str]:
    victim.process.send_signal(signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    with stream.updating_weights(stream.version + 1, "abort", post=False) as update:
        info = run.queue.info()
        assert info is not None
        assert info.state == "paused"
        # Where the engines share the trainer's GPUs, none has a call of a worker that is gone.
        assert in_flight(sim) == 0
    return update.workers
