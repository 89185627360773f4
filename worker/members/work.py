"""The records of a worker at work: an environment, a group it holds members of, a leased member.

Owns what the shift, the rollout and the submitter say to each other. Never acts.
Invariant: a `Work` ends exactly once, by its `Ending` or by the `Cause` it was cancelled for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rollstream.errors import (
    STATUS_OF,
    MemberReason,
    Report,
    RolloutFault,
    Status,
    StopReason,
    WireError,
    report_of,
)
from rollstream.group import PromptGroup, Trajectory
from rollstream.queue.answers import Lease
from rollstream.sample import Sample

from ..sampling import Sampling
from ..telemetry.spans import NoSpans, SpanList
from ..types import GenerateFunction, GenerateInput, Limits, SpanRecorder, Tool

MAX_ERROR_CHARS = 2000


class Scorer(Protocol):
    """Gives the leaves of a trajectory their reward."""

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        """Set `reward`; a verdict that cannot be had is a `RewardFault`."""
        ...


@dataclass(frozen=True, slots=True)
class EnvRuntime:
    """An environment with its functions resolved."""

    name: str
    generate: GenerateFunction
    generate_path: str
    """As the configuration names it, recorded on every sample."""
    limits: Limits
    sampling: Sampling
    tools: Mapping[str, Tool] = field(default_factory=dict)
    scorer: Scorer | None = None
    """None where the trainer scores."""
    resumable: bool = False
    """Its generate function goes on from what an earlier attempt left."""
    marks: tuple[str, ...] = ()
    """Parameters that leave the distribution, where that was permitted."""


class Cause(StrEnum):
    """Why we cancelled a member ourselves."""

    LOST = "lost"
    """The queue says that the lease is no longer ours: whatever comes of it is nobody's."""
    RUN_ENDED = "run_ended"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


@dataclass(slots=True)
class Ending:
    """How one attempt ended, and how it is to be reported."""

    report: Report | None
    """None where nobody is to be told: the lease is lost, or the run is over."""
    stop_reason: StopReason
    trajectory: Trajectory | None = None
    """For `complete`; else what there is of it, for the counters."""
    reason: MemberReason = MemberReason.AGENT_ERROR
    error: str = ""
    refused: bool = False
    """An engine refused the request itself: another try cannot help."""
    delay_s: float = 0.0
    forget: bool = False
    """What the member has parked is of no use: the next attempt begins at the prompt."""


@dataclass(slots=True, eq=False)
class Work:
    """One leased member, from its lease to the answer that ends it."""

    lease: Lease
    group: GroupWork
    attempts: int
    leased_unix_s: float
    deadline_mono_s: float
    """When `worker.sample_timeout_s` is over."""
    parked_bytes: int = 0
    """Size of what an earlier attempt parked; 0 where the member begins at its prompt."""
    resumes: int = 0
    """How often it was resumed, this attempt included, once what it parked was read."""
    num_earlier_spans: int = 0
    """Of `spans`: those of earlier attempts, which stand first."""
    num_counted_spans: int = 0
    """Of `spans`: those that metrics had when the member's ending was decided."""
    spans: SpanRecorder = field(default_factory=SpanList)
    lifecycle: dict[str, float] = field(default_factory=dict)
    """Unix seconds of `attempt_start`, `gen_start`, `attempt_end`, as far as it got."""
    sample: Sample | None = None
    """What the attempt began with: pending, or what an earlier one parked."""
    given: GenerateInput | None = None
    """What its generate function was given; its deadline moves with ours."""
    task: asyncio.Task[None] | None = None
    started: bool = False
    cause: Cause | None = None
    cancelled_mono_s: float = 0.0
    ended: bool = False
    """Its ending was decided; what its task still does is ignored."""
    sent: bool = False
    """Its result was written to Redis: it is no longer in the beat set."""
    submitted_mono_s: float = 0.0

    def __post_init__(self) -> None:
        if self.group.is_evaluation:
            self.spans = NoSpans()

    def postpone(self, seconds: float) -> None:
        """Move the deadline: for so long the run stood still."""
        self.deadline_mono_s += seconds
        if self.given is not None:
            self.given.deadline = self.deadline_mono_s

    def cancel(self, cause: Cause) -> None:
        """Stop the attempt; the first cause counts."""
        if self.ended or self.cause is not None:
            return
        self.cause, self.cancelled_mono_s = cause, time.monotonic()
        # An attempt that has not begun looks at its cause when it does.
        if self.task is not None and self.started:
            self.task.cancel()


