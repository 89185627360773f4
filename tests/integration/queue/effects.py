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
from tests.integration.queue.oracle import Scene, args_of, is_stale, rewound_to, take
from tests.integration.queue.sight import Group, Sight

NOT_TERMINAL = {"run_aborted": "", "withdrawn": "beyond the window after a rewind"}
"""Drops (reason, detail) that leave the id free to come again."""
VANISHED = ("its record vanished", "its results vanished")
_ALWAYS = frozenset({"delivered", "frontier", "base"})
_M_FIELDS: dict[str, frozenset[str]] = {
    "enqueue": frozenset({"seq"}),
    "deliver": _ALWAYS, "ack": _ALWAYS, "retire": _ALWAYS, "withdraw": _ALWAYS,
    "verdict": _ALWAYS, "requeue": frozenset({"delivered"}),
    "sweep": _ALWAYS | {"clock", "clock_tick", "grace_until", "state", "control_seq"},
    "rewind": _ALWAYS | {"rewind_id", "epoch", "done", "control_seq"},
    "control": frozenset({"state", "version", "label", "consumer", "connects", "paused_at",
                          "paused_total", "pause_mode", "control_seq"}),
    "end": frozenset({"state", "done", "error", "control_seq"}),
}  # fmt: skip
"""Fields of `m` that a script may change."""
_SET_ONCE = ("version", "deadline", "full_id", "ready_id", "why")
_FIXED = ("n", "score", "timeout_ms", "prompt", "life")


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
    _check_counters(call.script, answer, before, after)
    _check_fields(call.script, args, before, after)
    _check_bells(call, before, after)
    special = _SPECIAL.get(call.script)
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
            assert _reaches(old.state, {new.state}, header.group_events), (
                f"{script} took group {gid} from {old.state} to {new.state}"
            )
            _check_group(script, args, old, new, before, after)


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
    for name in ("n", "score", "timeout_ms", "prompt"):
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
def _check_counters(script: str, answer: Any, before: Sight, after: Sight) -> None:
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
    wanted["skipped"], wanted["reacked"] = outcomes["skipped"], outcomes["lost"]
    if script == "sweep":
        wanted["crashes"] = answer.expired
    for name in {*delta, *wanted}:
        assert delta[name] == wanted[name], (
            f"invariant 1: {script} counted {name} +{delta[name]}, the model +{wanted[name]}"
        )


def _ends_counted(before: Sight, after: Sight) -> Counter[str]:
    wanted: Counter[str] = Counter()
    for gid in after.live - before.live:
        wanted["enqueued" if gid.isdecimal() else "e.enqueued"] += 1
    drops = {row["g"].decode(): row["reason"].decode() for _, row in after.drops}
    for gid in before.live - after.live:
        name = f"dropped:{drops[gid]}" if gid in drops else "acked"
        wanted[name if gid.isdecimal() else f"e.{name}"] += 1
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
    heard = {"state", "version", "epoch", "done", "consumer"}
    told = any(before.m.get(name) != after.m.get(name) for name in heard)
    seq = int(after.m["control_seq"]) - int(before.m["control_seq"])
    assert seq >= int(told), f"{script} changed the run and told nobody"
    assert (before.last_control == after.last_control) == (seq == 0), "ctl and control_seq differ"
    for name in ("age", "dl"):
        for gid in set(before.z[name]) & set(after.z[name]):
            same_life = gid in before.groups and gid in after.groups and (
                before.groups[gid].life == after.groups[gid].life
            )  # fmt: skip
            assert not same_life or before.z[name][gid] == after.z[name][gid], (
                f"{script} moved {gid} in {name}"
            )


def _check_bells(call: ScriptCall[Any], before: Sight, after: Sight) -> None:
    """Whoever brings work or room rings; nothing depends on it but how soon it is noticed."""
    arrived = any(set(after.z[name]) - set(before.z[name]) for name in "qs")
    if call.script not in ("lease", "rewind") and arrived:
        assert after.bell == 1, f"{call.script} brought work and did not ring"
    if before.live - after.live:
        assert after.room == 1, f"{call.script} freed capacity and did not ring"
    if call.script == "control" and call.args[0] == "resume" and before.m["state"] == "paused":
        assert after.bell == 1, "resume did not ring"


