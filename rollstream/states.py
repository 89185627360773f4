"""The life of a group and of a member: every state, every event, every legal move.

Owns the one table of transitions and the pure function over it. Never does I/O; the Lua scripts
make the moves and name the event they make, and a test holds them against this table.
Invariant: a group ends in exactly one of `acked` and `dropped`, and leaves neither.
"""

from __future__ import annotations

from enum import StrEnum

from rollstream.errors import ContractError


class GroupState(StrEnum):
    """Where a prompt group stands between the producer and the trainer."""

    OPEN = "open"
    FULL = "full"
    READY = "ready"
    DELIVERED = "delivered"
    ACKED = "acked"
    DROPPED = "dropped"


class MemberState(StrEnum):
    """Where one member of a group stands between the queue and its result."""

    QUEUED = "queued"
    DELAYED = "delayed"
    LEASED = "leased"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


class GroupEvent(StrEnum):
    """What can happen to a group."""

    LAST_MEMBER_ENDED = "last_member_ended"
    KEPT = "kept"
    HANDED_OUT = "handed_out"
    ACKED = "acked"
    DROPPED = "dropped"
    REQUEUED = "requeued"


class MemberEvent(StrEnum):
    """What can happen to a member."""

    LEASED = "leased"
    COMPLETED = "completed"
    FAILED_FINALLY = "failed_finally"
    SENT_BACK = "sent_back"
    SENT_BACK_LATER = "sent_back_later"
    CAME_DUE = "came_due"
    PARKED = "parked"
    GROUP_ENDED = "group_ended"
    REQUEUED = "requeued"


_G, _GE = GroupState, GroupEvent
_M, _ME = MemberState, MemberEvent
_LIVE = (_G.OPEN, _G.FULL, _G.READY, _G.DELIVERED)
_WAITING = (_M.QUEUED, _M.DELAYED, _M.PARKED)

GROUP_TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_G.OPEN, _GE.LAST_MEMBER_ENDED): _G.FULL,
    (_G.FULL, _GE.KEPT): _G.READY,
    (_G.READY, _GE.HANDED_OUT): _G.DELIVERED,
    # A trainer that reconnects is handed its own unacked groups again.
    (_G.DELIVERED, _GE.HANDED_OUT): _G.DELIVERED,
    # An ack is a fact the trainer tells, so it ends any live state (a rolled-back server may
    # remember the group as open although it was trained).
    **{(state, _GE.ACKED): _G.ACKED for state in _LIVE},
    **{(state, _GE.DROPPED): _G.DROPPED for state in _LIVE},
    **{(state, _GE.REQUEUED): _G.OPEN for state in _LIVE},
}

MEMBER_TRANSITIONS: dict[tuple[MemberState, MemberEvent], MemberState] = {
    **{(state, _ME.LEASED): _M.LEASED for state in (_M.QUEUED, _M.PARKED)},
    (_M.LEASED, _ME.COMPLETED): _M.DONE,
    (_M.LEASED, _ME.SENT_BACK): _M.QUEUED,
    (_M.LEASED, _ME.SENT_BACK_LATER): _M.DELAYED,
    (_M.LEASED, _ME.PARKED): _M.PARKED,
    (_M.DELAYED, _ME.CAME_DUE): _M.QUEUED,
    # A deadline ends every member that is not final, wherever it is.
    **{(state, _ME.FAILED_FINALLY): _M.FAILED for state in (*_WAITING, _M.LEASED)},
    **{(state, _ME.GROUP_ENDED): _M.WITHDRAWN for state in (*_WAITING, _M.LEASED)},
    # A new life of the group: whatever its members had is forgotten.
    **{(state, _ME.REQUEUED): _M.QUEUED for state in (*_WAITING, _M.LEASED, _M.DONE, _M.FAILED)},
}

TERMINAL_GROUP_STATES = frozenset({GroupState.ACKED, GroupState.DROPPED})
FINAL_MEMBER_STATES = frozenset({MemberState.DONE, MemberState.FAILED, MemberState.WITHDRAWN})
"""Nothing but a requeue of the whole group leads out of them, and nothing out of withdrawn."""


def advance(state: GroupState, event: GroupEvent) -> GroupState:
    """Return the state a group is in after `event`.

    Raises:
        ContractError: the table has no such move.
    """
    try:
        return GROUP_TRANSITIONS[state, event]
    except KeyError:
        raise ContractError(f"a group that is {state} cannot be {event}") from None


def advance_member(state: MemberState, event: MemberEvent) -> MemberState:
    """Return the state a member is in after `event`.

    Raises:
        ContractError: the table has no such move.
    """
    try:
        return MEMBER_TRANSITIONS[state, event]
    except KeyError:
        raise ContractError(f"a member that is {state} cannot be {event}") from None