@dataclass(slots=True, eq=False)
class GroupWork:
    """A group of which this worker holds at least one member."""

    key: str
    """The group's id as Redis names it."""
    group: PromptGroup
    routing_key: str
    env: EnvRuntime | None
    sampling: Sampling
    tools: Mapping[str, Tool] = field(default_factory=dict)
    problem: str = ""
    """Why no member can run: a record that cannot be read, an unknown environment, …"""
    members: int = 0
    num_waiting: int = 0
    """Slots of members that ended, which `worker.submission = group` keeps until all have."""
    is_prompt_proven: bool = False
    """A sample's whole request was compared with its ids, the prompt's JSON included."""
    rendered: Any = None
    """`PromptIds`, a future of them, or the fault that rendering gave (see `groups.py`)."""
    num_answers: int = 0
    """Members that were sampled to an end here."""
    answers: set[int] = field(default_factory=set)
    """What tells their tokens apart."""

    @property
    def is_evaluation(self) -> bool:
        """Whether it is one of `GroupStream.evaluate`: nobody trains on it."""
        return is_evaluation(self.key)

    def all_alike(self, trajectory: Trajectory) -> bool:
        """Take a member's answer; True for the last of a group whose members sampled the same.

        A sign that an engine ignores seeds, or that a function gives all members one. Said only
        of groups that this worker ran whole, and not where the temperature is 0.
        """
        self.num_answers += 1
        self.answers.add(_digest(trajectory))
        whole = self.num_answers == self.group.n > 1
        return whole and len(self.answers) == 1 and self.sampling.temperature > 0


EVALUATION = "e:"
"""How the ids of evaluation groups begin."""
_MAX_PLACE_DIGITS = 12


def is_evaluation(group_id: str) -> bool:
    """Return whether a group, as Redis names it, is one of an evaluation."""
    return group_id.startswith(EVALUATION)


def place_of(group_id: str) -> int:
    """Return the number of a group: its index, or the place of an evaluation's in its list.

    The place is the number that its id ends in, behind a colon; 0 where it ends in none.

    Raises:
        WireError: it is neither.
    """
    if group_id.isascii() and group_id.isdecimal():
        return int(group_id)
    if not is_evaluation(group_id):
        raise WireError(f"group id {group_id!r} is not a number")
    last = group_id.rpartition(":")[2]
    is_number = last.isascii() and last.isdecimal() and len(last) <= _MAX_PLACE_DIGITS
    return int(last) if is_number else 0


_OF_STATUS = {
    Status.COMPLETED: StopReason.STOP,
    Status.TRUNCATED: StopReason.RESPONSE_LENGTH,
    Status.ABORTED: StopReason.ABORT_REQUESTED,
    Status.FAILED: StopReason.AGENT_ERROR,
    Status.PENDING: StopReason.AGENT_ERROR,
}
_BADNESS = {s: i for i, s in enumerate((Status.COMPLETED, Status.TRUNCATED, Status.ABORTED,
                                        Status.PENDING, Status.FAILED))}  # fmt: skip


def leaves_of(trajectory: Trajectory) -> list[Sample]:
    """Return the samples of a trajectory, whatever its shape."""
    return trajectory if isinstance(trajectory, list) else [trajectory]


def _digest(trajectory: Trajectory) -> int:
    """Return what differs between trajectories whose tokens differ, all but certainly.

    Lengths and both ends: a whole long sample would cost as much as its compression.
    """
    return hash(
        tuple(
            (len(leaf.tokens), leaf.response_length,
             leaf.tokens[len(leaf.tokens) - leaf.response_length :][:64].tobytes(),
             leaf.tokens[-64:].tobytes())
            for leaf in leaves_of(trajectory)
        )
    )  # fmt: skip


def worst_leaf(trajectory: Trajectory) -> Sample:
    """Return the leaf whose ending decides the member's."""
    if not isinstance(trajectory, list):
        return trajectory
    return max(trajectory, key=lambda leaf: _BADNESS[leaf.status])


def ending_of(trajectory: Trajectory) -> Ending:
    """Return how a trajectory that was returned is reported, by the table of `errors.py`."""
    worst = worst_leaf(trajectory)
    stop_reason = worst.stop_reason or _OF_STATUS[worst.status]
    report = report_of(stop_reason)
    ending = Ending(report, stop_reason, trajectory)
    if report is not Report.COMPLETE:
        ending.reason = MemberReason(stop_reason.value)
        ending.error = str(worst.metadata.get("error", stop_reason.value))[:MAX_ERROR_CHARS]
    return ending


def ending_of_cause(cause: Cause) -> Ending:
    """Return how an attempt that we stopped ourselves is reported."""
    if cause is Cause.DEADLINE:
        return Ending(
            Report.FINAL,
            StopReason.DEADLINE,
            reason=MemberReason.DEADLINE,
            error="the attempt did not end within its deadline",
        )
    if cause is Cause.SHUTDOWN:
        return Ending(
            Report.BACK,
            StopReason.ABORT_REQUESTED,
            reason=MemberReason.SHUTDOWN,
            error="the worker is shutting down",
        )
    return Ending(None, StopReason.ABORT_REQUESTED)


def ending_of_fault(sample: Sample, fault: RolloutFault, *, refused: bool = False) -> Ending:
    """Record a fault on its sample, and return how it is reported."""
    message = f"{type(fault).__name__}: {fault.message}"[:MAX_ERROR_CHARS]
    sample.finish(fault.reason, STATUS_OF[fault.reason])
    sample.metadata["error"] = message
    if fault.detail:
        sample.metadata["error_detail"] = fault.detail
    report = report_of(fault.reason, retryable=fault.retryable)
    ending = Ending(report, fault.reason, sample, error=message, refused=refused)
    if report is not Report.COMPLETE:
        ending.reason = MemberReason(fault.reason.value)
    return ending
