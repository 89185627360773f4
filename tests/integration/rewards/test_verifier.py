"""Rewards that run isolated, over a real verifier."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import RewardFault
from rollstream.sample import Sample
from rollstream.settings import RewardTable
from tests.builders import a_prompt, a_sample
from tests.integration.isolation.parts import asking, end, start_verifier
from worker.rewards import Scorer, build_scorer

pytestmark = [pytest.mark.xdist_group("verifier"), pytest.mark.slow]

OWN = Path(__file__).resolve().parents[2] / "data" / "functions" / "isolated_rewards.py"
LENGTH, BREAKS = f"{OWN}:length", f"{OWN}:breaks"
ISOLATED = ("math_verify", "code", LENGTH, BREAKS)
ADD = {"entry": "add", "cases": [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]}


@pytest.fixture(scope="module")
def verifier(valkey_url: str) -> Iterator[subprocess.Popen[str]]:
    listed = ", ".join(f'"{name}"' for name in ISOLATED)
    process = start_verifier(valkey_url, "--reward.isolated", f"[{listed}]", processes=2)
    yield process
    end(process)


@asynccontextmanager
async def scoring(url: str, run: str, renderer: Any, **table: Any) -> AsyncIterator[Scorer]:
    known = {"isolated": ISOLATED, "retry_backoff_s": 0.01, "timeout_s": 15.0}
    async with asking(url, run) as isolated:
        scorer = build_scorer(
            RewardTable(**(known | table)), renderer=renderer, run_seed=0, isolated=isolated
        )
        yield scorer
        await scorer.aclose()


def replied(renderer: Any, text: str, member: int = 0, **fields: Any) -> Sample:
    ids = renderer.encode_raw(text).tolist()
    return a_sample(0, member, turns=[(ids, ())], reward=None, **fields)


async def reward_of(scorer: Scorer, sample: Sample) -> Any:
    await scorer.score(sample, a_prompt())
    return sample.reward


async def test_the_isolated_share_is_the_same_samples_every_time(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    async with scoring(valkey_url, run_name, qwen3, isolated_share=0.5) as scorer:

        async def reward(member: int) -> Any:
            # Equal as mathematics, different as strings: 1.0 says that math-verify judged.
            return await reward_of(scorer, replied(qwen3, r"\boxed{1+x}", member, label="x+1"))

        first = await asyncio.gather(*map(reward, range(16)))
        assert {0.0, 1.0} == set(first)
        assert 3 <= sum(first) <= 13
        assert await asyncio.gather(*map(reward, range(16))) == first


@pytest.mark.parametrize(
    ("kind", "text", "label", "reward"),
    [
        ("math_verify", "<answer>1+x</answer>", "x+1", 1.0),
        ("boxed_math_verify", r"<answer>7</answer> \boxed{1+x}", "x+1", 1.0),
        ("boxed_math_verify", "x+1", "x+1", 0.0),
        ("code", "```python\ndef add(a, b):\n    return a + b\n```", ADD, 1.0),
        ("code", "```python\ndef add(a, b):\n    return 3\n```", ADD, 0.0),
        ("code", "```python\nadd = 5 /\n```", ADD, 0.0),
        ("code", "```python\nimport os\nos._exit(0)\n```", ADD, 0.0),
        ("code", "print(int(input()) * 2)", [{"input": "4", "output": "8"}], 1.0),
        ("code", "```py\nf = abs\n```", ["assert f(-1) == 1"], 1.0),
        ("code", "```py\nf = abs\n```", ["assert f(-1) == -1"], 0.0),
    ],
)
async def test_right_and_wrong_replies_get_their_rewards(
    kind: str, text: str, label: Any, reward: float, verifier: Any, valkey_url: str, run_name: str,
    qwen3: Any,
) -> None:  # fmt: skip
    async with scoring(valkey_url, run_name, qwen3, kind=kind) as scorer:
        assert await reward_of(scorer, replied(qwen3, text, label=label)) == reward


@pytest.mark.parametrize(("entry", "reward"), [("g", 1.0), ("h", 0.0)])
async def test_a_check_is_called_with_the_function_that_the_row_names(
    entry: str, reward: float, verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    text = "```python\ndef g(x):\n    return x\n\ndef h(x):\n    return -x\n```"
    check = "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\n"
    sample = replied(qwen3, text, label=check, metadata={"entry_point": entry})
    async with scoring(valkey_url, run_name, qwen3, kind="code") as scorer:
        assert await reward_of(scorer, sample) == reward


async def test_a_program_may_be_paid_for_the_tests_that_it_passed(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    text = "```python\ndef add(a, b):\n    return 3\n```"
    sample = replied(qwen3, text, label=ADD, metadata={"partial": True})
    async with scoring(valkey_url, run_name, qwen3, kind="code", key="passed") as scorer:
        assert await reward_of(scorer, sample) == {"score": 0.5, "passed": 1, "total": 2}
    assert len(sample.metadata["code"]["problems"]) == 1


async def test_a_program_that_hangs_is_wrong_and_not_without_a_verdict(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    text = "```python\ndef add(a, b):\n    while True: pass\n```"
    sample = replied(qwen3, text, label=ADD, metadata={"timeout_s": 0.5})
    async with scoring(valkey_url, run_name, qwen3, kind="code") as scorer:
        assert await reward_of(scorer, sample) == 0.0


async def test_a_function_of_ones_own_runs_isolated_and_its_death_is_no_verdict(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    async with scoring(valkey_url, run_name, qwen3, kind=LENGTH, key="length") as scorer:
        sample = replied(qwen3, "eight<|im_end|>", label="8", metadata={"level": 2})
        assert await reward_of(scorer, sample) == {"length": 5, "level": 2, "label": "8"}
    async with scoring(valkey_url, run_name, qwen3, kind=BREAKS, max_retries=0) as scorer:
        for text, detail in (("raise", "raised"), ("die", "crashed")):
            with pytest.raises(RewardFault) as caught:
                await reward_of(scorer, replied(qwen3, text))
            assert caught.value.detail == detail
    async with scoring(valkey_url, run_name, qwen3, kind="math_verify") as scorer:
        assert await reward_of(scorer, replied(qwen3, "8", label="8")) == 1.0


async def test_a_function_that_only_the_worker_lists_is_not_run(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    path = f"{OWN}:unlisted"
    async with scoring(
        valkey_url, run_name, qwen3, kind=path, isolated=(path,), max_retries=0
    ) as scorer:
        with pytest.raises(RewardFault, match="no job is called"):
            await reward_of(scorer, replied(qwen3, "x"))
