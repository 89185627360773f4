"""Whose turn it is: shares that hold over every beginning, the same for ever."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.rhythm import MAX_PERIOD, Rhythm, whole_weights
from rollstream.errors import ConfigError

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@given(WEIGHTS)
def test_rhythm_keeps_every_beginning_within_one_group_of_its_shares(weights: list[int]) -> None:
    rhythm, num = Rhythm(weights), len(weights)
    bound = 1 - Fraction(1, 2 * num - 2) if num > 1 else Fraction(0)
    counts = [0] * num
    for k in range(2 * rhythm.period):
        whose, before = rhythm.turn(k)
        assert before == counts[whose]
        counts[whose] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - Fraction(weight * (k + 1), rhythm.period)) <= bound
    assert counts == [2 * weight for weight in weights]


@given(WEIGHTS)
def test_rhythm_keeps_any_stretch_within_two_groups_and_of_two_environments_within_one(
    weights: list[int],
) -> None:
    rhythm, num = Rhythm(weights), len(weights)
    turns = [rhythm.turn(k)[0] for k in range(2 * rhythm.period)]
    bound = 2 - Fraction(1, num - 1) if num > 1 else Fraction(0)
    for whose, weight in enumerate(weights):
        ahead = [Fraction(0)]
        for k, turn in enumerate(turns, 1):
            ahead.append(ahead[-1] + (turn == whose) - Fraction(weight, rhythm.period))
            assert len(ahead) == k + 1
        assert max(ahead) - min(ahead) <= bound


@given(WEIGHTS, st.integers(0, 2**51))
def test_rhythm_goes_on_behind_any_number_of_periods(weights: list[int], rounds: int) -> None:
    rhythm = Rhythm(weights)
    for place in range(rhythm.period):
        whose, before = rhythm.turn(place)
        later = rhythm.turn(rounds * rhythm.period + place)
        assert later == (whose, before + rounds * weights[whose])


def test_rhythm_of_weights_is_what_it_was_in_earlier_releases() -> None:
    # Golden: a change here would train running jobs on other prompts than their ids stand for.
    dealt = "".join("abc"[Rhythm([6, 3, 1]).turn(k)[0]] for k in range(10))
    assert dealt == GOLDEN


GOLDEN = "abaabacaba"


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 7, "b": 2, "c": 1}),
        ({"a": 1.0, "b": 1.0}, {"a": 1, "b": 1}),
        ({"a": 5e-324}, {"a": 1}),
        ({"a": 0.0003, "b": 0.9997}, {"a": 3, "b": 9997}),
        ({"a": 0.333333, "b": 0.666667}, {"a": 3333, "b": 6667}),
        ({"a": 2e20, "b": 1e20}, {"a": 2, "b": 1}),
        (dict.fromkeys("abc", 0.1234567), {"a": 1, "b": 1, "c": 1}),
        ({"a": 3334.3, "b": 3333.3, "c": 3333.4}, {"a": 3334, "b": 3333, "c": 3333}),
    ],
)
def test_weights_are_taken_by_their_decimals(
    weights: Mapping[str, float], whole: Mapping[str, int]
) -> None:
    assert whole_weights(weights) == whole
    assert sum(whole.values()) <= MAX_PERIOD


def test_a_share_that_comes_to_nothing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"env\.b\.weight = 1e-05: less than one group of 10000"):
        whole_weights({"a": 1.0, "b": 1e-5})
