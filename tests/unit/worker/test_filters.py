"""Filters: what each does with every value a reward can have (cases H, conformance 147)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollstream.errors import DropReason, StopReason
from rollstream.group import Drop, GroupView, Keep
from worker.aggregate.filters import (
    length,
    min_ok,
    no_aborted,
    population_std,
    reward_nonzero_std,
    reward_range,
)

from .views import DEADLINE, header, leaf, rewarded, view


def reason_of(answer: Keep | Drop) -> str:
    return "keep" if isinstance(answer, Keep) else answer.reason


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), "keep"),
        ((1.0, 1.0), "zero_std"),
        ((1, 1), "zero_std"),
        ((True, False), "keep"),
        ((True, 1.0), "zero_std"),
        ((1.0, 1.0, 1.0000000010), "zero_std"),
        ((0.1 + 0.2, 0.3), "zero_std"),
        ((0.3, 0.3), "zero_std"),
        ((0.42, 0.42, 0.42, 0.42), "zero_std"),
        ((1e300, -1e300), "keep"),
        ((1e308, 1e308), "zero_std"),
        ((1e16, 1e16 + 4), "keep"),
        ((5.0,), "keep"),
    ],
)
def test_reward_nonzero_std_keeps_a_group_exactly_when_its_rewards_differ(
    rewards: tuple[Any, ...], expected: str
) -> None:
    assert reason_of(reward_nonzero_std()(rewarded(*rewards))) == expected


def test_reward_nonzero_std_takes_its_threshold_as_an_argument() -> None:
    spread = rewarded(0.0, 0.1)  # population std 0.05

    assert reason_of(reward_nonzero_std(0.049)(spread)) == "keep"
    assert reason_of(reward_nonzero_std(0.05)(spread)) == "zero_std"


def test_reward_nonzero_std_judges_the_spread_even_where_the_mean_is_in_range() -> None:
    group = rewarded(0.42, 0.42, 0.42, 0.42)

    assert reason_of(reward_range(0.1, 0.9)(group)) == "keep"
    assert reason_of(reward_nonzero_std()(group)) == "zero_std"


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, "1", {"acc": 1.0}, [1.0]])
def test_a_reward_that_is_no_number_is_no_verdict_and_leaves_the_statistics(odd: Any) -> None:
    group = rewarded(1.0, odd, 0.0, 1.0)

    assert group.rewards == [1.0, 0.0, 1.0]
    assert [m.member for m in group.members if m.missing] == [1]
    missing = group.members[1].missing
    assert missing is not None
    assert missing.reason == "reward_error"
    assert missing.error == ("missing" if odd is None else "invalid")
    assert reason_of(reward_nonzero_std()(group)) == "keep"


def test_a_reward_dictionary_counts_by_its_key() -> None:
    group = rewarded({"acc": 1, "x": 0}, {"acc": 0}, reward_key="acc")

    assert group.rewards == [1.0, 0.0]
    assert reason_of(reward_nonzero_std()(group)) == "keep"


def test_reward_nonzero_std_drops_what_is_left_of_a_group_with_one_usable_member() -> None:
    left = rewarded(1.0, None, None, None)

    assert reason_of(reward_nonzero_std()(left)) == "zero_std"
    assert reason_of(reward_nonzero_std(keep_when_insufficient=True)(left)) == "keep"


def test_reward_nonzero_std_keeps_a_group_that_the_trainer_scores() -> None:
    assert reason_of(reward_nonzero_std()(rewarded(None, None, needs_reward=False))) == "keep"


def test_infrastructure_failures_leave_the_statistics_and_truncated_members_stay() -> None:
    group = view(
        [
            header(leaf(1.0)),
            header(leaf(0.0)),
            header(leaf(0.0, StopReason.RESPONSE_LENGTH)),
            ("engine_error", "connection lost"),
        ]
    )

    assert group.rewards == [1.0, 0.0, 0.0]
    assert [m.member for m in group.usable] == [0, 1, 2]


@pytest.mark.parametrize("stop", [StopReason.ABORT_REQUESTED, StopReason.NO_MODEL_CALL])
def test_no_aborted_drops_a_group_with_any_aborted_member(stop: StopReason) -> None:
    group = view([header(leaf(1.0)), header(leaf(None, stop))])

    answer = no_aborted()(group)

    assert answer == Drop(DropReason.NO_ABORTED, "aborted: member 1")


def test_no_aborted_looks_into_the_leaves_of_a_list_result() -> None:
    nested = header(leaf(1.0), leaf(1.0, StopReason.ABORT_REQUESTED), leaf(1.0))
    failed_too = header(leaf(1.0, StopReason.ABORT_REQUESTED), leaf(1.0, StopReason.AGENT_ERROR))

    assert reason_of(no_aborted()(view([header(leaf(0.0)), nested]))) == "no_aborted"
    assert reason_of(no_aborted()(view([header(leaf(0.0)), failed_too]))) == "no_aborted"


def test_no_aborted_leaves_members_that_the_queue_ended_to_min_samples() -> None:
    group = view([header(leaf(1.0)), header(leaf(0.0)), DEADLINE])

    assert reason_of(no_aborted()(group)) == "keep"


def as_lists(group: GroupView, leaves: int) -> GroupView:
    return view(
        [header(*m.header.leaves * leaves, is_list=True) for m in group.members if m.header]
    )


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, 1.0), (0.25, 0.5, 0.5)])
def test_a_trajectory_of_nine_leaves_weighs_as_much_as_one_sample(
    rewards: tuple[float, ...],
) -> None:
    flat = rewarded(*rewards)
    nested = as_lists(flat, leaves=9)

    assert nested.rewards == flat.rewards
    for judge in (reward_nonzero_std(), no_aborted(), reward_range(0.3, 0.6), min_ok(2)):
        assert judge(nested) == judge(flat)


def test_leaves_with_different_rewards_are_a_reward_error_of_their_member() -> None:
    group = view([header(leaf(1.0), leaf(0.0)), header(leaf(1.0))])

    missing = group.members[0].missing
    assert missing is not None
    assert missing.reason == "reward_error"
    assert group.rewards == [1.0]


def test_reward_range_judges_the_mean_of_the_usable_members() -> None:
    assert reason_of(reward_range(0.25, 0.75)(rewarded(1.0, 0.0))) == "keep"
    assert reason_of(reward_range(0.25, 0.75)(rewarded(1.0, 1.0, None))) == "range"
    assert reason_of(reward_range(0.0, 1.0)(rewarded(1e308, 1e308))) == "range"


def test_min_ok_counts_completed_members_only() -> None:
    group = view([header(leaf(1.0)), header(leaf(0.0, StopReason.TURN_LENGTH))])

    assert reason_of(min_ok(1)(group)) == "keep"
    assert reason_of(min_ok(2)(group)) == "min_ok"


def test_length_sums_the_leaves_of_a_member() -> None:
    group = view([header(leaf(tokens=4), leaf(tokens=4)), header(leaf(tokens=5))])

    assert reason_of(length(8)(group)) == "keep"
    assert reason_of(length(7)(group)) == "length"
    assert reason_of(length(8, min_tokens=6)(group)) == "length"


def test_population_std_of_equal_values_is_exactly_zero() -> None:
    assert population_std([0.1] * 3) == 0.0
    assert population_std([0.0, 1.0]) == 0.5
    assert population_std([-1e308, 1e308]) == math.inf


@pytest.mark.parametrize(
    "factory",
    [
        lambda: reward_nonzero_std(-1.0),
        lambda: reward_nonzero_std(math.nan),
        lambda: reward_range(1.0, 0.0),
        lambda: min_ok(0),
        lambda: length(3, min_tokens=4),
    ],
)
def test_a_filter_refuses_arguments_that_mean_nothing(factory: Any) -> None:
    with pytest.raises(ValueError, match=r"reward_|min_ok|length"):
        factory()


@pytest.mark.parametrize("mean", [0.1, 0.3, 0.7, 1 / 3])
@pytest.mark.parametrize("n", [1, 3, 6, 7, 10, 49])
def test_reward_range_includes_its_bounds_whatever_adding_up_rounds(mean: float, n: int) -> None:
    group = rewarded(*[mean] * n)

    assert reason_of(reward_range(mean, 1.0)(group)) == "keep"
    assert reason_of(reward_range(0.0, mean)(group)) == "keep"
    assert reason_of(reward_range(0.0, 0.3)(rewarded(0.1 + 0.2))) == "keep"
    assert reason_of(reward_range(0.0, mean - 1e-6)(group)) == "range"


def test_min_ok_needs_all_members_of_a_group_that_has_fewer() -> None:
    cut = view([header(leaf(1.0)), header(leaf(0.0, StopReason.TURN_LENGTH))])

    assert reason_of(min_ok(4)(rewarded(1.0, 0.0))) == "keep"
    assert reason_of(min_ok(4)(cut)) == "min_ok"


BUILT = {
    "no_aborted": no_aborted(),
    "reward_nonzero_std": reward_nonzero_std(),
    "insufficient": reward_nonzero_std(keep_when_insufficient=True),
    "reward_range": reward_range(0.1, 0.9),
    "min_ok": min_ok(2),
    "length": length(8),
}
ABORTED = header(leaf(0.5, StopReason.ABORT_REQUESTED))
KEPT = dict.fromkeys(BUILT, "keep")


@pytest.mark.parametrize(
    ("group", "dropped"),
    [
        (rewarded(0.5), {}),
        (rewarded(5.0), {"reward_range": "range"}),
        (rewarded(None, needs_reward=False), {}),
        (rewarded(None, None, needs_reward=False), {}),
        (rewarded(0.5, None, needs_reward=False), {}),
        (rewarded(True, False), {}),
        (rewarded(0.0, 0.0), {
            "reward_nonzero_std": "zero_std", "insufficient": "zero_std", "reward_range": "range",
        }),
        (rewarded(0.5, None), {"reward_nonzero_std": "zero_std", "min_ok": "min_ok"}),
        (rewarded(0.5, math.nan), {"reward_nonzero_std": "zero_std", "min_ok": "min_ok"}),
        (rewarded({"acc": 1}, {"acc": 0}, reward_key="acc"), {}),
        (rewarded({"acc": 1}, {"acc": 0}), {
            "reward_nonzero_std": "zero_std", "insufficient": "zero_std", "min_ok": "min_ok",
        }),
        (view([header(leaf(0.5)), ABORTED]), {
            "no_aborted": "no_aborted", "reward_nonzero_std": "zero_std", "min_ok": "min_ok",
        }),
        (view([header(leaf(1.0)), DEADLINE, header(leaf(0.5))]), {}),
        (view([DEADLINE, DEADLINE]), {
            "reward_nonzero_std": "zero_std", "insufficient": "zero_std", "min_ok": "min_ok",
        }),
    ],
    ids=[
        "n = 1", "n = 1 out of range", "n = 1 of the trainer's", "the trainer scores",
        "the trainer scores some", "bool", "equal", "None", "NaN", "dict", "dict without its key",
        "aborted", "ended by the queue", "nobody left",
    ],
)  # fmt: skip
def test_every_filter_has_an_answer_for_every_group(
    group: GroupView, dropped: dict[str, str]
) -> None:
    assert {name: reason_of(f(group)) for name, f in BUILT.items()} == KEPT | dropped


CUT = header(leaf(0.0, StopReason.RESPONSE_LENGTH))


def test_cut_members_count_in_the_statistics_unless_they_are_dropped() -> None:
    members = [header(leaf(1.0)), CUT, header(leaf(1.0))]

    assert view(members).rewards == view(members, on_truncated="mask").rewards == [1.0, 0.0, 1.0]
    without = view(members, on_truncated="drop")
    assert without.rewards == [1.0, 1.0]
    missing = without.members[1].missing
    assert missing is not None
    assert (missing.status, missing.reason) == ("truncated", "response_length")
    assert reason_of(reward_nonzero_std()(without)) == "zero_std"


def test_a_member_with_one_cut_leaf_is_dropped_as_a_whole() -> None:
    both = header(leaf(1.0), leaf(1.0, StopReason.CONTEXT_LENGTH))
    missing = view([both], on_truncated="drop").members[0].missing
    assert missing is not None
    assert missing.reason == "context_length"
