"""What may be a reward, and how much of one is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.errors import RewardFault
from worker.rewards.verdicts import MAX_REWARD_BYTES, checked, is_number


class Counted(list[Any]):
    """A list that goes on for long, and counts what was asked of it."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for self.asked in itertools.count(1):
            if self.asked > 1_000_000:
                return
            yield 1


def test_no_more_of_a_reward_is_looked_at_than_could_be_stored() -> None:
    long = Counted()
    with pytest.raises(RewardFault) as caught:
        checked({"score": 1.0, "long": long}, "mine")
    assert caught.value.detail == "too_large"
    assert long.asked <= MAX_REWARD_BYTES


def test_a_list_is_no_reward_however_long() -> None:
    long = Counted()
    with pytest.raises(RewardFault, match="returned Counted; it must return a number") as caught:
        checked(long, "mine")
    assert (caught.value.detail, long.asked) == ("invalid", 0)


def test_a_reward_of_just_what_may_be_stored_is_kept() -> None:
    reward = {"score": 1.0, "x": "y" * (MAX_REWARD_BYTES - 32), "flags": [True, None, 2]}
    assert checked(reward, "mine") == reward


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1, True), (0.5, True), (True, False), ("1", False), (float("nan"), False), (10**400, False)],
)
def test_a_number_is_one_that_a_float_holds(value: Any, is_one: bool) -> None:
    assert is_number(value) is is_one