# --- what single scripts owe beside their answer -------------------------------------------------
def _after_enqueue(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    if answer != "new":
        return
    gid, n, priority, timeout = args[0], int(args[1]), int(args[2]), args[3]
    group = after.groups[gid]
    assert (group.n, group.text("timeout_ms")) == (n, timeout)
    score = group.number("score") or 0
    for i in range(n):
        assert after.z["q"][f"{gid}:{i}"] == score
    assert priority << 40 < score < (priority + 1) << 40, "another priority"
    for other in scene.before.groups.values():
        theirs = other.number("score") or 0
        assert theirs >> 40 != priority or theirs < score, "not behind those that came before"


def _after_lease(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    before, worker = scene.before, args[0]
    if answer.state in ("old", "lost"):
        return
    clock, run_clock, _ = before.clock(scene.now_ms)
    assert after.z["w"].get(worker) == clock, "a worker that leases is present"
    last = before.wl.get(worker, "0").split()[0]
    if last == args[1] or before.m["state"] != "running":
        return
    taken = take(before, worker, int(args[2]), clock)
    assert after.z["q"] == taken.left_in_q, "q after the lease"
    assert after.z["s"] == taken.left_in_s, "s after the lease"
    fresh = {m.lease.id for group in answer.groups for m in group.members}
    expires = clock + before.budget("lease_ms")
    assert after.z["l"] == before.z["l"] | dict.fromkeys(fresh, expires), "l after the lease"
    for group in answer.groups:
        new, old = after.groups[group.group_index], before.groups[group.group_index]
        if "version" not in old.fields:
            timeout = old.number("timeout_ms") or 0
            deadline = run_clock + timeout if timeout else 0
            assert (new.number("version"), new.number("deadline")) == (
                int(before.m["version"]), deadline,
            ), "version and deadline begin with the first lease"  # fmt: skip
    if taken.ids:
        assert after.wl[worker].split() == [args[1], *taken.ids]
        assert after.bell == 1 or not taken.left_in_q, "work is left and nobody was rung"
    else:
        assert after.wl == before.wl, "nothing was taken, nothing is to be recorded"


def _after_beat(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    before = scene.before
    clock = before.clock(scene.now_ms)[0]
    kept = [i for i in args[1:] if i in before.z["l"]]
    expires = clock + before.budget("lease_ms")
    assert after.z["l"] == before.z["l"] | dict.fromkeys(kept, expires), "l after a beat"
    assert after.z["w"].get(args[0]) == clock


def _after_complete(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    for j, landed in enumerate(answer):
        gid, i, _, header, body, text = args[6 * j : 6 * j + 6]
        if landed.outcome == "ok":
            group = after.groups[gid]
            stored = (group.members[int(i)].header, group.bodies[i], group.bodies.get(f"x{i}", b""))
            assert stored == tuple(x.encode("latin-1") for x in (header, body, text)), (
                f"the result of {gid}:{i} is stored as {stored}"
            )


def _after_fail(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    name, delay = f"{args[0]}:{args[1]}", int(args[6])
    if answer in ("again", "back") and delay > 0:
        assert after.z["d"][name] == scene.before.clock(scene.now_ms)[0] + delay
    elif answer in ("again", "back"):
        _is_waiting(args[0], args[1], after)


def _after_park(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    if answer == "parked":
        group = after.groups[args[0]]
        assert group.bodies[f"p{args[1]}"] == args[3].encode("latin-1")
        assert group.members[int(args[1])].parked == len(args[3])
        _is_waiting(args[0], args[1], after)


def _is_waiting(gid: str, i: str, after: Sight) -> None:
    place = "s" if after.crashes(gid, i) >= 2 else "q"
    score = after.groups[gid].number("score")
    assert after.z[place].get(f"{gid}:{i}") == score, f"{gid}:{i} waits elsewhere than in {place}"


def _after_sweep(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    before = scene.before
    clock, run_clock, jumped = before.clock(scene.now_ms)
    grace = clock + before.budget("lease_ms") if jumped else int(before.m["grace_until"])
    found = tuple(int(after.m[name]) for name in ("clock", "clock_tick", "grace_until"))
    assert found == (clock, scene.now_ms, grace), "invariant 12: the clock after a sweep"
    for row in (row for _, row in after.drops):
        gid = row["g"].decode()
        if row["detail"].decode() in VANISHED and gid.isdecimal():
            assert int(after.m["epoch"]) > int(before.m["epoch"]), f"{gid} vanished: no new scan"
            assert after.m["done"] == "0", f"{gid} vanished, and the producer stays done"
        if gid in before.groups:
            why, aborting = row["reason"], before.m["state"] == "aborting"
            stale = is_stale(before.groups[gid], before)
            assert (why == b"stale" and stale) or (why == b"run_aborted" and aborting), (gid, why)
    for gid in set(before.groups) & set(after.groups):
        for i, (a, b) in enumerate(
            zip(before.groups[gid].members, after.groups[gid].members, strict=True)
        ):
            if b.final == "x:deadline" and not a.failed:
                assert before.z["dl"][gid] <= run_clock, f"{gid} failed before its deadline"
            if b.final == "x:crashed" and not a.failed:
                assert b.crashes >= before.budget("max_crashes")
            if b.crashes > a.crashes:
                assert before.z["l"][f"{gid}:{i}:{a.token}"] <= clock, "expired too early"
                assert not answer.grace, "invariant 12: expired in the grace after an outage"
                failed = b.crashes >= before.budget("max_crashes")
                assert b.failed or not failed, f"{gid}:{i} crashed {b.crashes} times and lives"
    for name in ("w", "wp", "wa"):
        gone = set(before.z[name]) - set(after.z[name])
        limit = clock - 4 * before.budget("lease_ms")
        assert all(before.z[name][who] <= limit for who in gone), f"forgot one of {name} too early"
        if not answer.more:
            assert not gone & (set(after.wl) | set(after.ws)), "a record of an absent worker"
    if not answer.more:
        _nothing_due(answer, before, after, clock, run_clock)


def _nothing_due(answer: Any, before: Sight, after: Sight, clock: int, run_clock: int) -> None:
    assert answer.grace or all(score > clock for score in after.z["l"].values()), "left expired"
    assert all(score > clock for score in after.z["d"].values()), "left a delayed member"
    assert all(score > run_clock for score in after.z["dl"].values()), "left a deadline"
    bound, version = before.budget("max_stale"), int(before.m["version"])
    assert bound < 0 or all(
        version - x <= bound for gid, x in after.z["age"].items() if gid in after.groups
    ), "left a stale"
    assert after.m["state"] != "aborting" or not after.live, "left a group of an aborted run"


def _after_verdict(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    assert args[1] not in after.entries["full"], "a judged entry is left"
    if answer == "ready":
        group = after.groups[args[0]]
        for member, header in zip(args[5::2], args[6::2], strict=True):
            assert group.members[int(member)].header == header.encode("latin-1")


def _after_control(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    before, op = scene.before, args[0]
    run_clock = before.clock(scene.now_ms)[1]
    if op in ("pause", "resume"):
        assert after.clock(scene.now_ms)[1] == run_clock, f"{op} moved the run clock"
    if op == "set" and answer.state != "unknown":
        assert after.m[args[1]] == args[2]
    if op == "version":
        assert int(after.m["version"]) >= int(before.m["version"])


def _after_end(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    if args[0] == "done":
        wanted = "1" if answer != "epoch" else scene.before.m["done"]
        assert after.m["done"] == wanted, "done"
    elif scene.before.m["state"] != after.m["state"]:
        assert after.m["error"] == (args[1] or scene.before.m["error"])


def _after_rewind(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    if not answer.taken:
        assert after.m["rewind_id"] == args[1]
        assert scene.before.m["rewind_id"] == args[1] or after.m["done"] == "0"


_SPECIAL: dict[str, Callable[[list[str], Any, Scene, Sight], None]] = {
    "enqueue": _after_enqueue, "lease": _after_lease, "beat": _after_beat,
    "complete": _after_complete, "fail": _after_fail,
    "park": _after_park, "sweep": _after_sweep, "verdict": _after_verdict,
    "control": _after_control, "end": _after_end, "rewind": _after_rewind,
}  # fmt: skip
