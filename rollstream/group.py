"""The records around a group: what is asked, what filters see, what the trainer gets.

Owns `PromptGroup`, `GroupView`, `FinishedGroup`, and a filter's answers `Keep` and `Drop`. Never
judges: filters and the aggregator do.
Invariant: a view and a finished group speak of MEMBERS; a trajectory with nine leaves is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from rollstream.errors import MemberReason, Status, StopReason
from rollstream.sample import Prompt, Reward, Sample

Trajectory: TypeAlias = Sample | list[Sample]
"""What one member delivers: one scalar sample, or the leaves of a tree."""


INDEX_STRIDE = 4096
"""`Sample.index` is group_index * stride + member; also the largest n, so no index repeats."""


def sample_index(group_index: int, member: int) -> int:
    """Return the index of one member, unique in the run whatever n its group and others have."""
    return group_index * INDEX_STRIDE + member


@dataclass(slots=True)
class PromptGroup:
    """One prompt to be sampled n times."""

    group_index: int
    n: int
    prompt: Prompt
    label: Any = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Overrides of the run's sampling parameters for this prompt."""
    env: str = "default"
    priority: int = 0
    """Lower is leased first."""
    timeout_s: float = 0.0
    """Deadline from the group's first lease, on the queue clock; 0 is none."""
    enqueued_unix_s: float = 0.0


@dataclass(slots=True)
class Leaf:
    """The header of one sample: all that filters and counters need, without its tokens."""

    status: Status
    stop_reason: StopReason | None
    reward: Reward
    response_length: int
    num_tokens: int
    num_sampled: int
    num_trainable: int
    versions: tuple[int, int] | None
    """Oldest and newest known weight version."""
    removed: bool = False


@dataclass(slots=True)
class MemberHeader:
    """What the queue keeps of one member's result beside its body."""

    is_list: bool
    leaves: list[Leaf]
    num_turns: int = 0
    done_unix_s: float = 0.0
    attempts: int = 0
    reward_error: str = ""
    """Why the group's reward gave this member none, for people."""

    @property
    def status(self) -> Status:
        """The member's status: the worst of its leaves (`failed` is worse than `aborted`, …)."""
        if len(self.leaves) == 1:
            return self.leaves[0].status
        return max((leaf.status for leaf in self.leaves), key=_BADNESS.__getitem__)

    @property
    def reward(self) -> Reward:
        """The one reward that all leaves share."""
        return self.leaves[0].reward

    @property
    def num_sampled(self) -> int:
        """Sampled tokens over all leaves."""
        return sum(leaf.num_sampled for leaf in self.leaves)


DROPPED_AS_TRUNCATED = "on_truncated is drop"
"""The error of a member that is missing because a limit cut it."""
_BADNESS = {s: i for i, s in enumerate((Status.COMPLETED, Status.TRUNCATED, Status.PENDING,
                                        Status.ABORTED, Status.FAILED))}  # fmt: skip


@dataclass(slots=True)
class Missing:
    """A member that the finished group does not carry."""

    member: int
    status: Status
    reason: str
    """A stop reason, or what the queue ended it for (`crashed`, `too_large`, …)."""
    error: str = ""


@dataclass(slots=True)
class MemberView:
    """One member as a filter sees it."""

    member: int
    header: MemberHeader | None
    """None where the queue ended the member (crashed, deadline, …)."""
    reward: float | None
    """Its number, after `reward_key`; None is "no verdict"."""
    usable: bool
    missing: Missing | None = None
    trajectory: Trajectory | None = None
    """Only for a filter with `needs = "bodies"`."""

    @property
    def status(self) -> Status:
        """Status of the member; a member that the queue ended is `failed`."""
        if self.missing is not None:
            return self.missing.status
        return Status.FAILED if self.header is None else self.header.status


@dataclass(slots=True)
class GroupView:
    """A full group as filters see it: one entry per member, in order."""

    group_index: int
    n: int
    env: str
    members: list[MemberView]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> list[MemberView]:
        """The members that the trainer would get."""
        return [m for m in self.members if m.usable]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the usable members that have one, in order."""
        return [m.reward for m in self.members if m.usable and m.reward is not None]


@dataclass(frozen=True, slots=True)
class Keep:
    """A filter's answer: the group may go on."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A filter's answer: the group is not trained on."""

    reason: str
    """A short label; a reason of the user's own is counted under `custom`."""
    detail: str = ""
    """For people."""


def reward_number(reward: Reward, reward_key: str | None) -> float | None:
    """Return the number that a reward stands for, or None where it is no verdict.

    A bool counts as 0 or 1; NaN, infinities and anything that is not a number are no verdict.
    """
    value: Any = reward
    if isinstance(value, dict):
        value = value.get(reward_key) if reward_key else None
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        return None
    return number if math.isfinite(number) else None


