"""Which log-probs an engine reports, from what it says at two temperatures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault, Withheld
from worker.engines.fleet.logprob_mode import Mode, find_mode, mode_of, prompts
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

PROMPTS = prompts(151_668)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    total = math.log(float(np.exp(scaled - scaled.max()).sum()))
    return np.asarray(scaled - scaled.max() - total)


class AModel:
    """A model with random logits of 50 tokens, whose log-probs are reported in one way."""

    url = "http://model"
    aborts = failed_aborts = 0

    def __init__(self, report: str, *, sure: float = 1.0, noise: float = 0.0) -> None:
        self.report, self.sure, self.noise = report, sure, noise
        self.asked: list[tuple[bytes, Sampling]] = []
        self.broken: Callable[[int], bool] = lambda number: False
        self.random = np.random.default_rng(7)

    async def generate(self, prompt: RequestIds, sampling: Sampling, **_: Any) -> Completion:
        self.asked.append((prompt.pieces[0], sampling))
        if self.broken(len(self.asked)):
            raise EngineFault("broken", detail="server_error")
        logits = np.random.default_rng(len(prompt.pieces[0])).normal(0, 2, 50)
        logits[np.argmax(logits)] += self.sure
        kept = np.argsort(logits)[-sampling.top_k :]
        drawn = softmax(logits[kept], sampling.temperature)
        at = int(self.random.choice(len(kept), p=np.exp(drawn)))
        log_prob = {
            "raw": softmax(logits, 1.0)[kept[at]],
            "temperature": softmax(logits, sampling.temperature)[kept[at]],
            "processed": drawn[at],
        }[self.report] + self.random.normal(0, self.noise)
        return Completion(
            ids=np.array([kept[at]], dtype=np.int32),
            log_probs=np.array([log_prob], dtype=np.float32),
            json=b"",
            finish=Finish.LENGTH,
            versions=[],
            engine=self.url,
            rid="",
        )


async def mode(model: AModel) -> Mode:
    return await find_mode(model, 151_668, timeout_s=5.0, flights={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "found"),
    [("raw", Mode.RAW), ("temperature", Mode.SCALED), ("processed", Mode.SCALED)],
)
@pytest.mark.parametrize("noise", [0.0, 0.004])
async def test_mode_is_found_for_every_way_to_report(
    report: str, found: Mode, noise: float
) -> None:
    assert await mode(AModel(report, noise=noise)) is found


async def test_model_that_is_sure_of_everything_stays_undecided() -> None:
    assert await mode(AModel("raw", sure=60.0)) is Mode.UNDECIDED


async def test_engine_is_asked_one_token_at_both_temperatures_of_every_prompt() -> None:
    model = AModel("raw")
    await mode(model)
    assert {(s.temperature, s.max_new_tokens, s.top_k) for _, s in model.asked} == {
        (0.7, 1, 2),
        (1.4, 1, 2),
    }
    assert len({pieces for pieces, _ in model.asked}) == len(PROMPTS)
    seeds = {(pieces, s.seed) for pieces, s in model.asked if s.temperature == 0.7}
    assert seeds == {(pieces, s.seed) for pieces, s in model.asked if s.temperature == 1.4}


async def test_some_broken_answers_do_not_matter_and_all_are_a_fault() -> None:
    model = AModel("raw")
    model.broken = lambda number: number % 3 == 0
    assert await mode(model) is Mode.RAW
    model.broken = lambda number: True
    with pytest.raises(EngineFault, match="broken"):
        await mode(model)


async def test_questions_of_which_one_was_aborted_say_nothing() -> None:
    model = AModel("raw")
    answers = model.generate

    async def generate(prompt: RequestIds, sampling: Sampling, **options: Any) -> Completion:
        completion = await answers(prompt, sampling, **options)
        if len(model.asked) == 5:
            completion.finish = Finish.ABORT
        return completion

    model.generate = generate  # type: ignore[method-assign]
    with pytest.raises(Withheld):
        await mode(model)
    assert len(model.asked) == 24, "the others are not left alone"


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ([], Mode.UNDECIDED),
        ([(-0.01, -0.04)], Mode.UNDECIDED),
        ([(-1.0, -1.0)], Mode.RAW),
        ([(-1.0, -1.01), (-0.2, -0.2)], Mode.RAW),
        ([(-1.0, -1.3)], Mode.SCALED),
        ([(-1.0, -1.3), (-2.0, -2.0)], Mode.SCALED),
        ([(-1.0, -1.3), (-2.0, -2.0), (-3.0, -3.0)], Mode.UNDECIDED),
    ],
)
def test_mode_says_only_what_the_pairs_say(pairs: list[tuple[float, float]], found: Mode) -> None:
    assert mode_of(pairs) is found


@pytest.mark.parametrize("max_token_id", [0, 9, 151_668])
def test_prompts_are_ids_of_the_vocabulary(max_token_id: int) -> None:
    assert all(0 <= i <= max_token_id for prompt in prompts(max_token_id) for i in prompt)
