"""A whole worker that watches itself: every call checked, samples scored again, experts row by row.

Real processes: the worker, the simulated engine, a real server; the samples are read as a trainer
reads them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollstream.queue.blocking import BlockingQueue
from rollstream.sample import Sample
from rollstream.trainer.assemble import assemble
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.numbers import ReplayConfig, routed_experts
from worker.engines.sim.policy import Policy

from .parts import Run, a_run, wait_until
from .processes import Sim, WorkerProcess, workers

N = 4
GROUPS = 3
SHAPE = ReplayConfig(layers=3, top_k=2)
USER = [{"role": "user", "content": "What is 1+7?"}]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    options = (
        *("--replay-layers", "3", "--replay-top-k", "2"),
        *("--tool-rate", "1.0", "--again-rate", "0.5", "--max-sentences", "2"),
        *("--fault-abort-code", "0.05"),
    )
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary, 0.01, options)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, lease_ms=15_000) as opened:
        yield opened


def figure(worker: WorkerProcess, series: str) -> float:
    """Return one series of the worker's metrics."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", worker.get("/metrics")[1], re.MULTILINE)
    assert found is not None, series
    return float(found[1])


def delivered(url: str, name: str) -> list[Sample]:
    """Return every sample that waits for the trainer."""
    queue = BlockingQueue.connect(url, name)
    try:
        info = queue.info()
        assert info is not None
        entries = queue.newest("ready", 100)
        stored = queue.groups([(entry.group_index, entry.n) for entry in entries])
        groups = [assemble(group, info.envs)[0] for group in stored]
        return [sample for group in groups for sample in group.flat()]
    finally:
        queue.close()


@pytest.mark.slow
async def test_a_worker_checks_every_call_scores_every_sample_and_delivers_every_row_of_experts(
    run: Run, sim: Sim, vocabulary: Path, run_name: str, tmp_path: Path
) -> None:
    options = {
        "redis.url": run.url,
        "run.name": run_name,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "engine.routed_experts": "true",
        "engine.replay_layers": "3",
        "engine.replay_top_k": "2",
        "worker.generate": "multi_turn",
        "worker.tools": "calculator",
        "worker.max_turns": "3",
        "worker.drain_s": "0",
        "aggregator.filters": "no_aborted",
        "sampling.max_new_tokens": "256",
        "telemetry.rescore_fraction": "1.0",
    }
    with workers(tmp_path, 1, options) as (worker,):
        for group in range(GROUPS):
            await run.enqueue(group, N, prompt=USER, label="8")
        await run.ready(GROUPS)
        samples = delivered(run.url, run_name)
        num_calls = sum(len(sample.calls) for sample in samples)

        def all_scored() -> bool:
            outcome = 'rollout_rescored_samples_total{outcome="compared"}'
            return figure(worker, outcome) == len(samples)

        await wait_until(
            all_scored, what="every sample scored", tell=lambda: worker.get("/metrics")[1]
        )
        assert figure(worker, 'rollout_checked_calls_total{outcome="checked"}') == num_calls
        assert figure(worker, 'rollout_checked_calls_total{outcome="unknown"}') == 0
        for kind in ("prefix", "sampled", "log_prob"):
            assert figure(worker, f'rollout_token_mismatch_total{{kind="{kind}"}}') == 0
        sampled = sum(sample.num_sampled for sample in samples)
        assert figure(worker, "rollout_logprob_difference_count") == sampled
        assert figure(worker, 'rollout_logprob_difference_bucket{le="0.001"}') == sampled
    assert len(samples) == GROUPS * N
    assert num_calls > len(samples), "nobody called a tool"
    _check_numbers(samples, vocabulary)


def _check_numbers(samples: list[Sample], vocabulary: Path) -> None:
    """Compute experts and log-probs again, from the tokens alone."""
    policy = Policy(tokenizer_of(str(vocabulary)), {})
    for sample in samples:
        rows = sample.rollout_routed_experts
        assert rows is not None
        assert rows.shape == (len(sample.tokens) - 1, SHAPE.layers, SHAPE.top_k)
        expected = routed_experts(sample.tokens, 0, SHAPE)
        fed = np.ones(len(rows), dtype=bool)
        fed[sample.calls[-1].end - 1 :] = False  # an observation at the end was never fed in
        assert np.array_equal(rows[fed], expected[fed])
        assert (rows[~fed] == -1).all()
        scored = policy.score(sample.tokens, sample.prompt_length)
        assert sample.rollout_log_probs is not None
        for call in sample.calls:
            span = slice(call.start - sample.prompt_length, call.end - sample.prompt_length)
            assert sample.rollout_log_probs[span].tobytes() == scored[span].tobytes()
