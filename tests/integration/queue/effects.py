"""What one call may have changed, told from a look before it and a look after it.

Owns the frame of every script (only the groups it was asked about, only its own fields, only moves
that its header names and the table of states has), and the conservation of counters. Never talks
to a server. Invariant: whatever a script did is explained by its answer, or it is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollstream.queue.calls import ScriptCall
from rollstream.queue.scripts import load_scripts
from rollstream.states import GROUP_TRANSITIONS, MEMBER_TRANSITIONS, GroupState, MemberState
from tests.integration.queue.oracle import Scene, args_of, rewound_to
from tests.integration.queue.owes import OWED, VANISHED
from tests.integration.queue.sight import Group, Sight

NOT_TERMINAL = {"run_aborted": "", "withdrawn": "beyond the window after a rewind"}
"""Drops (reason, detail) that leave the id free to come again."""
_ALWAYS = frozenset({"delivered", "frontier", "base"})
_M_FIELDS: dict[str, frozenset[str]] = {
    "enqueue": frozenset({"seq"}),
    "deliver": _ALWAYS, "ack": _ALWAYS, "retire": _ALWAYS, "withdraw": _ALWAYS,
    "verdict": _ALWAYS | {"streak", "state", "error", "control_seq"},
    "requeue": frozenset({"delivered"}),
    "sweep": _ALWAYS | {"clock", "clock_tick", "grace_until", "state", "control_seq",
                        "paused_total", "pause_until"},
    "rewind": _ALWAYS | {"rewind_id", "epoch", "done", "control_seq"},
    "control": frozenset({"state", "version", "label", "consumer", "connects", "paused_at",
                          "pause_by", "paused_total", "pause_mode", "pause_until", "engines",
                          "control_seq"}),
    "end": frozenset({"state", "done", "error", "control_seq"}),
    "attend": frozenset({"trainer"}),
}  # fmt: skip
"""Fields of `m` that a script may change."""
_SET_ONCE = ("version", "deadline", "full_id", "ready_id", "why")
_FIXED = ("n", "score", "timeout_ms", "prompt", "life", "since", "env")


def check_effects(call: ScriptCall[Any], answer: Any, scene: Scene, after: Sight) -> None:
    """Explain every change between the two looks.

    Raises:
        AssertionError: there is one that the call does not explain.
    """
    before = scene.before
    if not before.exists or not after.exists:
        return
    args = args_of(call)
    named = _NAMED[call.script](args) if call.script in _NAMED else frozenset()
    if after is not before:
        _check_groups(call.script, args, named, before, after)
    _check_ends(call, answer, before, after)
    _check_counters(call.script, args, answer, before, after)
    _check_fields(call.script, args, before, after)
    _check_records(call.script, before, after)
    _check_bells(call, before, after)
    special = OWED.get(call.script)
    if special:
        special(args, answer, scene, after)


# --- which groups, by which moves ----------------------------------------------------------------
_NAMED: dict[str, Callable[[list[str]], frozenset[str] | None]] = {
    "enqueue": lambda a: frozenset(a[:1]), "complete": lambda a: frozenset(a[::6]),
    "fail": lambda a: frozenset(a[:1]), "park": lambda a: frozenset(a[:1]),
    "verdict": lambda a: frozenset(a[:1]), "deliver": lambda a: frozenset(a[1:]),
    "ack": lambda a: frozenset(a[1:]), "retire": lambda a: frozenset(a[1:2]),
    "withdraw": lambda a: frozenset(a[:1]), "requeue": lambda a: frozenset(a[:1]),
    "lease": lambda _: None, "sweep": lambda _: None, "rewind": lambda _: None,
}  # fmt: skip
"""Groups that a call may change; None is any."""


def _check_groups(
    script: str, args: list[str], named: frozenset[str] | None, before: Sight, after: Sight
) -> None:
    header = load_scripts()[script].header
    for gid in before.live | after.live:
        if gid in before.dangling | after.dangling:
            continue
        old, new = before.groups.get(gid), after.groups.get(gid)
        if old and new and old.fields == new.fields and old.bodies == new.bodies:
            moved = any(before.state_of(gid, i) is not after.state_of(gid, i) for i in range(old.n))
            if not moved:
                continue
        assert named is None or gid in named, f"{script} changed group {gid}: not its business"
        if old is None:
            assert new is not None
            assert header.creates[:1] == (new.state,), f"{script} made group {gid} {new.state}"
        elif new is None:
            assert _reaches(old.state, {"acked", "dropped"}, header.group_events), (
                f"{script} ended group {gid}, which its header does not say"
            )
        elif old.life != new.life:
            assert "requeued" in header.group_events, f"{script} gave group {gid} a new life"
            _check_new_life(old, new, before, after)
        else:
            events = _without_kept(header.group_events, script, gid)
            assert _reaches(old.state, {new.state}, events), (
                f"{script} took group {gid} from {old.state} to {new.state}"
            )
            _check_group(script, args, old, new, before, after)


def _without_kept(events: tuple[str, ...], script: str, gid: str) -> tuple[str, ...]:
    """Only an evaluation is kept without a verdict."""
    is_judged = gid.isdecimal() and script != "verdict"
    return tuple(event for event in events if event != "kept" or not is_judged)


def _reaches(state: str, wanted: set[str], events: tuple[str, ...]) -> bool:
    """Return whether moves by some of `events` lead from `state` to one of `wanted`."""
    found, more = {GroupState(state)}, True
    while more:
        new = {end for (begin, event), end in GROUP_TRANSITIONS.items()
               if begin in found and event in events} - found  # fmt: skip
        found |= new
        more = bool(new)
    return bool(found & {GroupState(name) for name in wanted})


def _reaches_member(
    state: MemberState, wanted: MemberState, events: tuple[str, ...], *, parked: bool
) -> bool:
    found, more = {state}, True
    while more:
        new = {end for (begin, event), end in MEMBER_TRANSITIONS.items()
               if begin in found and event in events} - found  # fmt: skip
        # What was parked before waits as parked again, whatever sent it back.
        if parked and MemberState.QUEUED in new:
            new |= {MemberState.PARKED} - found
        found |= new
        more = bool(new)
    return wanted in found


def _check_new_life(old: Group, new: Group, before: Sight, after: Sight) -> None:
    assert int(new.life) == int(old.life) + 1, f"life of {new.gid}: {old.life} to {new.life}"
    for name in ("n", "score", "timeout_ms", "prompt", "env"):
        assert new.fields[name] == old.fields[name], f"requeue changed {name} of {new.gid}"
    assert (new.state, new.number("left")) == ("open", new.n)
    assert not new.bodies, f"bodies of an earlier life of {new.gid}"
    for name in ("deadline", "version", "full_id", "ready_id", "why", "failed"):
        assert name not in new.fields, f"{name} of an earlier life of {new.gid}"
    for i, member in enumerate(new.members):
        assert (member.attempts, member.crashes, member.final, member.token) == (0, 0, None, None)
        assert after.z["q"].get(f"{new.gid}:{i}") == new.number("score"), "requeued, not queued"


def _check_group(
    script: str, args: list[str], old: Group, new: Group, before: Sight, after: Sight
) -> None:
    gid = old.gid
    for name in _FIXED:
        assert new.fields.get(name) == old.fields.get(name), f"{script} changed {name} of {gid}"
    for name in _SET_ONCE:
        if name in old.fields:
            assert new.fields.get(name) == old.fields[name], f"{script} changed {name} of {gid}"
    for name in ("version", "deadline"):
        fresh = name in new.fields and name not in old.fields
        assert not fresh or script == "lease", f"{script} set {name} of {gid}"
    for i in range(old.n):
        _check_member(script, args, old, new, i, before, after)
    for name, body in old.bodies.items():
        if not name.startswith("p"):
            assert new.bodies.get(name) == body, f"{script} changed body {name} of {gid}"


def _check_member(
    script: str, args: list[str], old: Group, new: Group, i: int, before: Sight, after: Sight
) -> None:
    gid, a, b = old.gid, old.members[i], new.members[i]
    was, now = before.state_of(gid, i), after.state_of(gid, i)
    where = f"{script}: member {gid}:{i}"
    assert was is not None, f"{where} was nowhere"
    assert now is not None, f"invariant 2: {where} is nowhere"
    events = load_scripts()[script].header.member_events
    assert _reaches_member(was, now, events, parked=a.parked is not None), (
        f"{where} went from {was} to {now}"
    )
    assert a.final is None or a.final == b.final, f"{where} ended twice: {a.final}, {b.final}"
    mine = script in ("fail", "park") and args[:2] == [gid, str(i)]
    charged = mine and script == "fail" and args[3] != "back" and was is MemberState.LEASED
    assert b.attempts - a.attempts == int(charged), f"invariant 11: {where} attempts {b.attempts}"
    if b.crashes != a.crashes:
        assert (script, was, b.crashes) == ("sweep", MemberState.LEASED, a.crashes + 1), (
            f"invariant 11: {where} crashes {a.crashes} to {b.crashes}"
        )
    left_by_expiry = (
        script == "sweep" and was is MemberState.LEASED and now is not MemberState.LEASED
    )
    by_deadline = b.failed and b.final == "x:deadline"
    assert not left_by_expiry or by_deadline or b.crashes == a.crashes + 1, (
        f"{where} lost its lease without a charge"
    )
    forgotten = mine and script == "fail" and len(args) > 7
    if b.final is None and not (mine and script == "park") and not forgotten:
        assert a.parked == b.parked, f"{where} had {a.parked} parked, now {b.parked}"
    assert a.token == b.token or script == "lease", f"{where} got another token"
    if a.header != b.header:
        landed = b.done and not a.done
        assert landed or script == "verdict", f"{where} got another header"
    assert (a.error is None) == (b.error is None) or (b.failed and not a.failed), where


# --- ends, ids, records --------------------------------------------------------------------------
def _check_ends(call: ScriptCall[Any], answer: Any, before: Sight, after: Sight) -> None:
    """Every group that is gone was acked, or has a record; its id is terminal but where not."""
    ended = before.live - after.live
    drops = {row["g"].decode(): row for _, row in after.drops}
    assert len(drops) == len(after.drops), "a group has two records of one call"
    assert set(drops) <= ended, f"records of groups that did not end: {set(drops) - ended}"
    terminal = {i for i in before.terminal if call.script != "rewind" or answer.taken}
    if call.script == "rewind" and not answer.taken:
        repeated = before.m["rewind_id"] == call.args[1]
        terminal = before.terminal if repeated else rewound_to(call)
    for gid in ended:
        row = drops.get(gid)
        if row is None:
            assert call.script == "ack", f"{call.script} ended {gid} without a record"
            terminal |= {int(gid)} if gid.isdecimal() else set()
            continue
        _check_record(gid, row, before)
        reason, detail = row["reason"].decode(), row["detail"].decode()
        comes_again = reason in NOT_TERMINAL and detail in (NOT_TERMINAL[reason], *VANISHED)
        if gid.isdecimal() and not comes_again:
            terminal.add(int(gid))
    if call.script == "ack" and answer != ["taken"]:
        terminal |= {
            int(gid) for gid, what in zip(map(str, call.args[1:]), answer, strict=True)
            if what == "lost"
        }  # fmt: skip
    if answer == "skipped":
        terminal.add(int(call.args[0]))
    assert after.terminal == terminal, (
        f"invariant 6: {call.script} left {sorted(after.terminal)} terminal, "
        f"the model says {sorted(terminal)}"
    )


def _check_record(gid: str, row: dict[str, bytes], before: Sight) -> None:
    old = before.groups.get(gid)
    if old is None:
        reasons = (b"seen", b"run_aborted", b"withdrawn")
        assert row["reason"] in reasons, f"the record of the vanished {gid}: {row}"
        return
    assert int(row["n"]) == old.n, f"the record of {gid}"
    for i, member in enumerate(old.members[:8]):
        if member.error is not None:
            assert row.get(f"e{i}") == member.error, f"the record of {gid} lost error {i}"
        if member.header is not None:
            assert f"h{i}" in row, f"the record of {gid} lost header {i}"


# --- counters ------------------------------------------------------------------------------------
def _check_counters(script: str, args: list[str], answer: Any, before: Sight, after: Sight) -> None:
    delta = Counter({name: after.c[name] - before.c.get(name, 0) for name in after.c})
    assert set(before.c) <= set(after.c), "a counter vanished"
    wanted = _ends_counted(before, after) + _members_counted(script, answer, before, after)
    texts = [answer] if isinstance(answer, str) else answer if isinstance(answer, list) else []
    outcomes = Counter(str(getattr(text, "outcome", text)) for text in texts)
    if script == "fail":
        wanted["given_back"] = outcomes["back"]
        wanted["attempts"] = outcomes["again"] + outcomes["failed"]
    if script == "complete":
        wanted["completed"], wanted["fenced"] = outcomes["ok"], outcomes["fenced"]
    wanted["parked"] = outcomes["parked"]
    if after.m["state"] != before.m["state"] and script in ("control", "sweep"):
        wanted["pauses"] = int(after.m["state"] == "paused")
        by_sweep = script == "sweep" and before.m["state"] == "paused"
        wanted["pauses_expired"] = int(by_sweep and after.m["state"] == "running")
    hidden = 0
    if script in ("sweep", "deliver", "retire"):
        hidden = _stale_counted(script, delta, wanted, before, after)
    wanted["skipped"], wanted["reacked"] = outcomes["skipped"], outcomes["lost"]
    if script == "sweep":
        wanted["crashes"] = answer.expired
    if script == "present" and args[2] == "here" and len(args) > 4:
        wanted["blocked_ms"] = _newly_blocked(before, *args[1:2], *args[4:])
    for name in {*delta, *wanted}:
        slack = hidden if name.startswith("member_failed:") else 0
        assert wanted[name] <= delta[name] <= wanted[name] + slack, (
            f"invariant 1: {script} counted {name} +{delta[name]}, the model +{wanted[name]}"
        )


def _newly_blocked(before: Sight, name: str, process: str, from_ms: str, to_ms: str) -> int:
    """Return the milliseconds of a report that no report before had."""
    known = before.wb.get(name, "").split()
    counted = int(known[1]) if known[:1] == [process] else int(from_ms)
    return max(0, int(to_ms) - counted)


_FOUND = {"open": "running", "full": "ready", "ready": "ready", "delivered": "hand_out"}


def _stale_counted(
    script: str, delta: Counter[str], wanted: Counter[str], before: Sight, after: Sight
) -> int:
    """Add what was too old: where it was found, and by how many versions.

    Returns how many members may have failed unseen: a sweep may end members of a group that it
    lets begin anew behind that, and may find it full by then.
    """
    renewed = {gid for gid in set(before.groups) & set(after.groups)
               if before.groups[gid].life != after.groups[gid].life}  # fmt: skip
    found = {gid: before.groups[gid].state for gid in renewed}
    for row in (row for _, row in after.drops if row["reason"] == b"stale"):
        if row["g"].isdigit():  # an evaluation is never too old, whatever a trainer says of it
            found[row["g"].decode()] = row["state"].decode()
    for gid, state in found.items():
        place, version = _FOUND[state], before.groups[gid].number("version")
        if gid in renewed and script == "sweep" and not delta[f"stale:{place}"]:
            place = "ready"
        wanted[f"stale:{place}"] += 1
        wanted[f"stale_age:{place}"] += int(before.m["version"]) - (version or 0)
    wanted["requeued:stale"] = len(renewed)
    if script != "sweep":
        return 0
    for kind in ("stale", "stale_age"):  # which of both is told apart only where a group was alone
        total = sum(delta[f"{kind}:{place}"] for place in ("running", "ready"))
        assert total == sum(wanted[f"{kind}:{place}"] for place in ("running", "ready")), kind
        if renewed:
            for place in ("running", "ready"):
                wanted[f"{kind}:{place}"] = delta[f"{kind}:{place}"]
    return sum(before.groups[gid].n for gid in renewed)


def _ends_counted(before: Sight, after: Sight) -> Counter[str]:
    wanted: Counter[str] = Counter()
    for gid in after.live - before.live:
        wanted["enqueued" if gid.isdecimal() else "e.enqueued"] += 1
    drops = {row["g"].decode(): row["reason"].decode() for _, row in after.drops}
    for gid in before.live - after.live:
        name = f"dropped:{drops[gid]}" if gid in drops else "acked"
        wanted[name if gid.isdecimal() else f"e.{name}"] += 1
        env = before.groups[gid].text("env") if gid in before.groups else ""
        if gid.isdecimal() and env:
            wanted[f"env:{name}:{env}"] += 1
    for gid in (row["g"].decode() for _, row in after.drops if row["detail"].decode() in VANISHED):
        wanted["vanished" if gid.isdecimal() else "e.vanished"] += 1
    for gid in set(before.groups) & set(after.groups):
        if before.groups[gid].life != after.groups[gid].life:
            wanted["requeued" if gid.isdecimal() else "e.requeued"] += 1
    return wanted


def _members_counted(script: str, answer: Any, before: Sight, after: Sight) -> Counter[str]:
    wanted: Counter[str] = Counter()
    for gid in set(before.groups) & set(after.groups):
        old, new = before.groups[gid], after.groups[gid]
        if old.life == new.life:
            for a, b in zip(old.members, new.members, strict=True):
                if b.failed and not a.failed:
                    assert b.final is not None
                    wanted[f"member_failed:{b.final[2:]}"] += 1
    # A page of sweep may end members and then their group: those are seen in its record only.
    for _, row in after.drops:
        old_group = before.groups.get(row["g"].decode())
        for i in range(min(8, old_group.n) if script == "sweep" and old_group else 0):
            error = row.get(f"e{i}")
            if error and old_group and old_group.members[i].error is None:
                wanted[f"member_failed:{error.split()[0].decode()}"] += 1
    return wanted


# --- fields of the run, sets, bells --------------------------------------------------------------
def _check_fields(script: str, args: list[str], before: Sight, after: Sight) -> None:
    allowed = set(_M_FIELDS.get(script, ()))
    if script == "control" and args[0] == "set":
        allowed.add(args[1])
    if script == "open":
        allowed.update(("control_seq", *args[2::2]))
    if before.dangling:  # its id comes again: the producer is told to scan once more
        allowed |= {"epoch", "done", "control_seq", "delivered", "frontier", "base"}
    for name in {*before.m, *after.m}:
        if before.m.get(name) != after.m.get(name):
            # Where a search over pages goes on is nobody's business.
            assert name in allowed or "cursor" in name, f"{script} changed {name} of the run"
    if script == "enqueue":
        new = set(after.groups) - set(before.groups)
        assert int(after.m["seq"]) - int(before.m["seq"]) == len(new), "a place without a group"
    heard = {"state", "version", "epoch", "done", "consumer", "engines"}
    told = any(before.m.get(name) != after.m.get(name) for name in heard)
    seq = int(after.m["control_seq"]) - int(before.m["control_seq"])
    assert seq >= int(told), f"{script} changed the run and told nobody"
    assert (before.last_control == after.last_control) == (seq == 0), "ctl and control_seq differ"
    for name in ("age", "dl"):
        for gid in set(before.z[name]) & set(after.z[name]):
            same_life = gid in before.groups and gid in after.groups and (
                before.groups[gid].life == after.groups[gid].life
                and (gid.isdecimal() or before.groups[gid].state == after.groups[gid].state)
            )  # fmt: skip
            assert not same_life or before.z[name][gid] == after.z[name][gid], (
                f"{script} moved {gid} in {name}"
            )


def _check_records(script: str, before: Sight, after: Sight) -> None:
    """Who may write what workers confirmed, producers reported, and versions are called."""
    may = {"confirm": "wc", "sweep": "wc wb", "present": "wc wb", "control": "lb"}.get(script, "")
    for name in ("wc", "wb", "lb"):
        same = getattr(before, name) == getattr(after, name)
        assert same or name in may.split(), f"{script} changed {name}"


def _check_bells(call: ScriptCall[Any], before: Sight, after: Sight) -> None:
    """Whoever brings work or room rings; nothing depends on it but how soon it is noticed."""
    arrived = any(set(after.z[name]) - set(before.z[name]) for name in "qs")
    if call.script not in ("lease", "rewind") and arrived:
        assert after.bell == 1, f"{call.script} brought work and did not ring"
    if before.live - after.live:
        assert after.room == 1, f"{call.script} freed capacity and did not ring"
    if before.m["state"] == "paused" and after.m["state"] == "running":
        assert after.bell == 1, f"{call.script} resumed and did not ring"
