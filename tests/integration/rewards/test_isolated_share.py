"""The share of samples that an isolated reward scores, over a real verifier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.sample import Sample
from rollstream.settings import RewardTable
from tests.builders import a_prompt, a_sample
from tests.integration.isolation.parts import asking, end, start_verifier
from worker.rewards import build_scorer

pytestmark = pytest.mark.xdist_group("verifier")


async def test_the_isolated_share_is_the_same_samples_every_time(
    valkey_url: str, run_name: str, qwen3: Any
) -> None:
    verifier = start_verifier(valkey_url)
    try:
        async with asking(valkey_url, run_name) as isolated:
            scorer = build_scorer(
                RewardTable(kind="math", isolated_share=0.5),
                renderer=qwen3,
                run_seed=0,
                isolated=isolated,
            )
            ids = qwen3.encode_raw(r"\boxed{1+x}").tolist()

            async def reward(member: int) -> Any:
                # Equal as mathematics, different as strings: 1.0 says that math-verify judged.
                sample: Sample = a_sample(0, member, turns=[(ids, ())], label="x+1", reward=None)
                await scorer.score(sample, a_prompt())
                return sample.reward

            first = await asyncio.gather(*map(reward, range(16)))
            assert {0.0, 1.0} == set(first)
            assert 3 <= sum(first) <= 13
            assert await asyncio.gather(*map(reward, range(16))) == first
            await scorer.aclose()
    finally:
        end(verifier)
