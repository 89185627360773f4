"""Everything that is known of one group, from a run or from a dump, for whoever shows it.

Owns the records `GroupFacts` and `MemberFacts` and how they are filled. Never writes to a run,
never prints. Invariant: what cannot be read of one member is said of that member; the others are
shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollstream.errors import WireError
from rollstream.group import FinishedGroup, MemberHeader, PromptGroup, Trajectory
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.look import GroupLook, MemberLook
from rollstream.queue.reads import RunInfo, StoredGroup
from rollstream.sample import Sample, Span
from rollstream.wire import decode_body, decode_header, decode_prompt


@dataclass(slots=True)
class MemberFacts:
    """One member."""

    member: int
    where: str
    """`done`, `failed`, `missing` (not delivered), or where it waits."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Facts for people, in order."""
    status: str = ""
    reward: Any = None
    error: str = ""
    leaves: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class GroupFacts:
    """One group."""

    group_index: str
    source: str
    """Where it was read."""
    state: str
    rows: dict[str, Any] = field(default_factory=dict)
    members: list[MemberFacts] = field(default_factory=list)
    drops: list[Mapping[str, Any]] = field(default_factory=list)
    """What `show` says of drops of this id."""


# --- a run ---------------------------------------------------------------------------------------
def of_run(queue: BlockingQueue, info: RunInfo, found: GroupLook, shown: list[Any]) -> GroupFacts:
    """Return a live group with the bodies that it has.

    Args:
        queue: of the run.
        info: what the run is.
        found: the group as it stands.
        shown: a dictionary per member of `found`, as `show --json` has it.
    """
    (stored,) = queue.groups([(found.group_index, found.n)], text=True)
    prompt, problem = _prompt(stored)
    version = "not leased yet" if found.version is None else found.version
    rows: dict[str, Any] = {
        "run": queue.run,
        "state": found.state,
        "members": f"{found.n}, {found.left} unfinished, {found.failed} failed",
        "first failure": found.why,
        "life": f"{found.life} (requeued so often)" if found.life else "",
        "version at first lease": version,
        "current version": info.version,
    }
    for name, unix_s in (("full at", stored.full_unix_s), ("ready at", stored.ready_unix_s)):
        if unix_s:
            at = datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None)
            rows[f"{name} (UTC)"] = at.isoformat(" ", "milliseconds")
    if prompt is not None:
        rows |= _of_prompt(prompt)
    members = []
    for look, plain in zip(found.members, shown, strict=True):
        member = _member(look, plain)
        if prompt is None:
            member.error = member.error or problem
        elif look.where == "done":
            _add_body(member, stored, look.member, prompt)
        members.append(member)
    facts = GroupFacts(found.group_index, f"run {queue.run}", found.state, rows, members)
    facts.rows |= _of_samples(members, info.version)
    return facts


def _prompt(stored: StoredGroup) -> tuple[PromptGroup | None, str]:
    if stored.prompt is None:
        return None, "the group ended while it was read: look again"
    name = stored.group_index
    try:
        return decode_prompt(stored.prompt, int(name) if name.isdecimal() else -1, stored.n), ""
    except WireError as error:
        return None, f"its prompt cannot be read: {error}"


def _member(look: MemberLook, plain: Mapping[str, Any]) -> MemberFacts:
    result = plain.get("result") or {}
    rows: dict[str, Any] = {
        "where": look.where,
        "reason": look.reason,
        "stop reason": result.get("stop_reason"),
        "attempts charged": look.attempts or "",
        "crashes": look.crashes or "",
        "worker": f"{look.worker} ({look.host})" if look.host else look.worker,
        "parked bytes": look.parked_bytes or "",
        "result": result.get("unreadable", ""),
    }
    status = result.get("status") or look.where
    return MemberFacts(look.member, look.where, rows, status, result.get("reward"), look.error)


def _add_body(member: MemberFacts, stored: StoredGroup, place: int, prompt: PromptGroup) -> None:
    body, raw = stored.bodies[place], stored.headers[place]
    if body is None or raw is None:
        member.error = member.error or "its result is gone: the group moved on while it was read"
        return
    try:
        header = decode_header(raw)
        text = stored.texts[place] if stored.texts else None
        trajectory = decode_body(body, prompt, text)
    except WireError as error:
        member.error = f"its result cannot be read: {error}"
        return
    member.leaves = _leaves(trajectory)
    for sample, leaf in zip(member.leaves, header.leaves, strict=False):
        sample.reward = leaf.reward
    _add_waits(member, stored, header)
    if header.reward_error:
        member.error = header.reward_error
    _add_result(member)


