"""The table of states is closed, and `advance` is nothing but the table."""

from __future__ import annotations

import itertools

import pytest

from rollstream.errors import ContractError
from rollstream.states import (
    FINAL_MEMBER_STATES,
    GROUP_TRANSITIONS,
    MEMBER_TRANSITIONS,
    TERMINAL_GROUP_STATES,
    GroupEvent,
    GroupState,
    MemberEvent,
    MemberState,
    advance,
    advance_member,
)


def test_advance_follows_the_table_and_refuses_everything_else() -> None:
    for state, event in itertools.product(GroupState, GroupEvent):
        if (state, event) in GROUP_TRANSITIONS:
            assert advance(state, event) is GROUP_TRANSITIONS[state, event]
        else:
            with pytest.raises(ContractError, match=f"{state} cannot be {event}"):
                advance(state, event)


def test_advance_member_follows_the_table_and_refuses_everything_else() -> None:
    for state, event in itertools.product(MemberState, MemberEvent):
        if (state, event) in MEMBER_TRANSITIONS:
            assert advance_member(state, event) is MEMBER_TRANSITIONS[state, event]
        else:
            with pytest.raises(ContractError, match=f"{state} cannot be {event}"):
                advance_member(state, event)


def test_terminal_states_have_no_way_out() -> None:
    assert {s for s, _ in GROUP_TRANSITIONS} == set(GroupState) - TERMINAL_GROUP_STATES
    leads_out = {s for s, event in MEMBER_TRANSITIONS if event is not MemberEvent.REQUEUED}
    assert leads_out == set(MemberState) - FINAL_MEMBER_STATES


def test_a_requeue_takes_every_member_of_a_live_group_back_to_the_queue() -> None:
    for state in set(MemberState) - {MemberState.WITHDRAWN}:
        assert advance_member(state, MemberEvent.REQUEUED) is MemberState.QUEUED
    for state in set(GroupState) - TERMINAL_GROUP_STATES:
        assert advance(state, GroupEvent.REQUEUED) is GroupState.OPEN


def test_every_live_state_can_be_dropped_acked_and_reaches_the_trainer() -> None:
    for state in set(GroupState) - TERMINAL_GROUP_STATES:
        assert advance(state, GroupEvent.DROPPED) is GroupState.DROPPED
        assert advance(state, GroupEvent.ACKED) is GroupState.ACKED
    path = [GroupEvent.LAST_MEMBER_ENDED, GroupEvent.KEPT, GroupEvent.HANDED_OUT, GroupEvent.ACKED]
    state = GroupState.OPEN
    for event in path:
        state = advance(state, event)
    assert state is GroupState.ACKED


def test_a_deadline_or_a_drop_ends_every_member_that_is_not_final() -> None:
    for state in set(MemberState) - FINAL_MEMBER_STATES:
        assert advance_member(state, MemberEvent.FAILED_FINALLY) is MemberState.FAILED
        assert advance_member(state, MemberEvent.GROUP_ENDED) is MemberState.WITHDRAWN
