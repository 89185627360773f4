"""What comes of trajectories: rewards and lengths before and behind the filters, and troubles.

Owns the metrics of judged members, of tool calls and of verdicts that could not be had. Never
judges. Invariant: the two views are of the same members: `all` has every one that was completed or
cut, whatever became of its group, `delivered` those of them that the trainer gets; they are never
added up, and a member without a reward is in neither view of rewards. (Staleness alone is taken at
two times: when a trajectory ended for `all`, which `metrics` counts, and with the verdict.)

A mean reward may be below 0, and a Prometheus sum may not go down: what rewards are above 0 and
below it are two counters, and the mean is their difference by the count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import prometheus_client as prom

from rollstream.errors import Status
from rollstream.group import MemberView
from rollstream.sample import UNKNOWN_VERSION

from .catalog import (
    DELIVERED,
    OK,
    OTHER,
    REWARD_DETAILS,
    STALENESS_BUCKETS,
    TOKEN_BUCKETS,
    TOOL_OUTCOMES,
    VIEWS,
)
from .readings import MOST, Readings, move, tally_of
from .registry import Registry

_JUDGED = (Status.COMPLETED, Status.TRUNCATED)
_SUMS = ("rollout_rewards_total", "rollout_reward_gained_total", "rollout_reward_lost_total")
_TOOL_OUTCOMES, _REWARD_DETAILS = frozenset(TOOL_OUTCOMES), frozenset(REWARD_DETAILS)


class _View:
    """The rewards of one environment's members in one view, since the last flush."""

    __slots__ = ("_children", "gained", "lost", "num")

    def __init__(self, children: Sequence[prom.Counter]) -> None:
        self._children = children
        self.num, self.gained, self.lost = 0, 0.0, 0.0

    def add(self, rewards: Sequence[float]) -> None:
        self.num += len(rewards)
        gained, lost = self.gained, self.lost
        for reward in rewards:
            if reward > 0:
                gained += reward if reward < MOST else MOST  # noqa: FURB136 - `min` is twice as slow
            else:
                lost -= reward if reward > -MOST else -MOST  # noqa: FURB136
        self.gained, self.lost = gained, lost

    def flush(self) -> None:
        if self.num:
            sums = (self.num, self.gained, self.lost)
            self.num, self.gained, self.lost = 0, 0.0, 0.0
            for child, value in zip(self._children, sums, strict=True):
                child.inc(value)


class OutcomeMetrics:
    """The metrics of this module."""

    def __init__(self, registry: Registry, envs: Sequence[str]) -> None:
        self._envs = frozenset(envs)
        lengths = registry.histograms("rollout_sample_tokens")
        self._lengths = Readings([lengths[view] for view in VIEWS], TOKEN_BUCKETS)
        self._views = {
            env: tuple(
                _View([registry.counter(name, env, view) for name in _SUMS]) for view in VIEWS
            )
            for env in envs
        }
        self._all_lengths, self._kept_lengths = self._lengths.values
        self._staleness = Readings(
            [registry.histogram("rollout_sample_staleness_versions", DELIVERED)], STALENESS_BUCKETS
        )
        (self._ages,) = self._staleness.values
        self._tools = registry.counters("rollout_tool_calls_total")
        self._troubles = registry.counters("rollout_reward_errors_total")
        self._calls, self._errors = tally_of(self._tools), tally_of(self._troubles)

    def members_judged(
        self,
        env: str,
        members: Iterable[MemberView],
        *,
        is_kept: bool,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Count the members of one judged group.

        Args:
            env: of the group.
            members: of the group.
            is_kept: its usable members go to the trainer.
            version: the run's weights now; unknown counts no age.
        """
        env = env if env in self._envs else OTHER
        lengths: list[float] = []
        rewards: list[float] = []
        kept_lengths: list[float] = []
        kept_rewards: list[float] = []
        for member in members:
            header = member.header
            if header is None:
                continue
            leaves = header.leaves
            if len(leaves) == 1:  # nearly all are so, and this runs once for each
                leaf = leaves[0]
                if not leaf.num_sampled or leaf.status not in _JUDGED:
                    continue
                length, versions = leaf.response_length, leaf.versions
            elif header.num_sampled and header.status in _JUDGED:
                length = sum([leaf.response_length for leaf in leaves])
                versions = min([v for leaf in leaves if (v := leaf.versions)], default=None)
            else:
                continue
            lengths.append(length)
            reward = member.reward
            if reward is not None:
                rewards.append(reward)
            if is_kept and member.usable:
                kept_lengths.append(length)
                if reward is not None:
                    kept_rewards.append(reward)
                if versions is not None and version >= 0:
                    age = version - versions[0]
                    self._ages.append(max(0, age))
        self._all_lengths += lengths
        self._kept_lengths += kept_lengths
        every, kept = self._views[env]
        every.add(rewards)
        kept.add(kept_rewards)

    def reward_error(self, detail: str) -> None:
        """Count one verdict that could not be had."""
        self._errors[detail if detail in _REWARD_DETAILS else OTHER] += 1

    def tool_calls(self, metadata: dict[str, Any]) -> None:
        """Count the tool calls that a trajectory says it made; anybody may have written there."""
        ok = metadata.get("tool_calls_ok")
        if ok:
            self._calls[OK] += _count(ok)
        errors = metadata.get("tool_errors")
        if not errors or not isinstance(errors, dict):
            return
        for outcome, count in errors.items():
            is_known = isinstance(outcome, str) and outcome in _TOOL_OUTCOMES and outcome != OK
            self._calls[str(outcome) if is_known else OTHER] += _count(count)

    def flush(self) -> None:
        """Move what was accumulated to Prometheus."""
        for views in self._views.values():
            for view in views:
                view.flush()
        self._lengths.flush()
        self._staleness.flush()
        move(self._calls, self._tools)
        move(self._errors, self._troubles)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < MOST else 0