OnTruncated: TypeAlias = Literal["keep", "mask", "drop"]


@dataclass(frozen=True, slots=True)
class EnvRule:
    """What of an environment decides whether a member is usable; known to every process."""

    reward_key: str | None = None
    """Which entry of a reward dictionary is the reward."""
    needs_reward: bool = True
    """False where the trainer scores (`reward = "none"`)."""
    group_reward: bool = False
    """The aggregator scores, all members of a group at once."""
    on_truncated: OnTruncated = "keep"
    """What becomes of samples that a limit cut: `mask` delivers them with no token to train, `drop`
    leaves their members out."""

    def of_evaluation(self) -> EnvRule:
        """Return the rule of its evaluations: nobody judges their groups, and nobody trains."""
        needs_reward = self.needs_reward and not self.group_reward
        return EnvRule(self.reward_key, needs_reward=needs_reward)


_PLAIN_RULE = EnvRule()


def judge_member(
    member: int,
    header: MemberHeader | None,
    error: tuple[str, str] | None,
    rule: EnvRule = _PLAIN_RULE,
) -> MemberView:
    """Say whether one member can be trained on, and if not, why.

    Usable: completed or truncated (unless such are dropped), a verdict (unless none is needed), at
    least one sampled token, and one reward over all its leaves.

    Args:
        member: place in the group.
        header: its result, None where the queue ended it.
        error: (reason, error text) where the queue ended it.
        rule: of its environment.
    """
    if header is None or not header.leaves:
        reason, text = error or (MemberReason.CRASHED.value, "")
        return MemberView(member, None, None, False, Missing(member, Status.FAILED, reason, text))
    reward = reward_number(header.reward, rule.reward_key)
    missing = _why_missing(member, header, reward, rule)
    return MemberView(member, header, reward, missing is None, missing)


def _why_missing(
    member: int, header: MemberHeader, reward: float | None, rule: EnvRule
) -> Missing | None:
    status = header.status
    is_dropped = status is Status.TRUNCATED and rule.on_truncated == "drop"
    if is_dropped or status not in (Status.COMPLETED, Status.TRUNCATED):
        worst = next(leaf for leaf in header.leaves if leaf.status is status)
        reason = worst.stop_reason.value if worst.stop_reason else ""
        return Missing(member, status, reason, DROPPED_AS_TRUNCATED if is_dropped else "")
    if header.num_sampled == 0:  # never scored, so its reward says nothing
        return Missing(member, status, _why_nothing(header), "no sampled token")
    if rule.needs_reward:
        if len(header.leaves) > 1 and _differ(header.leaves, rule.reward_key):
            return _reward_error(member, "leaves of one trajectory have different rewards")
        if reward is None:
            missing = header.reward_error or "missing"
            return _reward_error(member, missing if header.reward is None else "invalid")
    return None


def _why_nothing(header: MemberHeader) -> str:
    """Return what ended a trajectory before its first token, as far as that says more."""
    reason = header.leaves[0].stop_reason
    if reason in (None, StopReason.STOP, StopReason.MAX_TURNS):
        reason = StopReason.NO_MODEL_CALL
    return reason.value


def _differ(leaves: list[Leaf], reward_key: str | None) -> bool:
    return len({reward_number(leaf.reward, reward_key) for leaf in leaves}) > 1


def mask_truncated(trajectory: Trajectory) -> None:
    """Leave no token to train in the samples that a limit cut; all else of them stays."""
    for sample in trajectory if isinstance(trajectory, list) else [trajectory]:
        if sample.status is Status.TRUNCATED:
            sample.loss_mask = np.zeros(sample.response_length, dtype=np.uint8)


def _reward_error(member: int, detail: str) -> Missing:
    return Missing(member, Status.FAILED, MemberReason.REWARD_ERROR.value, detail)


@dataclass(slots=True)
class FinishedGroup:
    """A group as the trainer gets it: the usable members in order, and who is missing why."""

    group_index: int
    env: str
    samples: list[Trajectory]
    missing: list[Missing] = field(default_factory=list)
    staleness: int = 0
    """Current weight version minus the oldest one in the group; 0 where none is known."""
    spans: dict[str, list[float]] = field(default_factory=dict)
    """Seconds: `group_wait` per member, `ready_wait` for the group."""
    reward_key: str | None = None
    """Which entry of a reward dictionary is the reward (the env's `reward.key`)."""

    def flat(self) -> list[Sample]:
        """Return every sample, leaves of a trajectory side by side."""
        return list(self._leaves())

    def _leaves(self) -> Iterator[Sample]:
        for trajectory in self.samples:
            if isinstance(trajectory, list):
                yield from trajectory
            else:
                yield trajectory
