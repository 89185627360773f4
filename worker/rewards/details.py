"""Why there is no verdict: the closed set of details of a `RewardFault`.

Owns `Detail`, a metric label. Never decides what is tried again; whoever raises does. Invariant:
every fault of this room has one of these.
"""

from __future__ import annotations

from enum import StrEnum

from rollstream.errors import RewardFault


class Detail(StrEnum):
    """What went wrong with a verdict."""

    NO_LABEL = "no_label"
    """The row lacks what the reward compares with."""
    UNKNOWN_KIND = "unknown_kind"
    """The row names a reward that is not built in."""
    NOT_CONFIGURED = "not_configured"
    """The row names one that the configuration does not provide for."""
    NOT_INSTALLED = "not_installed"
    RAISED = "raised"
    """A function, an isolated job or the remote server (500) broke on it."""
    CANCELLED = "cancelled"
    """A function raised CancelledError by itself."""
    TIMEOUT = "timeout"
    INVALID = "invalid"
    """What came back is no reward."""
    TOO_LARGE = "too_large"
    CRASHED = "crashed"
    """The isolated process died."""
    LOST = "lost"
    """Nobody answered for an isolated job in time."""
    UNREACHABLE = "unreachable"
    """There is no queue for isolated jobs, or no connection to the remote server."""
    UNAVAILABLE = "unavailable"
    """The remote server is busy (408, 425, 429, 5xx), or says that it could not judge."""
    REFUSED = "refused"
    """The remote server answered with another error."""


def no_verdict(detail: Detail, message: str, *, retryable: bool = False) -> RewardFault:
    """Return the fault.

    Args:
        detail: why.
        message: for people.
        retryable: whether asking again may help; the sample is not generated again for it.
    """
    return RewardFault(message, retryable=retryable, detail=detail.value)


class Later(RewardFault):
    """No verdict, from a server that says when it may be asked again.

    Attributes:
        after_s: seconds from now.
    """

    after_s = 0.0


def later(message: str, after_s: float) -> Later:
    """Return the fault of a server that is busy."""
    fault = Later(message, retryable=True, detail=Detail.UNAVAILABLE.value)
    fault.after_s = after_s
    return fault
