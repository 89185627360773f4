"""One live group as a person wants to see it: where each member is, and what befell it.

Owns the records `GroupLook` and `MemberLook` and the plain commands that fill them, in three round
trips of their own. Never changes anything, never reads a body. Invariant: what is shown was true a
moment ago; the trips are not one atomic reading, and a group may move on between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import Command, Read
from rollstream.queue.streams import MAX_N_DIGITS

_GROUP_FIELDS = ("state", "n", "left", "failed", "life", "why", "version", "deadline", "score",
                 "full_id", "ready_id")  # fmt: skip
_CLOCK_FIELDS = ("clock", "paused_total", "paused_at", "state")
_MEMBER_FIELDS = "axtferkh"
_CHUNK = 128
WAITING = {"q": "queued", "d": "delayed", "s": "suspect"}
"""Sets of waiting members, and what a member in one is called."""
MOVING = "moving"
"""Found nowhere: it went from one place to another while we looked."""


@dataclass(slots=True)
class MemberLook:
    """One member."""

    member: int
    where: str
    """`queued`, `delayed`, `suspect` (two crashes or more), `leased`, `done`, `failed`; `moving`
    where it was found nowhere."""
    attempts: int
    """Failures that were charged."""
    crashes: int
    """How often its lease expired."""
    worker: str = ""
    """Incarnation of the worker that has it, or had it last."""
    host: str = ""
    """Where that worker runs; empty once nobody remembers."""
    due_in_s: float | None = None
    """Of a delayed member: until it is leased again; of a leased one: until the lease expires."""
    parked_bytes: int = 0
    reason: str = ""
    """Why it failed for good."""
    error: str = ""
    """The text of that, or what its last retry was for."""
    header: bytes | None = None
    """Of its result."""


@dataclass(slots=True)
class GroupLook:
    """One live group."""

    group_index: str
    state: str
    n: int
    left: int
    failed: int
    life: int
    """How often it was begun anew (`requeue`)."""
    why: str
    version: int | None
    """Weight version at its first lease; None before."""
    deadline_in_s: float | None
    """None: it has none, or its first lease is still to come."""
    full_id: str
    ready_id: str
    members: list[MemberLook] = field(default_factory=list)


def look(queue: BlockingQueue, group_index: str) -> GroupLook | None:
    """Return a group as it stands; None where no such group lives."""
    prefix = queue.prefix
    commands: tuple[Command, ...] = (
        ("HMGET", f"{prefix}g:{group_index}", *_GROUP_FIELDS),
        ("HMGET", f"{prefix}m", *_CLOCK_FIELDS),
    )
    row, clocks = queue._read(Read(commands, _texts))
    if not row[0]:
        return None
    clock, run_clock = _clocks(clocks)
    group = _group(group_index, row, run_clock)
    for first in range(0, group.n, _CHUNK):
        places = range(first, min(first + _CHUNK, group.n))
        group.members += _members(queue, group_index, places, clock)
    return group


def _clocks(row: Sequence[str]) -> tuple[float, float]:
    """Return the queue clock and the run clock in ms, as the latest sweep left them."""
    clock, paused_total, paused_at, state = row
    at = float(paused_at or 0) if state == "paused" else float(clock or 0)
    return float(clock or 0), at - float(paused_total or 0)


def _group(group_index: str, row: Sequence[str], run_clock: float) -> GroupLook:
    known = dict(zip(_GROUP_FIELDS, row, strict=True))
    if len(known["n"]) > MAX_N_DIGITS:
        raise ValueError(f"a group of {known['n'][:20]} members")  # and as many records of ours
    deadline = float(known["deadline"] or 0)
    return GroupLook(
        group_index=group_index,
        state=known["state"],
        n=int(known["n"] or 0),
        left=int(known["left"] or 0),
        failed=int(known["failed"] or 0),
        life=int(known["life"] or 0),
        why=known["why"],
        version=int(known["version"]) if known["version"] else None,
        deadline_in_s=(deadline - run_clock) / 1000
        if deadline and known["state"] == "open"
        else None,
        full_id=known["full_id"],
        ready_id=known["ready_id"],
    )


def _members(
    queue: BlockingQueue, group_index: str, places: range, clock: float
) -> list[MemberLook]:
    names = [f"{kind}{i}" for i in places for kind in _MEMBER_FIELDS]
    ids = [f"{group_index}:{i}" for i in places]
    commands: list[Command] = [("HMGET", f"{queue.prefix}g:{group_index}", *names)]
    commands += [("ZMSCORE", queue.prefix + key, *ids) for key in WAITING]
    fields, *waiting = queue._read(Read(tuple(commands), list))
    found = []
    step = len(_MEMBER_FIELDS)
    for j, i in enumerate(places):
        row = dict(zip(_MEMBER_FIELDS, fields[step * j : step * (j + 1)], strict=True))
        scores = {key: waiting[at][j] for at, key in enumerate(WAITING)}
        found.append(_member(i, row, scores, clock))
    _add_leases(queue, ids, [_text(fields[step * j + 2]) for j in range(len(ids))], found, clock)
    return found


def _member(i: int, row: Mapping[str, Any], scores: Mapping[str, Any], clock: float) -> MemberLook:
    final, token = _text(row["f"]), _text(row["t"])
    look = MemberLook(
        member=i,
        where=MOVING,
        attempts=int(row["a"] or 0),
        crashes=int(row["x"] or 0),
        worker=token.partition("-")[0],
        parked_bytes=int(row["k"] or 0),
        error=_text(row["r"]),
        header=row["h"],
    )
    if final:
        look.where = "failed" if row["e"] is not None else "done"
        look.reason, _, look.error = _text(row["e"]).partition(" ")
        return look
    for key, name in WAITING.items():
        if scores[key] is not None:
            look.where = name
    if look.where == "delayed":
        look.due_in_s = max(0.0, (float(scores["d"]) - clock) / 1000)
    return look


def _add_leases(
    queue: BlockingQueue,
    ids: Sequence[str],
    tokens: Sequence[str],
    members: Sequence[MemberLook],
    clock: float,
) -> None:
    """Say of each member that is leased until when, and of each worker where it runs."""
    leases = [f"{member}:{token or '-'}" for member, token in zip(ids, tokens, strict=True)]
    hosts_of = [look.worker or "-" for look in members]
    commands: tuple[Command, ...] = (
        ("ZMSCORE", f"{queue.prefix}l", *leases),
        ("HMGET", f"{queue.prefix}wh", *hosts_of),
    )
    expires, hosts = queue._read(Read(commands, list))
    for look, expiry, host in zip(members, expires, hosts, strict=True):
        look.host = _text(host)
        if expiry is not None and look.where == MOVING:
            look.where, look.due_in_s = "leased", max(0.0, (float(expiry) - clock) / 1000)


def _texts(replies: list[Any]) -> list[list[str]]:
    return [[_text(value) for value in reply] for reply in replies]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
