"""The background look at finished samples: bounded, never in the way, each sample one outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.sample import Sample
from tests.builders import a_sample
from tests.integration.cli.test_logprobs import log_probs_shifted_by_one, sampled
from tests.scripted_engine import scripted
from tests.vocabulary_once import tokenizer_of
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.faults import FaultConfig
from worker.engines.sim.http import port_of, serve
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import SimEngine
from worker.members.rescorer import QUEUE_SAMPLES, Rescorer
from worker.sampling import Sampling
from worker.types import RequestIds

from .parts import wait_until


class Seen:
    """What a rescorer told."""

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.mismatches = 0

    def mismatch(self) -> None:
        self.mismatches += 1


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


def a_rescorer(engine: Any, fraction: float = 1.0, **kw: Any) -> tuple[Rescorer, Seen]:
    seen = Seen()
    known: dict[str, Any] = {"version": lambda: 5, "run_seed": 7} | kw
    return Rescorer(
        engine, fraction, differences=seen.differences.extend, mismatch=seen.mismatch, **known
    ), seen


@contextlib.asynccontextmanager
async def pool_of(policy: Policy, version: str = "5", **faults: float) -> AsyncIterator[EnginePool]:
    quick = FaultConfig(latency_median_s=0.0, token_s=0.0, others=faults)
    server = await serve(
        SimEngine(policy, faults=quick, weight_version=version).handle, "127.0.0.1", 0
    )
    pool = EnginePool([f"http://127.0.0.1:{port_of(server)}"], max_token_id=10**6)
    try:
        yield pool
    finally:
        await pool.aclose()
        server.close()


async def scored(rescorer: Rescorer, *samples: Any) -> dict[str, int]:
    """Offer samples, wait until each has its outcome, and return the outcomes."""
    running = asyncio.create_task(rescorer.run())
    for sample in samples:
        rescorer.offer(sample)
    await wait_until(lambda: sum(rescorer.outcomes.values()) == len(samples), what="outcomes")
    running.cancel()
    return {name: count for name, count in rescorer.outcomes.items() if count}


async def test_a_sample_of_the_engines_own_weights_shows_no_difference(policy: Policy) -> None:
    async with pool_of(policy) as pool:
        rescorer, seen = a_rescorer(pool)
        samples = [sampled(policy, 0, member) for member in range(3)]
        assert await scored(rescorer, *samples) == {"compared": 3}
    assert seen.differences == [0.0] * sum(sample.num_sampled for sample in samples)
    assert seen.mismatches == 0


async def test_a_sample_whose_log_probs_are_shifted_is_a_mismatch(policy: Policy) -> None:
    async with pool_of(policy) as pool:
        rescorer, seen = a_rescorer(pool)
        wrong = sampled(policy, 0, 0, change=log_probs_shifted_by_one)
        assert await scored(rescorer, wrong, sampled(policy, 0, 1)) == {"compared": 2}
    assert seen.mismatches == 1
    assert max(seen.differences) > 0.5


async def test_log_probs_of_an_engine_that_lies_are_a_mismatch_with_its_own_prefill(
    policy: Policy,
) -> None:
    one = sampled(policy, 0, 0)
    prompt = one.tokens[: one.prompt_length].tolist()
    request = RequestIds([",".join(map(str, prompt)).encode()], len(prompt))
    async with pool_of(policy, logprobs_wrong=1.0) as pool:
        said = await pool.generate(
            request, Sampling(max_new_tokens=16, temperature=1.0), routing_key="a", version=5
        )
        sample = a_sample(
            0, 0, prompt_ids=prompt, turns=[(said.ids.tolist(), [])], versions=5,
            rollout_log_probs=said.log_probs,
        )  # fmt: skip
        rescorer, seen = a_rescorer(pool)
        assert await scored(rescorer, sample) == {"compared": 1}
    assert seen.mismatches == 1
    assert seen.differences == pytest.approx([0.75] * len(said.ids), abs=1e-5)


def all_a_little_off(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[sample.sampled_mask() == 1] -= np.float32(0.04)


async def test_noise_below_the_limit_is_a_figure_and_no_mismatch(policy: Policy) -> None:
    async with pool_of(policy) as pool:
        rescorer, seen = a_rescorer(pool)
        await scored(rescorer, sampled(policy, 0, 0, change=all_a_little_off))
    assert seen.mismatches == 0
    assert np.mean(seen.differences) == pytest.approx(0.04, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "temperature"), [(4, 1.0), (5, 0.7)], ids=["older", "another temperature"]
)
async def test_what_a_prefill_says_nothing_about_is_not_compared(
    policy: Policy, version: int, temperature: float
) -> None:
    async with pool_of(policy) as pool:
        rescorer, seen = a_rescorer(pool)
        sample = sampled(policy, 0, 0, version=version, temperature=temperature)
        assert await scored(rescorer, sample) == {"not_comparable": 1}
    assert seen.differences == []


async def test_every_leaf_of_a_trajectory_is_looked_at_and_empty_ones_are_not(
    policy: Policy,
) -> None:
    async with pool_of(policy) as pool:
        rescorer, _ = a_rescorer(pool)
        rescorer.offer([sampled(policy, 0, 0), sampled(policy, 0, 1), Sample(index=3)])
        assert len(rescorer._waiting) == 2


async def test_samples_that_find_no_room_are_dropped_counted_and_nobody_waits() -> None:
    rescorer, _ = a_rescorer(engine=None)
    for member in range(QUEUE_SAMPLES + 8):
        rescorer.offer(a_sample(0, member))
    assert rescorer.outcomes["dropped"] == 8
    assert len(rescorer._waiting) == QUEUE_SAMPLES


@pytest.mark.parametrize(
    "step",
    [
        (500, b'{"error":"broken"}'),
        b"no json",
        b"[]",
        b'{"meta_info":{}}',
        b'{"meta_info":{"input_token_logprobs":[[-0.1,99,null]]}}',
        b'{"meta_info":{"input_token_logprobs":[["x",4,null],[-0.1,4,null],[{},5,null]]}}',
    ],
)
async def test_an_engine_that_scores_nothing_fails_a_look_and_the_next_one_goes_on(
    policy: Policy, step: Any
) -> None:
    async with scripted(step) as engine, pool_of(policy) as good:
        bad = EnginePool([engine.url], max_token_id=10**6)
        engines = [bad, good]

        class Both:
            async def score(self, body: bytes, *, routing_key: str) -> bytes:
                return await engines.pop(0).score(body, routing_key=routing_key)

        rescorer, seen = a_rescorer(Both())
        outcomes = await scored(rescorer, a_sample(0, 0), sampled(policy, 0, 1))
        await bad.aclose()
    assert outcomes == {"failed": 1, "compared": 1}
    assert seen.mismatches == 0


async def test_a_hung_engine_costs_one_look_and_no_rollout() -> None:
    def hang(_: object) -> None:
        """Answer nothing."""

    async with scripted(hang) as engine:
        policy = RetryPolicy(request_timeout_s=0.05)
        pool = EnginePool([engine.url], max_token_id=10**6, policy=policy)
        rescorer, _ = a_rescorer(pool)
        assert await scored(rescorer, a_sample(0, 0)) == {"failed": 1}
        assert pool.healthy()
        await pool.aclose()


def chosen(fraction: float, seed: int = 7) -> set[int]:
    async def none() -> set[int]:
        rescorer, _ = a_rescorer(None, fraction, run_seed=seed)
        return {i for i in range(2000) if rescorer._is_chosen(Sample(index=i))}

    return asyncio.run(none())


@pytest.mark.parametrize(
    ("fraction", "low", "high"), [(0.0, 0, 0), (0.25, 420, 580), (1.0, 2000, 2000)]
)
def test_the_share_of_samples_is_what_was_asked_for_and_the_same_when_tried_again(
    fraction: float, low: int, high: int
) -> None:
    assert low <= len(chosen(fraction)) <= high
    assert chosen(fraction) == chosen(fraction)
    if 0 < fraction < 1:
        assert chosen(fraction, seed=8) != chosen(fraction)
