"""Rows of the real reasoning-gym as environments: its own scorer judges each try."""

from __future__ import annotations

from typing import Any

import pytest

from producer.sources.gym import GymSource
from rollstream.errors import EnvFault, StopReason
from rollstream.group import PromptGroup
from rollstream.sample import Sample
from rollstream.wire import decode_body, encode_body
from tests.generate_stage import check, chunks_of
from tests.unit.environments.stage import END, LONG_S, a_sample, play
from tests.unit.generate.weather import says
from worker.environments.gym import GymEnv
from worker.environments.load import LoadedEnvironment, load_environment


def a_row(name: str = "chain_sum") -> Sample:
    """Return a row as the producer makes it from the source `reasoning_gym:NAME`."""
    values = GymSource(f"{name}?size=3&seed=5").row(1).values
    return Sample(
        group_index=3, index=3, rollout_id=3, prompt=values["prompt"], label=values["label"],
        metadata=values["metadata"],
    )  # fmt: skip


def gym(tries: int = 1) -> LoadedEnvironment:
    name = "reasoning_gym" if tries == 1 else f"reasoning_gym?tries={tries}"
    return load_environment(name, timeout_s=LONG_S)


async def test_one_try_is_scored_as_the_reward_reasoning_gym_scores_it(qwen3: Any) -> None:
    from worker.rewards.gym import ReasoningGym

    row = a_row()
    for text in (f"It is \\boxed{{{row.label}}}.", f"<answer>{row.label}</answer>", "\\boxed{x}"):
        played = await play(qwen3, gym(), text, sample=row, prompt=row.prompt)
        check(played.sample, played.asked, played.replies)
        assert played.sample.stop_reason is StopReason.STOP
        assert played.sample.reward == ReasoningGym().score(row, text)
        assert played.sample.metadata["env"]["num_steps"] == 1


async def test_a_wrong_try_is_told_and_the_best_score_is_the_reward(qwen3: Any) -> None:
    row = a_row()
    texts = ("\\boxed{no}", f"\\boxed{{{row.label}}}")
    played = await play(qwen3, gym(3), *texts, sample=row, prompt=row.prompt)
    sample = played.sample
    check(sample, played.asked, played.replies)
    assert chunks_of(sample, qwen3.decode)[1] == (
        f"\n<|im_start|>user\nThat is not correct. Try again.{END}\n<|im_start|>assistant\n", 0,
    )  # fmt: skip
    notes = sample.metadata["env"]
    scores = [info["score"] for info in notes["infos"]]
    assert scores[0] < scores[1] == 1.0
    assert sum(notes["rewards"]) == sample.reward == 1.0


async def test_tries_end_and_partial_credit_counts_once(qwen3: Any) -> None:
    row = a_row()
    played = await play(qwen3, gym(2), "nothing", "nothing", sample=row, prompt=row.prompt)
    notes = played.sample.metadata["env"]
    scores = [info["score"] for info in notes["infos"]]
    assert (len(scores), notes["done"]) == (2, True)
    assert played.sample.reward == max(scores)


def test_a_step_is_rewarded_for_what_it_adds_to_the_best_score() -> None:
    scores = iter((0.25, 0.5, 0.125, 1.0))

    class Scorers:
        def score(self, sample: Sample, text: str) -> float:
            return next(scores)

    env = GymEnv(a_sample(), Scorers(), 9)  # type: ignore[arg-type]
    steps = [env.step({"role": "assistant", "content": "x"}) for _ in range(4)]
    assert [step.reward for step in steps] == [0.25, 0.25, 0.0, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]


async def test_an_episode_is_taken_up_with_the_tries_it_has_left(qwen3: Any) -> None:
    row = a_row()
    stopped = says(qwen3, "half", finish="abort")
    fields: dict[str, Any] = {"prompt": row.prompt, "parks": True}

    async def opened() -> None:
        raise AssertionError("an episode that can be parked waits for nothing")

    first = await play(qwen3, gym(2), "\\boxed{no}", stopped, sample=row, opened=opened, **fields)
    assert first.sample.stop_reason is StopReason.ABORT_WEIGHTS
    group = PromptGroup(group_index=3, n=1, prompt=row.prompt, label=row.label)
    parked = decode_body(encode_body(first.sample), group)
    assert isinstance(parked, Sample)
    second = await play(qwen3, gym(2), " done", sample=parked, opened=opened, **fields)
    assert second.sample.stop_reason is StopReason.STOP
    assert second.sample.metadata["env"]["num_steps"] == 2  # and there is no third


async def test_a_row_of_another_source_is_an_env_fault_that_says_what_is_missing(
    qwen3: Any,
) -> None:
    with pytest.raises(EnvFault, match="needs a source 'reasoning_gym:NAME'") as caught:
        await play(qwen3, gym(), "x")
    assert not caught.value.retryable
    assert a_sample().metadata == {}
