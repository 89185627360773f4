"""The judgement of a full group: the order of checks, and one reason for every drop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError, DropReason, StopReason
from rollstream.group import Drop, GroupView, Keep
from tests.builders import a_sample
from worker.aggregate.judge import EnvJudge, FilterError, Verdict, judge, own_view
from worker.aggregate.loader import LoadedFilter, load_filters
from worker.members.work import leaves_of

from .views import DEADLINE, header, leaf, rewarded, view

DEFAULTS = ("no_aborted", "reward_nonzero_std")


async def no_bodies() -> None:
    raise AssertionError("nobody asked for bodies")


async def judged(
    group: GroupView,
    *filters: str | LoadedFilter,
    min_samples: int | None = None,
    why: str = "",
    bodies: Callable[[], Any] = no_bodies,
) -> Verdict:
    loaded = [f if isinstance(f, LoadedFilter) else load_filters([f])[0] for f in filters]
    return await judge(
        group, EnvJudge("default", filters=loaded, min_samples=min_samples), why, bodies
    )


def a_filter(function: Callable[[GroupView], Any], needs: Any = "headers") -> LoadedFilter:
    return LoadedFilter("mine.py:f", function, built_in=False, needs=needs)


async def test_judge_keeps_a_group_whose_members_are_all_usable_and_differ() -> None:
    assert await judged(rewarded(1.0, 0.0), *DEFAULTS) == Verdict()


async def test_judge_asks_no_aborted_before_it_counts_usable_members() -> None:
    group = view([header(leaf(1.0)), header(leaf(None, StopReason.ABORT_REQUESTED))])

    assert (await judged(group, "reward_nonzero_std", "no_aborted")).drop is DropReason.NO_ABORTED
    assert (await judged(group, "reward_nonzero_std")).drop is DropReason.SHORT_GROUP


async def test_judge_counts_usable_members_before_it_asks_about_rewards() -> None:
    group = rewarded(1.0, float("nan"), 1.0)

    short = await judged(group, *DEFAULTS)
    enough = await judged(group, *DEFAULTS, min_samples=2)

    assert short.drop is DropReason.SHORT_GROUP
    assert short.detail == "2 of 3 usable, 3 needed: reward_error (invalid) x1"
    assert enough.drop is DropReason.ZERO_STD


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("deadline", DropReason.DEADLINE),
        ("too_large", DropReason.TOO_LARGE),
        ("crashed", DropReason.SHORT_GROUP),
        ("engine_error", DropReason.SHORT_GROUP),
        ("", DropReason.SHORT_GROUP),
    ],
)
async def test_judge_names_a_short_group_after_what_its_first_member_failed_for(
    why: str, reason: DropReason
) -> None:
    group = view([header(leaf(1.0)), DEADLINE])

    assert (await judged(group, *DEFAULTS, why=why)).drop is reason


async def test_judge_delivers_a_group_with_a_failed_member_where_min_samples_allows() -> None:
    members = [header(leaf(float(i % 2))) for i in range(7)]
    group = view([*members, ("tool_error", "the sandbox is gone")])

    assert (await judged(group, *DEFAULTS)).drop is DropReason.SHORT_GROUP
    assert await judged(group, *DEFAULTS, min_samples=7) == Verdict()


async def test_judge_never_needs_more_members_than_the_group_has() -> None:
    assert await judged(rewarded(1.0, 0.0), *DEFAULTS, min_samples=8) == Verdict()


@pytest.mark.parametrize("rewards", [(None,) * 4, (None, 1.0, None, 0.0)])
async def test_judge_drops_a_group_without_verdicts_with_their_count(rewards: Any) -> None:
    verdict = await judged(rewarded(*rewards), *DEFAULTS)

    assert verdict.drop is DropReason.SHORT_GROUP
    assert f"reward_error (missing) x{rewards.count(None)}" in verdict.detail


async def test_judge_gives_the_same_answer_for_a_group_of_lists_as_for_its_samples() -> None:
    flat = rewarded(1.0, 0.0)
    nested = view([header(leaf(1.0), leaf(1.0), leaf(1.0)), header(leaf(0.0))])

    assert await judged(nested, *DEFAULTS) == await judged(flat, *DEFAULTS)


async def test_judge_counts_a_users_reason_as_custom_with_its_detail() -> None:
    mine = a_filter(lambda group: Drop("too_easy", "7 of 8 right"))

    assert await judged(rewarded(1.0, 0.0), mine) == Verdict(
        DropReason.CUSTOM, "mine.py:f: too_easy: 7 of 8 right"
    )


async def test_judge_runs_an_async_filter_of_the_users() -> None:
    async def slowly(group: GroupView) -> Keep | Drop:
        await asyncio.sleep(0)
        return Keep() if len(group.usable) == 2 else Drop("odd")

    assert await judged(rewarded(1.0, 0.0), a_filter(slowly)) == Verdict()


async def test_judge_gives_a_users_filter_a_copy_that_it_may_write_into() -> None:
    group = view([header(leaf({"score": 1.0})), header(leaf({"score": 0.0}))], reward_key="score")
    group.metadata["of"] = {"row": 1}
    untouched = own_view(group)

    def spoils(given: GroupView) -> Keep:
        assert given.rewards == [1.0, 0.0]
        first = given.members[0]
        assert first.header is not None
        first.reward = "x"  # type: ignore[assignment]
        first.header.leaves[0].reward["score"] = 9.0  # type: ignore[index]
        first.header.leaves.clear()
        given.metadata["of"]["row"] = 2
        given.members = None  # type: ignore[assignment]
        return Keep()

    assert await judged(group, a_filter(spoils), a_filter(spoils)) == Verdict()
    assert group == untouched


async def test_judge_gives_a_filter_bodies_whose_notes_no_other_filter_wrote() -> None:
    group = rewarded(1.0, 0.0)
    group.members[0].trajectory = a_sample(metadata={"seen": [1]}, reward={"score": 1.0})
    group.members[1].trajectory = [a_sample(metadata={"seen": [1]}, reward={"score": 0.0})]

    def spoils(given: GroupView) -> Keep | Drop:
        for member in given.members:
            assert member.trajectory is not None
            (sample,) = leaves_of(member.trajectory)
            assert isinstance(sample.reward, dict)
            if sample.metadata != {"seen": [1]} or len(sample.reward) != 1:
                return Drop("another filter wrote into it")
            sample.metadata["seen"].append(2)
            sample.reward["mine"] = 1.0
        return Keep()

    async def bodies() -> None:
        """They are there."""

    mine = a_filter(spoils, "bodies")
    assert await judged(group, mine, mine, bodies=bodies) == Verdict()


async def test_judge_copies_a_group_for_a_users_filter_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def copies(group: GroupView) -> GroupView:
        threads.append(threading.current_thread())
        return own_view(group)

    monkeypatch.setattr("worker.aggregate.judge.own_view", copies)
    await judged(rewarded(1.0, 0.0), a_filter(lambda group: Keep()))
    assert threads
    assert threading.main_thread() not in threads


async def test_judge_fetches_bodies_once_and_only_for_a_filter_that_needs_them() -> None:
    fetched: list[int] = []

    async def bodies() -> None:
        fetched.append(1)

    ask = a_filter(lambda group: Keep(), "bodies")
    await judged(rewarded(1.0, 1.0), "reward_nonzero_std", ask, bodies=bodies)
    assert fetched == []  # dropped before anybody needed them
    await judged(rewarded(1.0, 0.0), "reward_nonzero_std", ask, ask, bodies=bodies)
    assert fetched == [1]


def raises(group: GroupView) -> Keep:
    raise KeyError("nope")


def exits(group: GroupView) -> Keep:
    raise SystemExit(3)


@pytest.mark.parametrize("wrong", [raises, exits, lambda group: True, lambda group: None])
async def test_judge_reports_a_filter_that_breaks_as_filter_error(wrong: Any) -> None:
    with pytest.raises(FilterError, match=r"mine\.py:f"):
        await judged(rewarded(1.0, 0.0), a_filter(wrong))


# --- loading -------------------------------------------------------------------------------------
def test_load_filters_reads_names_with_arguments() -> None:
    std, plain, ranged = load_filters(
        ["reward_nonzero_std(0.3)", " no_aborted ", "reward_range(0.1, high=0.9)"]
    )

    assert std.function(rewarded(0.0, 0.5)) != Keep()
    assert plain.judges_aborted
    assert ranged.function(rewarded(0.5, 0.5)) == Keep()


def test_load_filters_gives_the_configured_threshold_to_a_bare_reward_nonzero_std() -> None:
    bare, own = load_filters(["reward_nonzero_std", "reward_nonzero_std(0)"], std_threshold=0.5)

    assert bare.function(rewarded(0.0, 0.5)) != Keep()
    assert own.function(rewarded(0.0, 0.5)) == Keep()


def test_load_filters_loads_a_function_of_the_users_with_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(group):\n    return 1\nf.needs = 'bodies'\n")

    (loaded,) = load_filters([f"{file}:f"])

    assert (loaded.built_in, loaded.needs) == (False, "bodies")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward_nonzero_sdt", "did you mean 'reward_nonzero_std'"),
        ("reward_nonzero_std(x)", "cannot be read"),
        ("reward_nonzero_std(__import__('os'))", "cannot be read"),
        ("reward_nonzero_std(1, 2, 3)", "positional"),
        ("reward_nonzero_std(-1)", "expected >= 0"),
        ("min_ok", "missing"),
        ("", "cannot be read"),
        ("no.such.module:f", "no module no.such.module"),
        ("math:sqrt2", "no 'sqrt2'"),
    ],
)
def test_load_filters_says_what_is_wrong_with_a_filter(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="filter") as error:
        load_filters([text])

    assert says in str(error.value)


def test_load_filters_refuses_needs_that_nobody_serves(tmp_path: Path) -> None:
    file = tmp_path / "needy.py"
    file.write_text("def f(group):\n    return 1\nf.needs = 'everything'\n")

    with pytest.raises(ConfigError, match="everything"):
        load_filters([f"{file}:f"])


def test_load_filters_gives_what_is_configured_to_a_bare_reward_nonzero_std_alone() -> None:
    one_left = rewarded(1.0, None)
    names = [
        "reward_nonzero_std",
        "reward_nonzero_std(0)",
        "reward_nonzero_std(keep_when_insufficient=False)",
        "min_ok(2)",
    ]
    kept = [
        f.function(one_left) == Keep() for f in load_filters(names, keep_when_insufficient=True)
    ]

    assert kept == [True, True, False, False]
    (default,) = load_filters(["reward_nonzero_std"])
    assert default.function(one_left) != Keep()


async def test_judge_gives_each_drop_the_reason_of_the_first_filter_that_refuses() -> None:
    filters = ("length(4)", "reward_range(0.4, 0.6)", "reward_nonzero_std", "min_ok(3)")
    cut = header(leaf(1.0, StopReason.TURN_LENGTH, tokens=3))
    for group, reason in (
        (rewarded(1.0, 1.0), DropReason.LENGTH),
        (view([header(leaf(1.0, tokens=3))] * 2), DropReason.RANGE),
        (view([header(leaf(0.5, tokens=3))] * 2), DropReason.ZERO_STD),
        (view([header(leaf(0.0, tokens=3)), cut]), DropReason.MIN_OK),
        (view([header(leaf(float(i), tokens=3)) for i in range(2)]), None),
    ):
        assert (await judged(group, *filters)).drop is reason


async def test_judge_scores_a_group_behind_no_aborted_and_only_where_enough_members_are_left() -> (
    None
):
    scored: list[int] = []

    async def score() -> None:
        scored.append(1)

    async def verdict(group: GroupView, *filters: str) -> DropReason | None:
        env = EnvJudge("default", filters=load_filters(filters))
        return (await judge(group, env, "", no_bodies, score)).drop

    aborted = view([header(leaf(1.0)), header(leaf(None, StopReason.ABORT_REQUESTED))])
    assert await verdict(aborted, *DEFAULTS) is DropReason.NO_ABORTED
    assert await verdict(view([header(leaf(1.0)), DEADLINE])) is DropReason.SHORT_GROUP
    assert scored == []
    assert await verdict(rewarded(1.0, 1.0), "reward_nonzero_std") is DropReason.ZERO_STD
    assert scored == [1]
