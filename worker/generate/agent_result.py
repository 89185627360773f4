"""What an agent returned, and how its trajectory ended, written into the samples of its session.

Owns the checks on a returned dictionary and the order of reasons. Never touches tokens, log-probs
or masks. Invariant: every leaf of one trajectory gets the same reward and a metadata of its own,
in which the agent's entries stand over the row's, and ours over the agent's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from rollstream.errors import STATUS_OF, RewardFault, StopReason
from rollstream.group import Trajectory
from rollstream.sample import Reward

from ..functions import describe

REWARD = "reward"
"""Of a returned dictionary: the reward of the trajectory."""
ERROR = "error"
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent itself ended; what the session says stands beside it."""

    returned: dict[str, Any] | None = None
    """Plain data; None where it returned nothing, or nothing that can be kept."""
    reason: StopReason | None = None
    """`agent_error` or `deadline`; None where it returned as it should."""
    error: str = ""


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
    return Outcome(plain)


def failed(error: str) -> Outcome:
    """Return the outcome of an agent that broke."""
    return Outcome(None, StopReason.AGENT_ERROR, f"AgentFault: {error}"[:MAX_ERROR_CHARS])


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
) -> Trajectory:
    """Write the agent's outcome into the samples of its session, and return them.

    Args:
        trajectory: as the session collected it, with the endings of its last turns.
        outcome: of the agent.
        row: the metadata that the sample began with.
        ended_by: the limit that refused the agent's last request, or cut its last turn; or
            `abort_weights`.

    Raises:
        RewardFault: the reward that it gave is none.
    """
    leaves = trajectory if isinstance(trajectory, list) else [trajectory]
    reward = reward_of(outcome.returned)
    for leaf in leaves:
        ours = {k: v for k, v in leaf.metadata.items() if k not in row or row[k] is not v}
        leaf.metadata = {**row, **copy.deepcopy(outcome.returned or {}), **ours}
        if outcome.error:
            leaf.metadata[ERROR] = outcome.error
        if reward is not None:
            leaf.reward = dict(reward) if isinstance(reward, dict) else reward
    reason = _reason(outcome, ended_by, is_list=isinstance(trajectory, list))
    if reason is not None:
        for leaf in leaves:
            leaf.finish(reason, STATUS_OF[reason])
    return trajectory


def _reason(outcome: Outcome, ended_by: StopReason | None, *, is_list: bool) -> StopReason | None:
    """Return why the whole trajectory ended; None where each leaf's last turn says it.

    What begins anew begins anew whatever the agent did. An agent that broke behind a limit broke
    of it, and one that returned behind it could not have gone on; of several leaves nobody knows
    whose request was refused.
    """
    if ended_by is StopReason.ABORT_WEIGHTS:
        return ended_by
    if outcome.reason is StopReason.AGENT_ERROR:
        return ended_by or outcome.reason
    return outcome.reason or (None if is_list else ended_by)
