"""Samples of a real model, scored again by it, by another one, and in either log-prob mode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollstream import rescore
from rollstream.cli.logprobs import ask
from rollstream.sample import Sample
from tests.generate_stage import given
from tests.hf import NOISE, VOCABULARY, Hf, need_torch, running, write_model
from tests.toy import HI, toy_renderer
from worker.engines.fleet.pool import EnginePool
from worker.generate import single_turn
from worker.sampling import Sampling

need_torch()

OPTIONS = ("--max-batch", "8", "--prefix-cache-mb", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hf(folder: Path) -> Iterator[Hf]:
    with running(folder, *OPTIONS) as engine:
        yield engine


async def sampled(engine: Hf, temperatures: Sequence[float]) -> list[Sample]:
    """Return one sample of each temperature, by the worker's own client."""
    pool = EnginePool([engine.url], max_token_id=VOCABULARY - 1)
    samples = []
    for member, temperature in enumerate(temperatures):
        sampling = Sampling(temperature=temperature, max_new_tokens=48)
        stage = given(pool, toy_renderer(), HI, member=member, sampling=sampling)
        sample = (await single_turn(stage)).samples
        assert isinstance(sample, Sample)
        samples.append(sample)
    await pool.aclose()
    return samples


async def scored(engine: Hf, samples: Sequence[Sample], *, mode: str = "") -> rescore.Summary:
    """Score samples as `doctor --logprobs` does."""
    comparisons = []
    for sample in samples:
        for call in sample.calls:
            call.logprob_mode = sample.logprob_mode = mode or call.logprob_mode
        reply = await asyncio.to_thread(ask, engine.url, sample)
        served = rescore.served_version(reply["meta_info"]["weight_version"], current=0)
        comparison = rescore.compare(sample, rescore.scores_of(sample, reply), served=served)
        comparisons.append(comparison)
    return rescore.summarise(comparisons)


async def test_a_model_scores_what_it_sampled_as_it_sampled_it(hf: Hf) -> None:
    samples = await sampled(hf, [1.0] * 6)
    summary = await scored(hf, samples)
    (row,) = summary.rows
    assert row.relation == "same"
    assert row.positions == sum(sample.num_sampled for sample in samples) > 50
    assert row.max < NOISE
    assert summary.problems == []


async def test_the_mode_of_a_model_that_records_its_temperature_is_told(hf: Hf) -> None:
    summary = await scored(hf, await sampled(hf, [1.0, 0.6, 1.0, 0.6, 1.0, 0.6]))
    assert (summary.mode, summary.problems) == ("temperature", [])
    assert summary.not_comparable["temperature"] > 0


async def test_the_mode_of_a_model_that_records_raw_log_probs_is_told(folder: Path) -> None:
    with running(folder, *OPTIONS, "--logprob-mode", "raw") as engine:
        samples = await sampled(engine, [0.6] * 4)
        wrong = await scored(engine, samples, mode="temperature")
        right = await scored(engine, samples, mode="raw")
    assert wrong.mode == right.mode == "raw"
    assert len(wrong.problems) == 1
    assert right.problems == []
    assert right.compared == sum(sample.num_sampled for sample in samples)


async def test_other_weights_and_a_wrong_token_are_told(
    hf: Hf, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = await sampled(hf, [1.0] * 3)
    with running(write_model(tmp_path_factory.mktemp("other"), seed=1), *OPTIONS) as other:
        assert len((await scored(other, samples)).problems) == 1
    sample = samples[1]
    at = sample.prompt_length + 2
    sample.tokens = sample.tokens.copy()
    sample.tokens[at] = (sample.tokens[at] + 1) % 256 + 1000
    summary = await scored(hf, samples)
    assert summary.first is not None
    assert (summary.first.sample, summary.first.position) == ("3:1", at)
    assert len(summary.problems) == 1
