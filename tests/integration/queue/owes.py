"""What single scripts owe beside their answer: where exactly they put what they were given.

Owns one function a script, over the look before a call and the look after it. Never talks to a
server. Invariant: what no answer says and the frame (`effects`) leaves open stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.integration.queue.oracle import Scene, begins_anew, is_stale, kept_labels, take
from tests.integration.queue.sight import Sight

VANISHED = ("its record vanished", "its results vanished")


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
    if answer in ("again", "back") and len(args) > 7:
        group = after.groups[args[0]]
        assert group.members[int(args[1])].parked is None, "what was to be forgotten is there"
        assert f"p{args[1]}" not in group.bodies


def _after_park(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    if answer == "parked":
        group = after.groups[args[0]]
        assert group.bodies[f"p{args[1]}"] == args[3].encode("latin-1")
        assert group.members[int(args[1])].parked == len(args[3])
        if int(args[4]) > 0:
            due = scene.before.clock(scene.now_ms)[0] + int(args[4])
            assert after.z["d"][f"{args[0]}:{args[1]}"] == due
        else:
            _is_waiting(args[0], args[1], after)


def _after_confirm(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    assert after.wc == scene.before.wc | {args[0]: " ".join(args[1:])}, "what a worker confirmed"
    assert after.z["w"].get(args[0]) == scene.before.clock(scene.now_ms)[0]


def _after_present(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    gone = {args[1]} if args[0] == "worker" and args[2] == "leaving" else set()
    assert set(after.wc) == set(scene.before.wc) - gone, "a worker left with what it confirmed"


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
            forgotten = not gid.isdecimal() and before.z["dl"].get(gid, run_clock + 1) <= run_clock
            assert (
                (why == b"stale" and stale)
                or (why == b"run_aborted" and aborting)
                or (why == b"deadline" and forgotten and before.groups[gid].state != "open")
            ), (gid, why)
    resumed = before.m["state"] == "paused" and after.m["state"] == "running"
    assert resumed == before.overdue(clock), "a pause and its deadline"
    _check_swept_groups(answer, before, after, clock, run_clock)
    for name in ("w", "wp", "wa"):
        gone = set(before.z[name]) - set(after.z[name])
        limit = clock - 4 * before.budget("lease_ms")
        assert all(before.z[name][who] <= limit for who in gone), f"forgot one of {name} too early"
        if not answer.more:
            records = set(after.wl) | set(after.ws) | set(after.wc)
            assert not gone & records, "a record of an absent worker"
    if not answer.more:
        _nothing_due(answer, before, after, clock, run_clock)


def _check_swept_groups(
    answer: Any, before: Sight, after: Sight, clock: int, run_clock: int
) -> None:
    for gid in set(before.groups) & set(after.groups):
        if before.groups[gid].life != after.groups[gid].life:
            assert is_stale(before.groups[gid], before), f"{gid} begins anew"
            assert begins_anew(before.groups[gid], before), f"{gid} begins anew"
            continue
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


def _nothing_due(answer: Any, before: Sight, after: Sight, clock: int, run_clock: int) -> None:
    assert answer.grace or all(score > clock for score in after.z["l"].values()), "left expired"
    assert all(score > clock for score in after.z["d"].values()), "left a delayed member"
    assert all(score > run_clock for score in after.z["dl"].values()), "left a deadline"
    bound, version = before.budget("max_stale"), int(before.m["version"])
    goes_on = after.m["state"] in ("running", "paused")
    assert (
        bound < 0
        or not goes_on
        or before.m.get("on_stale") == "deliver"
        or all(version - x <= bound for gid, x in after.z["age"].items() if gid in after.groups)
    ), "left a stale"
    assert after.m["state"] != "aborting" or not after.live, "left a group of an aborted run"


def _after_verdict(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    assert args[1] not in after.entries["full"], "a judged entry is left"
    before, row = scene.before, _streak(scene.before)
    row = {"dropped": [*row, args[3]], "ready": []}.get(answer, row)
    assert sorted(_streak(after)) == sorted(row), "drops in a row"
    is_stop = answer == "dropped" and 0 < int(before.m.get("max_drops", 0)) <= len(row)
    if is_stop and before.m["state"] in ("running", "paused"):
        assert after.m["state"] == "failed", "as many drops in a row as may be"
        assert f"{len(row)} groups in a row were dropped" in after.m["error"]
    else:
        assert after.m["state"] == before.m["state"], "a verdict ended the run"
    if answer == "ready":
        group = after.groups[args[0]]
        for member, header in zip(args[5::2], args[6::2], strict=True):
            assert group.members[int(member)].header == header.encode("latin-1")


def _streak(sight: Sight) -> list[str]:
    """Return the reason of every drop in a row."""
    counted = (part.split("=") for part in sight.m.get("streak", "").split())
    return [reason for reason, count in counted for _ in range(int(count))]


def _after_control(args: list[str], answer: Any, scene: Scene, after: Sight) -> None:
    before, op = scene.before, args[0]
    if op == "by":
        if args[1] != before.m["consumer"]:
            assert after.m == before.m, "changed in the name of another"
            return
        args, op = args[2:], args[2]
    run_clock = before.clock(scene.now_ms)[1]
    if op in ("pause", "resume"):
        assert after.clock(scene.now_ms)[1] == run_clock, f"{op} moved the run clock"
    if op == "pause" and answer.state == "paused":
        pause_until = before.clock(scene.now_ms)[0] + int(args[2]) if int(args[2]) else 0
        assert (after.m["pause_mode"], int(after.m["pause_until"])) == (args[1], pause_until)
        assert [after.m["pause_by"]] == (args[3:] or [""])
    if op == "label":
        _check_labels(int(args[1]), args[2], before, after)
    if op == "engines":
        assert after.m.get("engines", "") == args[1]
    if op == "set" and answer.state != "unknown":
        assert after.m[args[1]] == args[2]
    if op == "version":
        assert int(after.m["version"]) >= int(before.m["version"])


def _check_labels(version: int, label: str, before: Sight, after: Sight) -> None:
    assert after.lb == kept_labels(before, version, label), "labels"


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


OWED: dict[str, Callable[[list[str], Any, Scene, Sight], None]] = {
    "enqueue": _after_enqueue, "lease": _after_lease, "beat": _after_beat,
    "complete": _after_complete, "fail": _after_fail, "confirm": _after_confirm,
    "present": _after_present,
    "park": _after_park, "sweep": _after_sweep, "verdict": _after_verdict,
    "control": _after_control, "end": _after_end, "rewind": _after_rewind,
}  # fmt: skip
