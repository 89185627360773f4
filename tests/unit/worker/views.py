"""Builders of group views, for the tests of filters and judgement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollstream.errors import STATUS_OF, StopReason
from rollstream.group import EnvRule, GroupView, Leaf, MemberHeader, judge_member

DEADLINE = ("deadline", "the deadline of the group passed")


def leaf(reward: Any = 1.0, stop: StopReason = StopReason.STOP, *, tokens: int = 5) -> Leaf:
    """Return the header of one sample."""
    return Leaf(
        status=STATUS_OF[stop],
        stop_reason=stop,
        reward=reward,
        response_length=tokens,
        num_tokens=tokens + 3,
        num_sampled=tokens,
        num_trainable=tokens,
        versions=(0, 0),
    )


def header(*leaves: Leaf, is_list: bool | None = None) -> MemberHeader:
    """Return a member's header; several leaves are a list result."""
    return MemberHeader(len(leaves) > 1 if is_list is None else is_list, list(leaves))


def view(
    members: Sequence[MemberHeader | tuple[str, str]],
    **rule: Any,
) -> GroupView:
    """Return a view of members: headers, or (reason, error) where the queue ended one.

    Args:
        members: in order.
        rule: fields of the environment's `EnvRule`.
    """
    judged = [
        judge_member(
            i,
            member if isinstance(member, MemberHeader) else None,
            None if isinstance(member, MemberHeader) else member,
            EnvRule(**rule),
        )
        for i, member in enumerate(members)
    ]
    return GroupView(7, len(members), "default", judged)


def rewarded(*rewards: Any, **options: Any) -> GroupView:
    """Return a view of completed members with these rewards."""
    return view([header(leaf(reward)) for reward in rewards], **options)
