"""The judgement of one full group: from its stored headers to keep, or drop with one reason.

Owns the order of the checks. Never talks to Redis: bodies and the group's reward come from
functions it is given. Invariant: the order is `no_aborted` over all members, then enough usable
members, then the group's reward, where there is one, and enough members that have one, then the
other filters over the usable ones; the first that drops gives the reason, and there is exactly one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstream.errors import DropReason, MemberReason, Status
from rollstream.group import Drop, EnvRule, GroupView, Keep, MemberView, judge_member
from rollstream.queue.reads import StoredGroup
from rollstream.sample import Sample
from rollstream.wire import decode_header

from ..bounded import Overdue, in_thread, run_bounded
from ..functions import describe
from ..members.groups import own_copy
from ..members.work import place_of
from .loader import LoadedFilter

if TYPE_CHECKING:
    from .group_reward import GroupReward

_SHORT_OF = {
    DropReason.DEADLINE.value: DropReason.DEADLINE,
    DropReason.TOO_LARGE.value: DropReason.TOO_LARGE,
}
"""Why the first member failed → the reason of a group that is short because of it."""


_PLAIN = EnvRule()


@dataclass(frozen=True, slots=True)
class EnvJudge:
    """How the groups of one environment are judged."""

    name: str
    rule: EnvRule = _PLAIN
    filters: Sequence[LoadedFilter] = ()
    min_samples: int | None = None
    """Usable members that a group needs; None is all n."""
    filter_timeout_s: float = 10.0
    """How long one filter of the user's may take over one group."""
    group_reward: GroupReward | None = None
    """Scores the members of a group that have no reward."""

    @property
    def runs_user_code(self) -> bool:
        """Whether something is the user's: it may be slow, hang, or take the process with it."""
        return self.group_reward is not None or not all(one.built_in for one in self.filters)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided on a group."""

    drop: DropReason | None = None
    detail: str = ""


class FilterError(Exception):
    """A filter raised, or answered something that is neither Keep nor Drop."""


class FilterHung(FilterError):
    """A filter did not answer in time. It is not asked again: that would cost as much again."""


KEEP = Verdict()


def view_of(stored: StoredGroup, env: EnvJudge, metadata: Mapping[str, Any]) -> GroupView:
    """Return the group as filters see it.

    Raises:
        WireError: a header that cannot be read.
    """
    rule = env.rule
    members = [
        judge_member(
            i,
            decode_header(raw) if raw is not None else None,
            stored.errors[i],
            rule,
        )
        for i, raw in enumerate(stored.headers)
    ]
    if rule.on_truncated == "mask":
        for leaf in (leaf for m in members if m.header is not None for leaf in m.header.leaves):
            if leaf.status is Status.TRUNCATED:
                leaf.num_trainable = 0
    return GroupView(place_of(stored.group_index), stored.n, env.name, members, dict(metadata))


async def judge(
    view: GroupView,
    env: EnvJudge,
    why: str,
    bodies: Callable[[], Awaitable[None]],
    score: Callable[[], Awaitable[None]] | None = None,
) -> Verdict:
    """Judge one group.

    Args:
        view: the group.
        env: its environment.
        why: what its first failed member failed for, "" where none did.
        bodies: fills in the members' trajectories; called at most once, when a filter needs them.
        score: asks the group's reward and judges the members of the view anew by what it says;
            called at most once, and only where enough of them can be scored at all.

    Raises:
        FilterError: a filter of the user's broke.
    """
    rest = []
    for one in env.filters:
        if not one.judges_aborted:
            rest.append(one)
        elif (verdict := await _ask(one, view, env.filter_timeout_s)).drop is not None:
            return verdict
    usable, needed = len(view.usable), min(env.min_samples or view.n, view.n)
    if score is not None and usable >= needed:
        await score()
        usable = len(view.usable)
    if usable < needed:
        return Verdict(_SHORT_OF.get(why, DropReason.SHORT_GROUP), _who_is_missing(view, needed))
    fetched = False
    for one in rest:
        if one.needs == "bodies" and not fetched:
            await bodies()
            fetched = True
        verdict = await _ask(one, view, env.filter_timeout_s)
        if verdict.drop is not None:
            return verdict
    return KEEP


async def _ask(one: LoadedFilter, view: GroupView, timeout_s: float) -> Verdict:
    try:
        if one.built_in:
            answer = one.function(view)
        else:
            # A copy: what it writes into it (by mistake, or late) is nobody's verdict or figure.
            # In a thread: rewards of hundreds of members may be large dictionaries.
            mine = await in_thread(own_view, view)
            answer = await run_bounded(one.function, mine, timeout_s=timeout_s)
    except Overdue:
        raise FilterHung(f"filter {one.name}: no answer within {timeout_s:g} s") from None
    except Exception as error:
        raise FilterError(f"filter {one.name}: {describe(error)}") from error
    if isinstance(answer, Keep):
        return KEEP
    if not isinstance(answer, Drop):
        kind = type(answer).__name__
        raise FilterError(f"filter {one.name}: it answered {kind}, expected Keep or Drop")
    if one.built_in:
        return Verdict(DropReason(answer.reason), f"{one.name}: {answer.detail}")
    detail = f"{answer.reason}: {answer.detail}" if answer.detail else str(answer.reason)
    return Verdict(DropReason.CUSTOM, f"{one.name}: {detail}")


def own_view(view: GroupView) -> GroupView:
    """Return a view that may be written into; arrays and calls are shared."""
    members = [_own_member(member) for member in view.members]
    return dataclasses.replace(view, members=members, metadata=own_copy(view.metadata))


def _own_member(member: MemberView) -> MemberView:
    mine = copy.copy(member)
    if mine.header is not None:
        leaves = [copy.copy(leaf) for leaf in mine.header.leaves]
        for leaf in leaves:
            leaf.reward = own_copy(leaf.reward)
        mine.header = dataclasses.replace(mine.header, leaves=leaves)
    mine.missing = copy.copy(mine.missing)
    if isinstance(mine.trajectory, list):
        mine.trajectory = [_own_sample(leaf) for leaf in mine.trajectory]
    elif mine.trajectory is not None:
        mine.trajectory = _own_sample(mine.trajectory)
    return mine


def _own_sample(sample: Sample) -> Sample:
    mine = copy.copy(sample)
    mine.reward, mine.metadata = own_copy(mine.reward), own_copy(mine.metadata)
    return mine


def _who_is_missing(view: GroupView, needed: int) -> str:
    reasons = Counter(
        f"{m.missing.reason} ({m.missing.error})" if _is_word(m.missing.error) else m.missing.reason
        for m in view.members
        if m.missing is not None
    )
    parts = [f"{reason} x{count}" for reason, count in sorted(reasons.items())]
    told = f"{len(view.usable)} of {view.n} usable, {needed} needed: {', '.join(parts)}"
    causes = (m.missing.error for m in view.members if m.header is not None and m.missing
              and m.missing.reason == MemberReason.REWARD_ERROR)  # fmt: skip
    cause = next((error for error in causes if not _is_word(error)), "")
    return f"{told} ({cause})" if cause else told


def _is_word(text: str) -> bool:
    """Whether an error is a label (`missing`, `invalid`) rather than a message."""
    return text.isidentifier()
