"""Whose turn it is: group indexes dealt to environments by weight.

Owns the pattern of one period, which repeats. Never knows rows or sources. Invariants: a pure
function of the weights; over the groups 0..k-1, for every k, each environment has less than one
group more or less than its share of k; after each period exactly its share.

The rule is Tijdeman's for the chairman assignment problem (Discrete Mathematics 32, 1980): of those
who are owed most, the one whose turn cannot wait longest. It keeps every beginning within
1 - 1/(2m - 2) of its share for m environments, so any stretch is within 2 - 1/(m - 1): one group
for two environments, less than two for more. (Nobody can do with one for all weights: halves,
thirds and sixths cannot each be evenly spaced.)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rollstream.errors import ConfigError

MAX_PERIOD = 10_000
"""Weights with a longer period are rounded to it: four decimals of a share are kept exactly."""


class Rhythm:
    """The pattern of whole-numbered weights.

    Example:
        Rhythm([2, 1]) deals 0, 1, 0, 0, 1, 0, …
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._turns = array("I")
        """[period]: whose turn it is."""
        self._before = array("I")
        """[period]: turns that it had before, in this period."""
        counts = [0] * len(weights)
        for turn in _deal(self.weights):
            self._turns.append(turn)
            self._before.append(counts[turn])
            counts[turn] += 1

    def turn(self, group_index: int) -> tuple[int, int]:
        """Return whose turn a group is, and how many it had before."""
        rounds, place = divmod(group_index, self.period)
        whose = self._turns[place]
        return whose, rounds * self.weights[whose] + self._before[place]


def _deal(weights: tuple[int, ...]) -> list[int]:
    """Return one period; all comparisons are between whole numbers, so machines agree."""
    num, period = len(weights), sum(weights)
    if num == 1:
        return [0] * period
    slack = 2 * num - 2
    counts = [0] * num
    dealt = []
    for step in range(1, period + 1):
        owed = [
            weight * step - period * count for weight, count in zip(weights, counts, strict=True)
        ]
        whose = min(
            (place for place in range(num) if slack * owed[place] >= period),
            key=lambda place: Fraction((slack - 1) * period - slack * owed[place], weights[place]),
        )
        counts[whose] += 1
        dealt.append(whose)
    return dealt


def whole_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest whole numbers in the same ratio, or the nearest of `MAX_PERIOD` slots.

    Raises:
        ConfigError: one share is too small to be told apart from none.
    """
    # By their decimals: 0.1 is a tenth here, not the binary number next to it.
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    common = math.gcd(*whole.values())
    whole = {name: weight // common for name, weight in whole.items()}
    total = sum(whole.values())
    if total <= MAX_PERIOD:
        return whole
    for name, weight in whole.items():
        if weight * MAX_PERIOD < total:
            raise ConfigError(
                f"env.{name}.weight = {weights[name]}: less than one group of {MAX_PERIOD} would "
                f"be of env.{name}; raise its weight, or take its source away"
            )
    slots = {name: weight * MAX_PERIOD // total for name, weight in whole.items()}
    # Largest remainders get what is left over; among equals the first by name.
    by_remainder = sorted(whole, key=lambda name: (-(whole[name] * MAX_PERIOD % total), name))
    for name in by_remainder[: MAX_PERIOD - sum(slots.values())]:
        slots[name] += 1
    return slots
