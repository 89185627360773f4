"""What a trajectory's reward is, whoever gives it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ConfigError, RewardFault
from rollstream.sample import Sample
from rollstream.settings import RewardTable
from rollstream.wire import encode_header
from tests.builders import a_prompt, a_sample
from worker.rewards import Scorer, build_scorer

MINE = Path(__file__).resolve().parents[2] / "data" / "functions" / "mine.py"
GROUP = a_prompt()


def scorer_of(renderer: Any, kind: str, *, run_seed: int = 0, **table: Any) -> Scorer:
    table = {"retry_backoff_s": 0.001} | table
    return build_scorer(RewardTable(kind=kind, **table), renderer=renderer, run_seed=run_seed)


def replied(renderer: Any, text: str, *, label: Any = "8", **fields: Any) -> Sample:
    """Return an unscored sample whose one turn has this text."""
    ids = renderer.encode_raw(text).tolist()
    response = renderer.decode(np.array(ids, dtype=np.int32))
    return a_sample(turns=[(ids, ())], label=label, reward=None, response=response, **fields)


async def reward_of(scorer: Scorer, sample: Sample) -> Any:
    await scorer.score(sample, GROUP)
    return sample.reward


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        (r"It is \boxed{42}.", 42, 1.0),
        (r"\boxed{wrong}", 42, 0.0),
        (r"\boxed{41} no, \boxed{42}", "42", 1.0),
        ("42", "42", 0.0),
        (r"\boxed{42}", r"so \boxed{42.0}", 1.0),
        ("<think>\n\\boxed{42}\n</think>\n\nI give up.<|im_end|>", "42", 0.0),
    ],
)
async def test_158_math_is_one_where_the_last_box_is_the_label(
    text: str, label: Any, reward: float, qwen3: Any
) -> None:
    assert await reward_of(scorer_of(qwen3, "math"), replied(qwen3, text, label=label)) == reward


@pytest.mark.parametrize("label", [None, {"a": 1}, True, ["8"]])
async def test_a_prompt_without_a_label_is_a_fault_and_not_a_zero(label: Any, qwen3: Any) -> None:
    sample = replied(qwen3, r"\boxed{8}", label=label)
    with pytest.raises(RewardFault, match="needs text or a number") as caught:
        await reward_of(scorer_of(qwen3, "math"), sample)
    assert not caught.value.retryable
    assert sample.reward is None


async def test_162_deterministic_random_repeats_and_varies(qwen3: Any) -> None:
    scorer = scorer_of(qwen3, "deterministic_random", run_seed=1)
    first = replied(qwen3, "one")
    again, other = replied(qwen3, "one"), replied(qwen3, "two")
    value = await reward_of(scorer, first)
    assert 0.0 <= value < 1.0
    assert await reward_of(scorer, again) == value
    assert await reward_of(scorer, other) != value
    changed = replied(qwen3, "one")
    changed.response += "!"
    assert await reward_of(scorer, changed) != value
    reseeded = scorer_of(qwen3, "deterministic_random", run_seed=2)
    assert await reward_of(reseeded, replied(qwen3, "one")) != value


async def test_a_function_of_ones_own_sees_the_final_text(qwen3: Any) -> None:
    sample = replied(qwen3, "<think>\nhm\n</think>\n\nfour<|im_end|>")
    assert await reward_of(scorer_of(qwen3, f"{MINE}:reward"), sample) == len("four")


async def test_a_sync_function_may_answer_a_dictionary(qwen3: Any) -> None:
    sample = replied(qwen3, "x")
    scorer = scorer_of(qwen3, f"{MINE}:reward_of_both", key="accuracy")
    reward = await reward_of(scorer, sample)
    assert reward == {"accuracy": True, "length": sample.response_length, "note": "fine"}
    encode_header(sample)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "reward.key does not say which counts"),
        ("accurracy", "'accurracy' is no number of it"),
        ("note", "'note' is no number of it"),
    ],
)
async def test_a_dictionary_without_its_entry_says_what_it_has_and_what_to_set(
    key: str | None, why: str, qwen3: Any
) -> None:
    sample = replied(qwen3, "x")
    with pytest.raises(RewardFault, match=f"accuracy, length, note, and {why}; set") as caught:
        await reward_of(scorer_of(qwen3, f"{MINE}:reward_of_both", key=key), sample)
    assert (caught.value.detail, caught.value.retryable) == ("invalid", False)
    assert sample.reward is None


def write(folder: Path, body: str) -> str:
    """Write a reward function of this body and return its path."""
    number = len(list(folder.iterdir()))
    file = folder / f"reward_{number}.py"
    file.write_text(
        "import asyncio, time\nimport numpy as np\n"
        f"async def f(sample):\n    {body}\n"
        "def g(sample):\n    time.sleep(0.3)\n"
    )
    return f"{file}:f"


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return 1", 1.0),
        ("return True", 1.0),
        ("return np.float64(0.5)", 0.5),
        ("return np.int64(2)", 2.0),
        ("return None", None),
        ("return {'a': np.float32(0.5), 'b': [1, None]}", {"a": 0.5, "b": [1, None]}),
    ],
)
async def test_verdicts_become_plain_numbers_and_none_stays_none(
    body: str, reward: Any, tmp_path: Path, qwen3: Any
) -> None:
    sample = replied(qwen3, "x")
    assert await reward_of(scorer_of(qwen3, write(tmp_path, body), key="a"), sample) == reward
    assert type(sample.reward) is type(reward)
    encode_header(sample)


async def test_a_nan_stays_for_the_judge_of_groups(tmp_path: Path, qwen3: Any) -> None:
    scorer = scorer_of(qwen3, write(tmp_path, "return float('nan')"))
    assert math.isnan(await reward_of(scorer, replied(qwen3, "x")))


@pytest.mark.parametrize(
    ("body", "detail", "num_tries"),
    [
        ("raise ValueError('boom')", "raised", 3),
        ("raise asyncio.CancelledError", "cancelled", 3),
        ("raise SystemExit(1)", "raised", 3),
        ("await asyncio.sleep(0.3)", "timeout", 3),
        ("return 'good'", "invalid", 1),
        ("return [1.0]", "invalid", 1),
        ("return {'a': object()}", "invalid", 1),
        ("return {'a': 1 << 80}", "invalid", 1),
        ("return {'a': 'x' * 70_000}", "too_large", 1),
        ("a = {}\n    a['a'] = a\n    return a", "invalid", 1),
        (
            "class Odd:\n        ndim = 0\n        def item(self): raise OSError\n    return Odd()",
            "invalid",
            1,
        ),
    ],
)
async def test_no_verdict_is_asked_for_again_where_that_may_help_and_is_never_a_zero(
    body: str, detail: str, num_tries: int, tmp_path: Path, qwen3: Any
) -> None:
    sample = replied(qwen3, "x")
    counted = f"sample.metadata['tries'] = sample.metadata.get('tries', 0) + 1\n    {body}"
    scorer = scorer_of(qwen3, write(tmp_path, counted), timeout_s=0.05, max_retries=2)
    with pytest.raises(RewardFault) as caught:
        await reward_of(scorer, sample)
    # Whoever judges the sample generates nothing again for a verdict.
    assert (caught.value.detail, caught.value.retryable) == (detail, False)
    assert sample.metadata["tries"] == num_tries
    assert ("(asked 3 times)" in caught.value.message) is (num_tries == 3)
    assert sample.reward is None


async def test_a_verdict_that_comes_late_is_the_reward(tmp_path: Path, qwen3: Any) -> None:
    body = (
        "tries = sample.metadata['tries'] = sample.metadata.get('tries', 0) + 1\n"
        "    if tries < 3: raise ConnectionError\n    return tries"
    )
    sample = replied(qwen3, "x")
    assert await reward_of(scorer_of(qwen3, write(tmp_path, body)), sample) == 3.0


async def test_a_sync_function_that_hangs_is_left_in_its_thread(tmp_path: Path, qwen3: Any) -> None:
    path = write(tmp_path, "return 1").replace(":f", ":g")
    with pytest.raises(RewardFault, match=r"did not return within 0\.05 s \(reward.timeout_s\)$"):
        await reward_of(scorer_of(qwen3, path, timeout_s=0.05), replied(qwen3, "x"))


async def test_our_own_cancellation_goes_through(tmp_path: Path, qwen3: Any) -> None:
    scorer = scorer_of(qwen3, write(tmp_path, "await asyncio.sleep(30)"))
    task = asyncio.create_task(scorer.score(replied(qwen3, "x"), GROUP))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaves_get_one_reward_that_of_the_last(qwen3: Any) -> None:
    leaves = [replied(qwen3, r"\boxed{9}"), replied(qwen3, r"\boxed{8}")]
    await scorer_of(qwen3, "math").score(leaves, GROUP)
    assert [leaf.reward for leaf in leaves] == [1.0, 1.0]


async def test_146_a_reward_that_is_there_is_kept_and_is_the_trajectorys(qwen3: Any) -> None:
    # The reference scores the other leaves by themselves; here leaves share one reward.
    leaves = [replied(qwen3, r"\boxed{8}"), replied(qwen3, r"\boxed{8}")]
    leaves[0].reward = 0.5
    await scorer_of(qwen3, "math").score(leaves, GROUP)
    assert [leaf.reward for leaf in leaves] == [0.5, 0.5]
    scalar = replied(qwen3, r"\boxed{8}")
    scalar.reward = 0.0
    assert await reward_of(scorer_of(qwen3, "math"), scalar) == 0.0


async def test_different_rewards_of_leaves_are_left_for_the_judge(qwen3: Any) -> None:
    leaves = [replied(qwen3, "x"), replied(qwen3, "x")]
    leaves[0].reward, leaves[1].reward = 0.0, 1.0
    await scorer_of(qwen3, "math").score(leaves, GROUP)
    assert [leaf.reward for leaf in leaves] == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["none", "math"])
async def test_nothing_to_judge_stays_no_verdict(kind: str, qwen3: Any) -> None:
    sample = Sample(label="8") if kind == "math" else replied(qwen3, r"\boxed{8}")
    assert await reward_of(scorer_of(qwen3, kind), sample) is None


async def test_reasoning_gym_scores_with_the_datasets_own_scorer(qwen3: Any) -> None:
    from reasoning_gym import create_dataset

    entry = create_dataset("chain_sum", size=1, seed=3)[0]
    metadata = {**entry["metadata"], "source_dataset": "chain_sum"}
    prompt = [{"role": "user", "content": entry["question"]}]
    scorer = scorer_of(qwen3, "reasoning_gym")
    await scorer.start()

    def answered(text: str, **fields: Any) -> Sample:
        known = {"label": entry["answer"], "metadata": dict(metadata), "prompt": prompt}
        return replied(qwen3, text, **(known | fields))

    right = entry["answer"]
    assert await reward_of(scorer, answered(f"<answer>{right}</answer>")) == 1.0
    assert await reward_of(scorer, answered(rf"\boxed{{{right}}}")) == 1.0
    assert await reward_of(scorer, answered(str(right))) == 1.0
    assert await reward_of(scorer, answered("<answer>x</answer>")) < 1.0
    with pytest.raises(RewardFault, match="has no 'source_dataset'"):
        await reward_of(scorer, answered("x", metadata={}))
    with pytest.raises(RewardFault, match="'nope' not registered"):
        await reward_of(scorer, answered("x", metadata={"source_dataset": "nope"}))
    await scorer.aclose()


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("maths", {}, "unknown reward 'maths'; did you mean 'math'?"),
        (f"{MINE}:absent", {}, "has no 'absent'"),
        (f"{MINE}:two", {}, "called with 1 argument"),
        ("math_verify", {"isolated": ()}, "only runs isolated; add it to reward.isolated"),
        ("math", {"isolated": (), "isolated_share": 0.5}, "only runs isolated"),
        ("math", {"isolated": ("python",)}, "what can run isolated is"),
    ],
)
def test_a_wrong_reward_is_one_error_at_the_start(
    kind: str, table: dict[str, Any], message: str, qwen3: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        scorer_of(qwen3, kind, **table)
