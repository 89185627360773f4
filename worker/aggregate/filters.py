"""The built-in filters: pure functions that keep or drop a full group.

Owns what each filter means for every odd value. Never reads a body, never does I/O.
Invariant: a filter speaks of MEMBERS, so a trajectory with nine leaves weighs as much as one, and
"no verdict" (None, NaN, a dictionary without its key) never counts as the number 0.

Axis: G usable members of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rollstream.errors import DropReason, Status
from rollstream.group import Drop, GroupView, Keep, MemberView

FilterAnswer: TypeAlias = Keep | Drop
FilterFunction: TypeAlias = Callable[[GroupView], FilterAnswer]

STD_EPSILON = 1e-6
"""Rewards whose spread is at most this differ by rounding only."""
ROUNDING = 1e-9
_HUGE_SPREAD = 1e100
_KEEP = Keep()


def no_aborted() -> FilterFunction:
    """Drop a group in which any member, or any leaf of one, was aborted.

    Looks at all members, usable or not. A member that the queue itself ended (crashed, deadline)
    is failed rather than aborted: `min_samples` decides about those.
    """

    def judge(group: GroupView) -> FilterAnswer:
        aborted = [str(m.member) for m in group.members if _has_aborted(m)]
        if not aborted:
            return _KEEP
        return Drop(DropReason.NO_ABORTED, f"aborted: member {', '.join(aborted)}")

    return judge


def _has_aborted(member: MemberView) -> bool:
    header = member.header
    if header is None or len(header.leaves) == 1:
        return member.status is Status.ABORTED
    return any(leaf.status is Status.ABORTED for leaf in header.leaves)


def reward_nonzero_std(
    threshold: float = STD_EPSILON, *, keep_when_insufficient: bool = False
) -> FilterFunction:
    """Drop a group whose usable rewards do not differ: population std <= `threshold`.

    Kept: n = 1 (it has no spread to ask for), and a group whose reward the trainer computes
    (`reward = "none"`). One usable member left of several is dropped, unless
    `keep_when_insufficient`.
    """
    if not threshold >= 0:
        raise ValueError(f"reward_nonzero_std: the threshold is {threshold}, expected >= 0")

    def judge(group: GroupView) -> FilterAnswer:
        usable = group.usable
        if group.n == 1 or any(member.reward is None for member in usable):
            return _KEEP
        if len(usable) < 2:
            if keep_when_insufficient and usable:
                return _KEEP
            return Drop(DropReason.ZERO_STD, f"{len(usable)} usable of {group.n}: no spread")
        rewards = group.rewards
        std = population_std(rewards)
        if std > threshold:
            return _KEEP
        found = f"std {std:.3g} of {len(rewards)} rewards around {rewards[0]:g}"
        return Drop(DropReason.ZERO_STD, f"{found}, more than {threshold:g} is needed")

    return judge


def population_std(values: Sequence[float]) -> float:
    """Return the standard deviation over all G values, exact where they are equal.

    Values are shifted by the least one first: equal values give exactly 0.0 however large, and
    a spread that floats cannot square is inf.
    """
    low = min(values)
    spread = max(values) - low
    if spread > _HUGE_SPREAD:
        return math.inf
    shifted = [value - low for value in values]
    mean = sum(shifted) / len(shifted)
    return math.sqrt(sum((value - mean) ** 2 for value in shifted) / len(shifted))


def reward_range(low: float, high: float) -> FilterFunction:
    """Drop a group whose mean usable reward lies outside `low`..`high`, both included.

    A mean that misses a bound by rounding only (a billionth of it) is at the bound. Kept: a group
    without a reward, which the trainer scores.
    """
    if not low <= high:
        raise ValueError(f"reward_range: {low} is above {high}")

    def judge(group: GroupView) -> FilterAnswer:
        rewards = group.rewards
        if not rewards:
            return _KEEP
        mean = math.fsum(value / len(rewards) for value in rewards)
        if low <= mean <= high or _meets(mean, low) or _meets(mean, high):
            return _KEEP
        return Drop(DropReason.RANGE, f"mean {mean:.4g} outside {low:g}..{high:g}")

    return judge


def _meets(mean: float, bound: float) -> bool:
    return math.isclose(mean, bound, rel_tol=ROUNDING, abs_tol=ROUNDING)


def min_ok(k: int) -> FilterFunction:
    """Drop a group with fewer than `k` members that completed (truncated ones do not count).

    A group of fewer than `k` needs all of them.
    """
    if k < 1:
        raise ValueError(f"min_ok: {k} is not a number of members; give at least 1")

    def judge(group: GroupView) -> FilterAnswer:
        completed = sum(member.status is Status.COMPLETED for member in group.usable)
        needed = min(k, group.n)
        if completed >= needed:
            return _KEEP
        return Drop(DropReason.MIN_OK, f"{completed} of {group.n} completed, {needed} are needed")

    return judge


def length(max_tokens: int, *, min_tokens: int = 0) -> FilterFunction:
    """Drop a group whose longest or shortest usable response is out of bounds.

    Unit: response tokens of a member, its leaves summed.
    """
    if not 0 <= min_tokens <= max_tokens:
        raise ValueError(f"length: {min_tokens}..{max_tokens} is not a range of token counts")

    def judge(group: GroupView) -> FilterAnswer:
        for member in group.usable:
            if member.header is None:
                continue
            tokens = sum(leaf.response_length for leaf in member.header.leaves)
            if not min_tokens <= tokens <= max_tokens:
                found = f"member {member.member} has {tokens} tokens"
                return Drop(DropReason.LENGTH, f"{found}, {min_tokens}..{max_tokens} are allowed")
        return _KEEP

    return judge


BUILT_IN: dict[str, Callable[..., FilterFunction]] = {
    "no_aborted": no_aborted,
    "reward_nonzero_std": reward_nonzero_std,
    "reward_range": reward_range,
    "min_ok": min_ok,
    "length": length,
}
"""Name in the configuration → factory that takes the arguments written behind it."""
