"""Rewards and lengths in two views, tool calls, and verdicts that could not be had."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollstream.errors import StopReason
from rollstream.group import GroupView
from tests.builders import a_sample
from tests.unit.worker.views import DEADLINE, header, leaf, rewarded, view
from worker.rewards.details import Detail
from worker.telemetry.catalog import OTHER, REWARD_DETAILS, TOOL_OUTCOMES
from worker.telemetry.metrics import Metrics
from worker.tools.outcome import ToolError


def metrics(*envs: str) -> Metrics:
    return Metrics(version="1.2", wire=1, envs=envs or ["default"])


def counts(given: Metrics, name: str) -> dict[str, float]:
    """Return what is not 0 of a metric, by its labels in order."""
    given.flush()
    found = {}
    for labels, value in re.findall(
        rf"^{name}\{{(.*)\}} (\S+)$", given.render().decode(), re.MULTILINE
    ):
        if float(value):
            found["/".join(re.findall(r'"([^"]*)"', labels))] = float(value)
    return found


def judged(given: Metrics, group: GroupView, *, is_kept: bool, env: str = "default") -> None:
    given.outcomes.members_judged(env, group.members, is_kept=is_kept)


def test_the_labels_are_those_of_their_owners() -> None:
    assert set(TOOL_OUTCOMES) == {"ok", OTHER, *ToolError}
    assert set(REWARD_DETAILS) == {"missing", OTHER, *Detail}


def test_145_all_has_what_was_dropped_and_delivered_has_not() -> None:
    given = metrics()
    judged(given, rewarded(1.0, 0.5), is_kept=True)
    judged(given, rewarded(1.0, 1.0, 1.0), is_kept=False)
    assert counts(given, "rollout_rewards_total") == {
        "default/all": 5.0, "default/delivered": 2.0,
    }  # fmt: skip
    assert counts(given, "rollout_reward_gained_total") == {
        "default/all": 4.5, "default/delivered": 1.5,
    }  # fmt: skip
    assert counts(given, "rollout_sample_tokens_count") == {"all": 5.0, "delivered": 2.0}
    assert counts(given, "rollout_sample_tokens_sum") == {"all": 25.0, "delivered": 10.0}


def test_a_member_without_a_verdict_has_a_length_and_no_reward_and_a_failed_one_neither() -> None:
    given = metrics()
    cut = header(leaf(0.5, StopReason.RESPONSE_LENGTH, tokens=300))
    aborted = header(leaf(1.0, StopReason.ABORT_REQUESTED))
    nothing = header(leaf(1.0, StopReason.PROMPT_TOO_LONG, tokens=0))
    group = view([header(leaf(None)), cut, DEADLINE, aborted, nothing])
    judged(given, group, is_kept=True)
    assert counts(given, "rollout_rewards_total") == {
        "default/all": 1.0, "default/delivered": 1.0,
    }  # fmt: skip
    assert counts(given, "rollout_sample_tokens_count") == {"all": 2.0, "delivered": 1.0}
    assert counts(given, "rollout_sample_tokens_sum") == {"all": 305.0, "delivered": 300.0}


def test_a_cut_member_that_is_dropped_is_in_all_alone() -> None:
    given = metrics()
    cut = header(leaf(1.0, StopReason.RESPONSE_LENGTH))
    judged(given, view([header(leaf(0.0)), cut], on_truncated="drop"), is_kept=True)
    assert counts(given, "rollout_rewards_total") == {
        "default/all": 2.0, "default/delivered": 1.0,
    }  # fmt: skip


def test_rewards_below_zero_make_no_counter_go_down() -> None:
    given = metrics()
    judged(given, rewarded(1.0, -0.25, -1.0, 0.0), is_kept=False)
    assert counts(given, "rollout_rewards_total") == {"default/all": 4.0}
    assert counts(given, "rollout_reward_gained_total") == {"default/all": 1.0}
    assert counts(given, "rollout_reward_lost_total") == {"default/all": 1.25}


def test_a_reward_as_large_as_can_be_leaves_sums_that_go_on() -> None:
    given = metrics()
    for _ in range(3):
        judged(given, rewarded(1e308, -1e308), is_kept=False)
    assert counts(given, "rollout_reward_gained_total") == {"default/all": 3e12}
    assert counts(given, "rollout_reward_lost_total") == {"default/all": 3e12}


def test_nine_leaves_of_a_trajectory_are_one_member_with_one_reward() -> None:
    given = metrics()
    judged(given, view([header(*[leaf(1.0, tokens=10)] * 9)]), is_kept=True)
    assert counts(given, "rollout_rewards_total")["default/all"] == 1.0
    assert counts(given, "rollout_sample_tokens_sum")["all"] == 90.0


def test_many_environments_share_the_last_label() -> None:
    given = metrics("a", "b", "c", "d")
    for env in "abcde":
        judged(given, rewarded(1.0), is_kept=False, env=env)
    assert counts(given, "rollout_rewards_total") == {"a/all": 1.0, "b/all": 1.0, "other/all": 3.0}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tool_calls_ok": 3, "tool_errors": {"timeout": 2, "raised": 1}},
         {"ok": 3.0, "timeout": 2.0, "raised": 1.0}),
        ({"tool_errors": {"unheard_of": 2, "ok": 4}}, {"other": 6.0}),
        ({"tool_calls_ok": True, "tool_errors": [1]}, {}),
        ({"tool_calls_ok": -3, "tool_errors": {"raised": -1, "timeout": "2", 5: 1}},
         {"other": 1.0}),
        ({"tool_calls_ok": 10**400, "tool_errors": {"raised": float("nan")}}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_tool_calls_are_counted_from_what_trajectories_say_of_themselves(
    metadata: dict[str, Any], expected: dict[str, float]
) -> None:
    given = metrics()
    sample = a_sample(metadata=metadata)
    given.sample_ended("default", StopReason.STOP, [sample, sample], delivered=True)
    assert counts(given, "rollout_tool_calls_total") == expected


def test_a_verdict_that_could_not_be_had_is_counted_by_its_cause() -> None:
    given = metrics()
    for metadata in ({"error_detail": "timeout"}, {"error_detail": ["x"]}, {}):
        sample = a_sample(metadata=metadata, stop_reason=StopReason.REWARD_ERROR)
        given.sample_ended("default", StopReason.REWARD_ERROR, [sample], delivered=False)
    given.sample_ended("default", StopReason.REWARD_ERROR, [], delivered=False)
    other = a_sample(metadata={"error_detail": "timeout"}, stop_reason=StopReason.TOOL_ERROR)
    given.sample_ended("default", StopReason.TOOL_ERROR, [other], delivered=False)
    given.outcomes.reward_error("invalid")
    assert counts(given, "rollout_reward_errors_total") == {
        "timeout": 1.0, "other": 3.0, "invalid": 1.0,
    }  # fmt: skip


def test_the_age_of_what_is_delivered_is_taken_with_the_verdict() -> None:
    given = metrics()
    group = rewarded(1.0, 0.0, 1.0)
    assert group.members[0].header is not None
    assert group.members[1].header is not None
    assert group.members[2].header is not None
    group.members[0].header.leaves[0].versions = (3, 8)
    group.members[1].header.leaves[0].versions = (7, 8)
    group.members[2].header.leaves[0].versions = None
    given.outcomes.members_judged("default", group.members, is_kept=True, version=8)
    given.outcomes.members_judged("default", group.members, is_kept=False, version=9)
    given.outcomes.members_judged("default", group.members, is_kept=True)
    assert counts(given, "rollout_sample_staleness_versions_count") == {"delivered": 2.0}
    assert counts(given, "rollout_sample_staleness_versions_sum") == {"delivered": 6.0}
