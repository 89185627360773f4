"""From a group as Redis stores it to the group that a trainer gets.

Owns that one step, which runs once per sample on the trainer's hot path. Never does I/O.
Invariant: the header is the authority on status and reward (a group's verdict may have rewritten
it), the body on tokens; a member is either among the samples or among the missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollstream.errors import WireError
from rollstream.group import (
    EnvRule,
    FinishedGroup,
    MemberHeader,
    Missing,
    Trajectory,
    judge_member,
    mask_truncated,
)
from rollstream.wire import decode_body, decode_header, decode_prompt

if TYPE_CHECKING:
    from rollstream.queue.reads import StoredGroup

DEFAULT_RULE = EnvRule()


def assemble(
    stored: StoredGroup, rules: Mapping[str, EnvRule], group_index: int | None = None
) -> tuple[FinishedGroup, int | None]:
    """Return the finished group and the oldest known weight version of its samples.

    Its arrays are read-only views of the stored bytes; its staleness is for the caller to set, when
    it hands the group out.

    Args:
        stored: prompt, headers, errors and bodies, one entry per member.
        rules: what of each environment decides usability; one without a rule needs a reward.
        group_index: of an evaluation, whose name is no number.

    Raises:
        WireError: a record is missing or garbage (`WireTooNew` for a newer one).
    """
    if group_index is None:
        group_index = int(stored.group_index)
    if stored.prompt is None:
        raise WireError(f"group {group_index}: its prompt is gone")
    prompt = decode_prompt(stored.prompt, group_index, stored.n)
    rule = rules.get(prompt.env, DEFAULT_RULE)
    samples: list[Trajectory] = []
    missing: list[Missing] = []
    waits: list[float] = []
    oldest: int | None = None
    for member, raw in enumerate(stored.headers):
        header = None if raw is None else decode_header(raw)
        view = judge_member(member, header, stored.errors[member], rule)
        if header is not None and header.done_unix_s:
            waits.append(max(0.0, stored.full_unix_s - header.done_unix_s))
        if view.missing is not None or header is None:
            missing.append(view.missing or Missing(member, view.status, ""))
            continue
        body = stored.bodies[member]
        if body is None:
            raise WireError(f"group {group_index}: the body of member {member} is gone")
        trajectory = decode_body(body, prompt, stored.texts[member] if stored.texts else None)
        _take_rewards(trajectory, header, group_index)
        if rule.on_truncated == "mask":
            mask_truncated(trajectory)
        samples.append(trajectory)
        for leaf in header.leaves:
            if leaf.versions is not None and (oldest is None or leaf.versions[0] < oldest):
                oldest = leaf.versions[0]
    group = FinishedGroup(
        group_index=group_index,
        env=prompt.env,
        samples=samples,
        missing=missing,
        spans={"group_wait": waits},
        reward_key=rule.reward_key,
    )
    return group, oldest


def _take_rewards(trajectory: Trajectory, header: MemberHeader, group_index: int) -> None:
    leaves = trajectory if isinstance(trajectory, list) else [trajectory]
    if len(leaves) != len(header.leaves):
        raise WireError(
            f"group {group_index}: a header of {len(header.leaves)} leaves, a body of {len(leaves)}"
        )
    for sample, leaf in zip(leaves, header.leaves, strict=True):
        sample.reward = leaf.reward
