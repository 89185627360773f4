"""Log-probs that name the weights that sampled them: pure, and told apart by the number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.policy import Policy, expected_log_prob, expected_log_probs, sampled_by

IDS = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
TEMPERATURES = (0.0, 0.7, 1.0, 1.4)


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


def test_log_prob_without_a_version_is_the_one_that_auditors_have_always_known() -> None:
    said = expected_log_probs(IDS, 4).tolist()
    golden = [
        -1.7832320928573608,
        -0.07836918532848358,
        -0.023586468771100044,
        -0.5346989035606384,
        -5.3215403568174224e-06,
        -0.7927544116973877,
        -0.0986800417304039,
        -0.13659560680389404,
    ]
    assert said == golden


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("version", [None, "7", "step-7"])
def test_one_token_at_a_time_gives_the_bits_of_all_at_once(
    temperature: float, version: str | None
) -> None:
    at_once = expected_log_probs(IDS, 3, temperature=temperature, version=version)
    single = [
        expected_log_prob(IDS[:at], IDS[at], temperature=temperature, version=version)
        for at in range(3, len(IDS))
    ]
    assert np.array(single, dtype=np.float32).tobytes() == at_once.tobytes()


def test_version_is_the_label_whether_text_or_number() -> None:
    text, number = (expected_log_probs(IDS, 0, version=one) for one in ("7", 7))
    assert text.tobytes() == number.tobytes()


@settings(deadline=None, max_examples=30)
@given(
    labels=st.lists(st.sampled_from(["default", "0", "1", "2", "step-9"]), min_size=9, max_size=9),
    temperature=st.sampled_from(TEMPERATURES),
)
def test_each_token_tells_the_weights_that_sampled_it(
    labels: list[str], temperature: float
) -> None:
    said = expected_log_probs(IDS, 3, temperature=temperature, version=labels)
    everything = ["default", "0", "1", "2", "step-9"]
    assert sampled_by(IDS, 3, said, everything, temperature=temperature) == labels
    others = [label for label in everything if label != labels[0]]
    assert sampled_by(IDS, 3, said, others, temperature=temperature)[0] is None


def test_a_changed_context_or_temperature_is_told_as_of_no_weights() -> None:
    said = expected_log_probs(IDS, 3, version="1")
    assert sampled_by([8, *IDS[1:]], 3, said, [0, 1, 2]) == [None] * 9
    assert sampled_by(IDS, 3, said, [0, 1, 2], temperature=0.7) == [None] * 9


def test_mismatch_finds_a_span_that_claims_other_weights_and_one_that_is_too_short(
    policy: Policy,
) -> None:
    prompt, sampling = [1, 2, 3], {"seed": 5, "max_new_tokens": 9, "temperature": 1.0}
    ids, _ = policy.expected(prompt, sampling)
    said = policy.score(np.array([*prompt, *ids], dtype=np.int32), 3, 1.0, ["4"] * 6 + ["5"] * 3)

    def mismatch(*spans: tuple[int, int, int]) -> str | None:
        return policy.mismatch(prompt, sampling, ids, said, spans)

    assert mismatch((4, 0, 6), (5, 6, 9)) is None
    assert "log-prob 5" in str(mismatch((4, 0, 5), (5, 5, 9)))
    assert "log-prob 6" in str(mismatch((4, 0, 9)))
    assert "versions of 8" in str(mismatch((4, 0, 6), (5, 6, 8)))
    assert "log-prob 0" in str(policy.mismatch(prompt, sampling, ids, said))
