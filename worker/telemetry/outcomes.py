"""What comes of trajectories: rewards and lengths before and behind the filters, and troubles.

Owns the metrics of judged members, of tool calls and of verdicts that could not be had. Never
judges. Invariant: the two views are of the same members: `all` has every one that was completed or
cut, whatever became of its group, `delivered` those of them that the trainer gets; they are never
added up, and a member without a reward is in neither view of rewards.

A mean reward may be below 0, and a Prometheus sum may not go down: what rewards are above 0 and
below it are two counters, and the mean is their difference by the count.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import prometheus_client as prom

from rollstream.errors import Status
from rollstream.group import MemberHeader, MemberView

ALL, DELIVERED = VIEWS = ("all", "delivered")
OTHER = "other"
LENGTH_BUCKETS = (256, 1024, 4096, 16384, 65536)
OK = "ok"
TOOL_OUTCOMES = (
    OK, "malformed", "too_many", "unknown_tool", "bad_arguments", "raised", "timeout", "cancelled",
    "bad_result", OTHER,
)  # fmt: skip
REWARD_DETAILS = (
    "missing", "invalid", "no_label", "unknown_kind", "not_configured", "not_installed", "raised",
    "cancelled", "timeout", "too_large", "crashed", "lost", "unreachable", "unavailable", "refused",
    OTHER,
)  # fmt: skip
MOST = 1e12
"""A reward beyond it is counted as this: a sum of infinity would stay one."""
_JUDGED = (Status.COMPLETED, Status.TRUNCATED)
Observe = Callable[[prom.Histogram, Sequence[float], list[float]], None]


class OutcomeMetrics:
    """The metrics of this module, all of whose series exist from the start."""

    def __init__(self, registry: prom.CollectorRegistry, envs: Sequence[str]) -> None:
        self._envs = frozenset(envs)
        rewards = prom.Counter(
            "rollout_rewards", "Members of judged groups that have a reward", ["env", "kind"],
            registry=registry,
        )  # fmt: skip
        gained = prom.Counter(
            "rollout_reward_gained", "Sum of their rewards above 0", ["env", "kind"],
            registry=registry,
        )  # fmt: skip
        lost = prom.Counter(
            "rollout_reward_lost", "Sum of their rewards below 0, without the sign",
            ["env", "kind"], registry=registry,
        )  # fmt: skip
        lengths = prom.Histogram(
            "rollout_response_tokens", "Response tokens of members of judged groups", ["kind"],
            buckets=LENGTH_BUCKETS, registry=registry,
        )  # fmt: skip
        tools = prom.Counter(
            "rollout_tool_calls", "Tool calls of ended trajectories", ["outcome"],
            registry=registry,
        )  # fmt: skip
        troubles = prom.Counter(
            "rollout_reward_errors", "Verdicts that could not be had", ["detail"],
            registry=registry,
        )  # fmt: skip
        self._rewards = {
            (env, view): tuple(metric.labels(env, view) for metric in (rewards, gained, lost))
            for env in envs
            for view in VIEWS
        }
        self._lengths = {view: lengths.labels(view) for view in VIEWS}
        self._tools = {outcome: tools.labels(outcome) for outcome in TOOL_OUTCOMES}
        self._troubles = {detail: troubles.labels(detail) for detail in REWARD_DETAILS}
        self._kept_lengths: dict[str, list[float]] = {view: [] for view in VIEWS}
        self._sums = {key: [0.0, 0.0, 0.0] for key in self._rewards}
        """Count, gained and lost since the last flush, by environment and view."""
        self._calls: Tally[str] = Tally()
        self._errors: Tally[str] = Tally()

    def members_judged(self, env: str, members: Iterable[MemberView], *, is_kept: bool) -> None:
        """Count the members of one judged group.

        Args:
            env: of the group.
            members: of the group.
            is_kept: its usable members go to the trainer.
        """
        if env not in self._envs:
            if OTHER not in self._envs:
                return
            env = OTHER
        judged = [m for m in members if m.header is not None and _is_judged(m.header)]
        self._add(env, ALL, judged)
        if is_kept:
            self._add(env, DELIVERED, [member for member in judged if member.usable])

    def _add(self, env: str, view: str, members: Sequence[MemberView]) -> None:
        lengths, sums = self._kept_lengths[view], self._sums[env, view]
        for member in members:
            leaves = member.header.leaves if member.header is not None else ()
            lengths.append(sum([leaf.response_length for leaf in leaves]))
            reward = member.reward
            if reward is not None:
                sums[0] += 1
                if reward > 0:
                    sums[1] += min(MOST, reward)
                else:
                    sums[2] -= max(-MOST, reward)

    def reward_error(self, detail: str) -> None:
        """Count one verdict that could not be had."""
        self._errors[detail if detail in self._troubles else OTHER] += 1

    def tool_calls(self, metadata: dict[str, Any]) -> None:
        """Count the tool calls that a trajectory says it made; anybody may have written there."""
        self._calls[OK] += _count(metadata.get("tool_calls_ok"))
        errors = metadata.get("tool_errors")
        for outcome, count in errors.items() if isinstance(errors, dict) else ():
            is_known = isinstance(outcome, str) and outcome in self._tools and outcome != OK
            self._calls[outcome if is_known else OTHER] += _count(count)

    def flush(self, observe: Observe) -> None:
        """Move what was accumulated to Prometheus; `observe` fills a histogram."""
        for key, sums in self._sums.items():
            for child, value in zip(self._rewards[key], sums, strict=True):
                child.inc(value)
            sums[:] = (0.0, 0.0, 0.0)
        for view, lengths in self._kept_lengths.items():
            observe(self._lengths[view], LENGTH_BUCKETS, lengths)
        for tally, children in ((self._calls, self._tools), (self._errors, self._troubles)):
            for label, count in tally.items():
                children[label].inc(count)
            tally.clear()


def _is_judged(header: MemberHeader) -> bool:
    leaves = header.leaves
    if len(leaves) == 1:  # nearly all are so, and this runs once for each
        return leaves[0].num_sampled > 0 and leaves[0].status in _JUDGED
    return header.num_sampled > 0 and header.status in _JUDGED


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < MOST else 0
