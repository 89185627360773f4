"""Every error and every reason, and the one table that says how a worker reports an ending.

    RollstreamError
    ├── ContractError          our bug, or a broken promise between our own parts: stop
    ├── WireError (ValueError) a record that cannot be read: garbage or truncated
    │   └── WireTooNew         a record of a newer major version: upgrade this side
    ├── ConfigError (ValueError)  the user's configuration: says what, where and what to do
    ├── RunMismatch            a run of this name exists with other data or another schema
    ├── StreamError            how a GroupStream ends other than normally
    │   ├── StreamStalled      nothing ended for `timeout_s`; resumable
    │   ├── ProducerGone       prompts are missing and no producer lives
    │   ├── RunFailed          the run was ended as failed; carries its reason
    │   ├── RunLost            Redis has no such run any more
    │   ├── ConsumerTaken      a newer trainer took the run over
    │   ├── CapacityTooSmall   the batch can never fill; carries the three numbers
    │   └── PauseNotConfirmed  a worker did not obey a pause in time; the run goes on as before
    └── RolloutFault           data, not a crash: recorded on the sample, `retryable` or not
        ├── EngineFault · ToolFault · EnvFault · AgentFault · RewardFault · MergeFault
        └── Withheld           nothing broke: no call is made now, the sample is given back

Owns the closed enums of reasons (they are metric labels too). Never logs or retries.
Invariant: the status of a sample is a function of its stop reason, by `STATUS_OF`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class RollstreamError(Exception):
    """Base of everything this package raises on purpose."""


class ContractError(RollstreamError):
    """A promise between our own parts is broken; nothing sensible can go on."""


class WireError(RollstreamError, ValueError):
    """A record from Redis or a file cannot be read."""


class WireTooNew(WireError):
    """A record is sound, but of a newer wire version than this side knows."""


class ConfigError(RollstreamError, ValueError):
    """The configuration is wrong; the message says what, where and what to do."""


class RunMismatch(RollstreamError):
    """A run of this name exists already with another source, seed or schema."""


class StreamError(RollstreamError):
    """A GroupStream cannot go on as asked."""


class StreamStalled(StreamError):
    """Nothing ended for the given time; the stream itself is intact and can be iterated again."""


class ProducerGone(StreamError):
    """The source is not finished, nothing is in flight, and no producer is alive."""


class RunFailed(StreamError):
    """The run was ended as failed.

    Attributes:
        reason: what the worker or the operator gave as the cause.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the run failed: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.reason,))


class RunLost(StreamError):
    """Redis does not know the run any more (emptied, or never opened)."""


class ConsumerTaken(StreamError):
    """A later `connect` took the run over; this process may ack nothing more."""


class CapacityTooSmall(StreamError):
    """The asked batch can never fill: more groups than may be live at once."""

    def __init__(self, groups: int, capacity: int, live: int) -> None:
        super().__init__(
            f"a batch of {groups} groups can never fill: capacity is {capacity} and {live} are "
            f"live; ask for at most {capacity}, or raise producer.capacity_groups (and "
            "weights.groups_per_step, which bounds it where staleness is)"
        )
        self.groups, self.capacity, self.live = groups, capacity, live

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.groups, self.capacity, self.live))


class PauseNotConfirmed(StreamError):
    """A worker that is alive did not confirm a pause in time; the run goes on as it was before.

    Attributes:
        workers: those that did not.
    """

    def __init__(self, message: str, workers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.args[0], self.workers))


class Status(StrEnum):
    """Status of a sample; names and meanings are those of miles."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(StrEnum):
    """Why a trajectory ended; closed, and the label of every metric that counts endings."""

    STOP = "stop"
    MAX_TURNS = "max_turns"
    TURN_LENGTH = "turn_length"
    RESPONSE_LENGTH = "response_length"
    CONTEXT_LENGTH = "context_length"
    PROMPT_TOO_LONG = "prompt_too_long"
    ABORT_REQUESTED = "abort_requested"
    ABORT_WEIGHTS = "abort_weights"
    DEADLINE = "deadline"
    NO_MODEL_CALL = "no_model_call"
    ENGINE_ERROR = "engine_error"
    TOOL_ERROR = "tool_error"
    ENV_ERROR = "env_error"
    AGENT_ERROR = "agent_error"
    REWARD_ERROR = "reward_error"
    MERGE_ERROR = "merge_error"


STATUS_OF: dict[StopReason, Status] = {
    StopReason.STOP: Status.COMPLETED,
    StopReason.MAX_TURNS: Status.COMPLETED,
    StopReason.TURN_LENGTH: Status.TRUNCATED,
    StopReason.RESPONSE_LENGTH: Status.TRUNCATED,
    StopReason.CONTEXT_LENGTH: Status.TRUNCATED,
    StopReason.PROMPT_TOO_LONG: Status.TRUNCATED,
    StopReason.ABORT_REQUESTED: Status.ABORTED,
    StopReason.ABORT_WEIGHTS: Status.ABORTED,
    StopReason.DEADLINE: Status.ABORTED,
    StopReason.NO_MODEL_CALL: Status.ABORTED,
    StopReason.ENGINE_ERROR: Status.FAILED,
    StopReason.TOOL_ERROR: Status.FAILED,
    StopReason.ENV_ERROR: Status.FAILED,
    StopReason.AGENT_ERROR: Status.FAILED,
    StopReason.REWARD_ERROR: Status.FAILED,
    StopReason.MERGE_ERROR: Status.FAILED,
}


class MemberReason(StrEnum):
    """Why a member failed for good: the stop reasons that fail, and what the queue itself ends."""

    ENGINE_ERROR = "engine_error"
    TOOL_ERROR = "tool_error"
    ENV_ERROR = "env_error"
    AGENT_ERROR = "agent_error"
    REWARD_ERROR = "reward_error"
    MERGE_ERROR = "merge_error"
    ABORT_WEIGHTS = "abort_weights"
    DEADLINE = "deadline"
    CRASHED = "crashed"
    TOO_LARGE = "too_large"
    NO_ENGINE = "no_engine"
    SHUTDOWN = "shutdown"


class DropReason(StrEnum):
    """Why a group was dropped; a user's own reason is the detail under `custom`."""

    ZERO_STD = "zero_std"
    NO_ABORTED = "no_aborted"
    RANGE = "range"
    MIN_OK = "min_ok"
    LENGTH = "length"
    CUSTOM = "custom"
    SHORT_GROUP = "short_group"
    STALE = "stale"
    WITHDRAWN = "withdrawn"
    DEADLINE = "deadline"
    FILTER_ERROR = "filter_error"
    TOO_LARGE = "too_large"
    SEEN = "seen"
    RUN_ABORTED = "run_aborted"


