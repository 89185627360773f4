"""What an agent returned, and how its trajectory ended, written into the samples of its session.

Owns the checks on a returned dictionary and the order of reasons. Never touches tokens, log-probs
or masks, and never raises: what the agent did wrong is an outcome. Invariant: every leaf of one
trajectory gets the same reward and a metadata of its own, in which the agent's entries stand over
the row's, and ours over the agent's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from rollstream.errors import STATUS_OF, AgentFault, RewardFault, RolloutFault, Status, StopReason
from rollstream.group import Trajectory
from rollstream.sample import Reward, Sample

from ..functions import describe
from ..tools.text import clean

REWARD = "reward"
"""Of a returned dictionary: the reward of the trajectory."""
ERROR, DETAIL = "error", "error_detail"
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent itself ended; what the session says stands beside it."""

    returned: dict[str, Any] | None = None
    """Plain data; None where it returned nothing, or nothing that can be kept."""
    reward: Reward = None
    reason: StopReason | None = None
    """`agent_error`, `deadline` or a fault's; None where it returned as it should."""
    error: str = ""
    detail: str = ""
    """A fault's own."""
    yields: bool = False
    """It may have broken of the limit that refused its last request, which then is the reason."""


def outcome_of(returned: Any) -> Outcome:
    """Return the outcome of an agent that returned."""
    if returned is None:
        return Outcome()
    if not isinstance(returned, dict):
        return failed(
            f"the agent returned {type(returned).__name__}; it must return a dictionary or None"
        )
    try:
        plain = msgpack.unpackb(msgpack.packb(returned, default=_scalar), strict_map_key=True)
    except (TypeError, ValueError, OverflowError) as error:
        return failed(
            f"the agent returned a dictionary that cannot be stored ({describe(error)}); use text, "
            "numbers, lists and dictionaries with names of text"
        )
    try:
        return Outcome(plain, reward_of(plain))
    except RewardFault as fault:
        return faulted(fault, plain)


def failed(error: str) -> Outcome:
    """Return the outcome of an agent that broke."""
    return replace(faulted(AgentFault(error)), yields=True)


def faulted(fault: RolloutFault, returned: dict[str, Any] | None = None) -> Outcome:
    """Return the outcome of an agent that ended by a fault, whose reason stands whatever else."""
    error = clean(f"{type(fault).__name__}: {fault.message}")[:MAX_ERROR_CHARS]
    return Outcome(returned, None, fault.reason, error, clean(str(fault.detail)))


def with_picked(outcome: Outcome, trajectory: Trajectory) -> Outcome:
    """Return an outcome beside what was collected, which has failed where the picker broke.

    Its leaves are not those that the user wanted then, so no limit makes them fit to be trained.
    """
    first = _leaves(trajectory)[0]
    if first.status is not Status.FAILED:
        return outcome
    both = (outcome.error, str(first.metadata[ERROR]))
    has_own = outcome.reason is not None and not outcome.yields
    return replace(
        outcome,
        reason=outcome.reason if has_own else StopReason.AGENT_ERROR,
        error="; ".join(error for error in both if error)[:MAX_ERROR_CHARS],
        detail=outcome.detail or str(first.metadata[DETAIL]),
        yields=False,
    )


def _scalar(value: Any) -> Any:
    """Return numpy's scalars (and others with an `item`) as plain numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__}")


def reward_of(returned: Mapping[str, Any] | None) -> Reward:
    """Return the reward that an agent gave; None where it gave none.

    By the rules of every reward: a bool counts as 0 or 1, NaN stays and is judged with the group.

    Raises:
        RewardFault: neither a number nor a dictionary.
    """
    value = None if returned is None else returned.get(REWARD)
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, bool | int | float):
        raise RewardFault(
            f"the agent gave the reward {describe_value(value)}; it must be a number, a dictionary "
            "or None",
            detail="invalid",
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def describe_value(value: Any) -> str:
    """Return a value for an error, bounded."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"


def write(
    trajectory: Trajectory,
    outcome: Outcome,
    *,
    row: Mapping[str, Any],
    ended_by: StopReason | None,
    refused_by: StopReason | None,
) -> Trajectory:
    """Write the agent's outcome into the samples of its session, and return them.

    Args:
        trajectory: as the session collected it, with the endings of its last turns.
        outcome: of the agent.
        row: the metadata that the sample began with.
        ended_by: the limit that refused the agent's last request, or cut its last turn; or
            `abort_weights`.
        refused_by: the limit, where it refused.
    """
    leaves, reward = _leaves(trajectory), outcome.reward
    for leaf in leaves:
        ours = {k: v for k, v in leaf.metadata.items() if k not in row or row[k] is not v}
        leaf.metadata = {**row, **copy.deepcopy(outcome.returned or {}), **ours}
        if outcome.error:
            leaf.metadata[ERROR] = outcome.error
        if outcome.detail:
            leaf.metadata[DETAIL] = outcome.detail
        if reward is not None:
            leaf.reward = dict(reward) if isinstance(reward, dict) else reward
    reason = _reason(outcome, ended_by, refused_by, is_list=isinstance(trajectory, list))
    if reason is not None:
        for leaf in leaves:
            leaf.finish(reason, STATUS_OF[reason])
    return trajectory


def _leaves(trajectory: Trajectory) -> list[Sample]:
    return trajectory if isinstance(trajectory, list) else [trajectory]


def _reason(
    outcome: Outcome,
    ended_by: StopReason | None,
    refused_by: StopReason | None,
    *,
    is_list: bool,
) -> StopReason | None:
    """Return why the whole trajectory ended; None where each leaf's last turn says it.

    What begins anew begins anew whatever the agent did. An agent that broke behind a refusal broke
    of it; behind a turn that was only cut it had its answer, and broke by itself. One that returned
    behind either could not have gone on; of several leaves nobody knows whose request was refused.
    """
    if ended_by is StopReason.ABORT_WEIGHTS:
        return ended_by
    if outcome.yields:
        return refused_by or outcome.reason
    return outcome.reason or (None if is_list else ended_by)