def _add_waits(member: MemberFacts, stored: StoredGroup, header: MemberHeader) -> None:
    done, full, ready = header.done_unix_s, stored.full_unix_s, stored.ready_unix_s
    first = member.leaves[0]
    spans = list(first.spans)
    if done and full:
        spans.append(Span("group_wait", -1, done, max(0.0, full - done)))
    if full and ready:
        spans.append(Span("judge_wait", -1, full, max(0.0, ready - full)))
    first.spans = spans


def _leaves(trajectory: Trajectory) -> list[Sample]:
    return trajectory if isinstance(trajectory, list) else [trajectory]


def _add_result(member: MemberFacts) -> None:
    """Say of a member what its leaves say."""
    first = member.leaves[0]
    metadata = first.metadata
    member.status = str(first.status)
    member.reward = first.reward
    error = metadata.get("error")
    member.error = member.error or (str(error) if error else "")
    member.rows |= {
        "stop reason": None if first.stop_reason is None else str(first.stop_reason),
        "error detail": metadata.get("error_detail"),
        "generate function": first.generate_function_path,
        "attempts charged": first.attempts or member.rows.get("attempts charged", ""),
        "removed from training": "yes" if any(s.remove_sample for s in member.leaves) else "",
        "tools, rewards, environments": f"{first.non_generation_time:.3g} s"
        if first.non_generation_time
        else "",
        "label": first.label,
    }


def _of_prompt(prompt: PromptGroup) -> dict[str, Any]:
    return {"environment": prompt.env, "label": prompt.label, "sampling": prompt.sampling,
            "row's metadata": prompt.metadata, "timeout": prompt.timeout_s or ""}  # fmt: skip


def _of_samples(members: list[MemberFacts], version: int | None) -> dict[str, Any]:
    ranges = [known for m in members for s in m.leaves if (known := s.version_range())]
    if not ranges:
        return {}
    oldest, newest = min(low for low, _ in ranges), max(high for _, high in ranges)
    rows: dict[str, Any] = {"versions of tokens": f"{oldest}" if oldest == newest
                            else f"{oldest} to {newest}"}  # fmt: skip
    if version is not None:
        rows["staleness"] = f"{max(0, version - oldest)} versions behind"
    return rows


# --- a dump --------------------------------------------------------------------------------------
def of_finished(group: FinishedGroup, source: str) -> GroupFacts:
    """Return a group as a trainer got it."""
    rows: dict[str, Any] = {
        "source": source,
        "environment": group.env,
        "staleness": f"{group.staleness} when it was handed out",
        "members": f"{len(group.samples)} delivered, {len(group.missing)} missing",
    }
    rows |= {name: ", ".join(f"{s:.2f} s" for s in secs) for name, secs in group.spans.items()}
    members = []
    for trajectory in group.samples:
        leaves = _leaves(trajectory)
        member = MemberFacts(leaves[0].member, "done", leaves=leaves)
        _add_result(member)
        members.append(member)
    for one in group.missing:
        known = {"where": "missing", "reason": one.reason}
        members.append(MemberFacts(one.member, "missing", known, str(one.status), error=one.error))
    members.sort(key=lambda member: member.member)
    facts = GroupFacts(str(group.group_index), source, "delivered", rows, members)
    facts.rows |= _of_samples(members, None)
    return facts


# --- a drop --------------------------------------------------------------------------------------
def of_drops(run: str, name: str, drops: list[dict[str, Any]]) -> GroupFacts:
    """Return a group of which only the record of its drop is left."""
    newest = drops[0]
    rows = {"run": run, "dropped": newest["at"], "reason": newest["reason"],
            "detail": newest["detail"], "means": newest.get("means", ""),
            "was": newest["state"], "members": newest["n"]}  # fmt: skip
    members = []
    for one in newest["members"]:
        result = one.get("result") or {}
        known = {"where": one["where"], "reason": one.get("reason", ""),
                 "stop reason": result.get("stop_reason"),
                 "sampled tokens": result.get("sampled_tokens"),
                 "turns": result.get("turns")}  # fmt: skip
        status = result.get("status") or one["where"]
        error = one.get("error", "") or result.get("reward_error", "")
        reward = result.get("reward")
        members.append(MemberFacts(one["member"], one["where"], known, status, reward, error))
    return GroupFacts(name, f"run {run}", "dropped", rows, members, list(drops))