class Report(StrEnum):
    """How a worker tells the queue that it is done with a member."""

    COMPLETE = "complete"
    BACK = "back"
    PARK = "park"
    """Given back uncharged with the tokens it has: whoever leases it next goes on from there."""
    RETRY = "retry"
    FINAL = "final"


_REPORT_OF: dict[StopReason, Report] = {
    StopReason.STOP: Report.COMPLETE,
    StopReason.MAX_TURNS: Report.COMPLETE,
    StopReason.TURN_LENGTH: Report.COMPLETE,
    StopReason.RESPONSE_LENGTH: Report.COMPLETE,
    StopReason.CONTEXT_LENGTH: Report.COMPLETE,
    StopReason.PROMPT_TOO_LONG: Report.COMPLETE,
    StopReason.ABORT_REQUESTED: Report.COMPLETE,
    StopReason.AGENT_ERROR: Report.COMPLETE,
    StopReason.NO_MODEL_CALL: Report.COMPLETE,
    StopReason.ABORT_WEIGHTS: Report.BACK,
    StopReason.MERGE_ERROR: Report.FINAL,
    StopReason.DEADLINE: Report.FINAL,
}
"""Endings whose report does not depend on whether the fault may pass by itself."""


def report_of(stop_reason: StopReason, *, retryable: bool = False) -> Report:
    """Return how a worker reports a trajectory that ended for `stop_reason`.

    `complete` means the trajectory ended, for whatever policy-caused reason; the others mean that
    infrastructure ended it. Engine, tool-host, environment and reward errors are tried again only
    where they are marked retryable; a refusal (4xx) is not.
    """
    known = _REPORT_OF.get(stop_reason)
    if known is not None:
        return known
    return Report.RETRY if retryable else Report.FINAL


class RolloutFault(RollstreamError):
    """Something broke at a boundary while one trajectory ran; recorded, never fatal.

    Attributes:
        reason: the stop reason that the sample gets.
        retryable: whether another attempt may succeed.
        detail: a short label out of a closed set per boundary (metrics), e.g. `nan_logprob`.
    """

    reason: StopReason = StopReason.ENGINE_ERROR

    def __init__(self, message: str, *, retryable: bool = False, detail: str = "") -> None:
        super().__init__(message)
        self.message, self.retryable, self.detail = message, retryable, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_fault, (type(self), self.message, self.retryable, self.detail))


def _rebuild_fault(
    kind: type[RolloutFault], message: str, retryable: bool, detail: str
) -> RolloutFault:
    return kind(message, retryable=retryable, detail=detail)


class EngineFault(RolloutFault):
    """An engine answered nothing, an error, or something impossible."""

    reason = StopReason.ENGINE_ERROR


class Withheld(RolloutFault):
    """No call is made: the run is about to get new weights, or this worker is about to end.

    A function that is resumable returns what it has as `abort_weights`; any other lets it pass, and
    its member is given back uncharged.
    """

    reason = StopReason.ABORT_WEIGHTS

    def __init__(
        self,
        message: str = "no call is made during this pause",
        *,
        retryable: bool = True,
        detail: str = "",
    ) -> None:
        super().__init__(message, retryable=retryable, detail=detail)


class ToolFault(RolloutFault):
    """The host that runs tools broke (a tool that raises is an observation, not this)."""

    reason = StopReason.TOOL_ERROR


class EnvFault(RolloutFault):
    """The environment broke."""

    reason = StopReason.ENV_ERROR


class AgentFault(RolloutFault):
    """A user's generate or agent function raised."""

    reason = StopReason.AGENT_ERROR


class RewardFault(RolloutFault):
    """A reward could not be computed; never the same as reward 0."""

    reason = StopReason.REWARD_ERROR


class MergeFault(RolloutFault):
    """Two turns cannot be one append-only trajectory."""

    reason = StopReason.MERGE_ERROR
