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
from rollstream.group import MemberHeader, MemberView
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
    """The members of one environment in one view, since the last flush."""

    __slots__ = ("_children", "_lengths", "gained", "lost", "num")

    def __init__(self, lengths: list[float], children: Sequence[prom.Counter]) -> None:
        self._lengths, self._children = lengths, children
        self.num, self.gained, self.lost = 0, 0.0, 0.0

    def add(self, length: int, reward: float | None) -> None:
        self._lengths.append(length)
        if reward is not None:
            self.num += 1
            if reward > 0:
                self.gained += min(MOST, reward)
            else:
                self.lost -= max(-MOST, reward)

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
                _View(values, [registry.counter(name, env, view) for name in _SUMS])
                for view, values in zip(VIEWS, self._lengths.values, strict=True)
            )
            for env in envs
        }
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
        every, kept = self._views[env]
        for member in members:
            header = member.header
            if header is None or not _is_judged(header):
                continue
            leaves = header.leaves
            length = sum([leaf.response_length for leaf in leaves])
            every.add(length, member.reward)
            if is_kept and member.usable:
                kept.add(length, member.reward)
                oldest = [leaf.versions[0] for leaf in leaves if leaf.versions is not None]
                if oldest and version >= 0:
                    self._ages.append(max(0, version - min(oldest)))

    def reward_error(self, detail: str) -> None:
        """Count one verdict that could not be had."""
        self._errors[detail if detail in _REWARD_DETAILS else OTHER] += 1

    def tool_calls(self, metadata: dict[str, Any]) -> None:
        """Count the tool calls that a trajectory says it made; anybody may have written there."""
        ok = metadata.get("tool_calls_ok")
        if ok:
            self._calls[OK] += _count(ok)
        errors = metadata.get("tool_errors")
        for outcome, count in errors.items() if errors and isinstance(errors, dict) else ():
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


def _is_judged(header: MemberHeader) -> bool:
    leaves = header.leaves
    if len(leaves) == 1:  # nearly all are so, and this runs once for each
        return leaves[0].num_sampled > 0 and leaves[0].status in _JUDGED
    return header.num_sampled > 0 and header.status in _JUDGED


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < MOST else 0
