"""What every script must answer, said by the model from one look at the run before the call.

Owns one function a script: from the look, the arguments and the clock to the answer. Never talks
to a server, and knows nothing of Lua. Invariant: an answer that the documents leave no choice in
is compared whole; what they leave open (how much of a full page a sweep did) is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollstream.queue.answers import (
    BeatAnswer,
    CompleteAnswer,
    ControlAnswer,
    Lease,
    LeaseAnswer,
    LeasedGroup,
    LeasedMember,
    RewindAnswer,
    StateAnswer,
    SweepAnswer,
)
from rollstream.queue.calls import ScriptCall
from rollstream.states import GroupState
from tests.integration.queue.sight import Group, Sight
from tests.queue_bench import unpack_ids

MAX_LEASE, FAIR_SHARE, PROMOTE = 256, 8, 256
MAX_SUSPECTS, SUSPECT_CRASHES, ALONE_CRASHES = 8, 2, 3
BUDGETS = {"cap", "W", "lease_ms", "max_attempts", "max_crashes", "max_requeues", "max_stale",
           "max_body", "on_stale", "max_drops"}  # fmt: skip
MAX_LABELS = 64
ON_STALE = {"drop", "requeue", "deliver"}


@dataclass(frozen=True, slots=True)
class Scene:
    """What an answer may depend on beside the arguments."""

    before: Sight
    now_ms: int
    memory_full: bool = False


def args_of(call: ScriptCall[Any]) -> list[str]:
    """Return a call's arguments as text (bodies and bitmaps are read from the call itself)."""
    return [a.decode("latin-1") if isinstance(a, bytes) else str(a) for a in call.args]


def check_answer(call: ScriptCall[Any], answer: Any, scene: Scene) -> None:
    """Compare an answer with what it must be.

    Raises:
        AssertionError: it is another.
    """
    if call.script in ("sweep", "audit", "measure"):
        return
    wanted = _ORACLES[call.script](call, args_of(call), scene)
    assert answer == wanted, (
        f"{call.script} {args_of(call)[:4]} answered {answer}, the model says {wanted}"
    )


# --- producer ------------------------------------------------------------------------------------
def _open(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    m = scene.before.m
    if not scene.before.exists:
        return ["created", "running"]
    if (m["schema"], m["fingerprint"]) != (args[0], args[1]):
        return ["mismatch", m["schema"], m["fingerprint"]]
    return ["same", m["state"]]


def _enqueue(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, gid = scene.before, args[0]
    if not sight.exists or sight.m["state"] not in ("running", "paused"):
        return sight.m.get("state", "lost")
    training = gid.isdecimal()
    if training and int(gid) >= sight.frontier + sight.budget("W"):
        return "wait"
    if training and int(gid) in sight.terminal:
        return "done"
    if gid in sight.live and gid not in sight.dangling:
        return "dup"
    if training and len(sight.gs) >= sight.budget("cap"):
        return "full"
    if scene.memory_full:
        return "full"
    return "dup" if gid in sight.dangling else "new"


# --- worker --------------------------------------------------------------------------------------
@dataclass(slots=True)
class Taken:
    """What a lease takes, and what it leaves in q and s."""

    ids: list[str]
    suspects: list[str]
    left_in_q: dict[str, int]
    left_in_s: dict[str, int]


def take(sight: Sight, worker: str, limit: int, clock: int) -> Taken:
    """Return the members that a first call takes, in its order."""
    waiting = {name: dict(sight.z[name]) for name in "qs"}
    due = sorted((score, name) for name, score in sight.z["d"].items() if score <= clock)
    for _, name in due[:PROMOTE]:
        gid, i = name.rsplit(":", 1)
        if gid in sight.groups:
            suspect = sight.crashes(gid, i) >= SUSPECT_CRASHES
            score = sight.groups[gid].number("score") or 0
            waiting["s" if suspect else "q"][name] = score
    q, s = waiting["q"], waiting["s"]
    workers = len({*sight.z["w"], worker})
    limit = min(limit, MAX_LEASE, max(FAIR_SHARE, math.ceil((len(q) + len(s)) / workers)))
    evaluations = sum(score < 0 for score in q.values())
    ids = _take_suspects(sight, worker, limit, s, limit - evaluations)
    suspects = list(ids)
    for name in _in_order(q)[: limit - len(ids)]:
        del q[name]
        ids.append(name)
    return Taken(ids, suspects, q, s)


def _in_order(waiting: dict[str, int]) -> list[str]:
    return sorted(waiting, key=lambda name: (waiting[name], name.encode()))


def _take_suspects(
    sight: Sight, worker: str, limit: int, s: dict[str, int], training_limit: int
) -> list[str]:
    """Eight suspects a worker at most; one of three crashes only where there is no other.

    Evaluations that wait in q go before suspects of training groups.
    """
    mine = [i for i in sight.z["l"] if i.rsplit(":", 1)[1].split("-")[0] == worker]
    crashes = [sight.crashes(*lease_id.rsplit(":", 2)[:2]) for lease_id in mine]
    held = [x for x in crashes if x >= SUSPECT_CRASHES]
    # Until a vanished group is ended, nobody knows better than what was noted when it was leased.
    noted = set(sight.ws.get(worker, "").split()) & set(sight.z["l"])
    held += [SUSPECT_CRASHES for x in noted if x.rsplit(":", 2)[0] in sight.dangling]
    ids: list[str] = []
    alone = any(x >= ALONE_CRASHES for x in held)
    for name in _in_order(s):
        if alone or len(held) + len(ids) >= MAX_SUSPECTS or len(ids) >= limit:
            break
        if s[name] >= 0 and len(ids) >= training_limit:
            break
        if sight.crashes(*name.rsplit(":", 1)) >= ALONE_CRASHES:
            if held or ids:
                break
            alone = True
        ids.append(name)
        del s[name]
    return ids


def _lease(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, worker, call_no, limit = scene.before, args[0], int(args[1]), int(args[2])
    if not sight.exists:
        return LeaseAnswer("lost", 0, 0)
    last, *recorded = sight.wl.get(worker, "0").split()
    if call_no < int(last) and worker in sight.wl:
        return LeaseAnswer("old", 0, 0)
    m = sight.m
    answer = LeaseAnswer(m["state"], int(m["version"]), int(m["control_seq"]))
    clock, run_clock, _ = sight.clock(scene.now_ms)
    repeated = call_no == int(last)
    if repeated:
        ids = recorded
    elif m["state"] != "running":
        return answer
    else:
        ids = take(sight, worker, limit, clock).ids
    rows: dict[str, LeasedGroup] = {}
    for place, name in enumerate(ids, 1):
        gid, i = name.rsplit(":", 1)
        lease = Lease(gid, int(i), f"{worker}-{call_no}-{place}")
        group = sight.groups.get(gid)
        if group is None or group.state != GroupState.OPEN:
            continue
        if repeated and lease.id not in sight.z["l"]:
            continue
        remaining = _remaining_ms(group, run_clock, repeated=repeated)
        if remaining == 0 and not repeated:
            continue  # it fails by its deadline instead
        if gid not in rows:
            seconds = None if remaining is None else remaining / 1000
            rows[gid] = LeasedGroup(gid, group.n, seconds, group.fields["prompt"], [])
        member = group.members[int(i)]
        rows[gid].members.append(
            LeasedMember(lease, member.attempts, member.crashes, member.parked or 0)
        )
    answer.groups.extend(rows.values())
    return answer


def _remaining_ms(group: Group, run_clock: int, *, repeated: bool) -> int | None:
    deadline, timeout = group.number("deadline"), group.number("timeout_ms") or 0
    if deadline is None:
        deadline = run_clock + timeout if timeout and not repeated else 0
    return max(0, min(deadline - run_clock, timeout)) if deadline > 0 else None


def _beat(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight = scene.before
    if not sight.exists:
        return BeatAnswer("lost", 0, 0, [])
    lost = [lease_id for lease_id in args[1:] if lease_id not in sight.z["l"]]
    return BeatAnswer(sight.m["state"], int(sight.m["version"]), int(sight.m["control_seq"]), lost)


def _final(group: Group | None, i: int) -> str | None:
    return group.members[i].final if group and i < group.n else None


def _complete(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, answers = scene.before, []
    leases, ended = set(sight.z["l"]), dict[tuple[str, str], str]()
    left = {gid: group.number("left") or 0 for gid, group in sight.groups.items()}
    for j in range(0, len(args), 6):
        gid, i, token, *result = args[j : j + 6]
        lease_id, group = f"{gid}:{i}:{token}", sight.groups.get(gid)
        if lease_id not in leases or group is None or group.state != GroupState.OPEN:
            landed = ended.get((gid, i)) or _final(group, int(i))
            answers.append(CompleteAnswer("dup" if landed == token else "fenced"))
            continue
        leases.discard(lease_id)
        left[gid] -= 1
        if sum(map(len, result)) > sight.budget("max_body"):
            ended[gid, i] = "x:too_large"
            answers.append(CompleteAnswer("too_large"))
        else:
            ended[gid, i] = token
            answers.append(CompleteAnswer("ok", left[gid]))
    return answers


def _leased(args: list[str], sight: Sight) -> Group | None:
    """Return the open group whose member is leased under the token of `args`."""
    gid, i, token = args[:3]
    group = sight.groups.get(gid)
    alive = f"{gid}:{i}:{token}" in sight.z["l"] and group and group.state == GroupState.OPEN
    return group if alive else None


def _fail(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    group, kind = _leased(args, scene.before), args[3]
    if group is None:
        return "fenced"
    if kind == "back":
        return "back"
    attempts = group.members[int(args[1])].attempts + 1
    return (
        "failed" if kind == "final" or attempts >= scene.before.budget("max_attempts") else "again"
    )


def _park(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    if _leased(args, scene.before) is None:
        return "fenced"
    return "too_large" if len(args[3]) > scene.before.budget("max_body") else "parked"


def _confirm(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    m = scene.before.m
    if not scene.before.exists:
        return BeatAnswer("lost", 0, 0, [])
    return BeatAnswer(m["state"], int(m["version"]), int(m["control_seq"]), [])


# --- aggregator and trainer ----------------------------------------------------------------------
def _verdict(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    group = scene.before.groups.get(args[0])
    if group is None or group.state != GroupState.FULL or group.text("full_id") != args[1]:
        return "noop"
    return "dropped" if args[2] == "drop" else "ready"


def _taken(consumer: str, sight: Sight) -> bool:
    return sight.m.get("consumer") != consumer


def _deliver(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, gone = scene.before, set[str]()
    if _taken(args[0], sight):
        return ["taken"]
    answers = []
    for gid in args[1:]:
        group = sight.groups.get(gid)
        if group is None or gid in gone or group.state not in ("ready", "delivered"):
            answers.append("gone")
        elif is_stale(group, sight):
            gone.add(gid)
            answers.append("stale")
        else:
            answers.append("ok")
    return answers


def is_stale(group: Group, sight: Sight) -> bool:
    """Return whether a group is too old, and may not be handed out as it is."""
    bound, version = sight.budget("max_stale"), group.number("version")
    if not group.gid.isdecimal() or sight.m.get("on_stale") == "deliver":
        return False
    return bound >= 0 and version is not None and int(sight.m["version"]) - version > bound


def _ack(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, ended = scene.before, set[str]()
    if _taken(args[0], sight):
        return ["taken"]
    answers = []
    for gid in args[1:]:
        training = gid.isdecimal()
        if gid in sight.live - ended:
            answers.append("acked")
        elif gid in ended or not training or int(gid) in sight.terminal:
            answers.append("done")
        else:
            answers.append("lost")
        ended.add(gid)
    return answers


def _retire(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    if _taken(args[0], scene.before):
        return "taken"
    group = scene.before.groups.get(args[1])
    if group is None or group.state != GroupState.DELIVERED:
        return "gone"
    is_renewed = args[2] == "stale" and begins_anew(group, scene.before)
    return "requeued" if is_renewed else "dropped"


def begins_anew(group: Group, sight: Sight) -> bool:
    """Return whether a group that is too old gets another life."""
    may = sight.m.get("on_stale") == "requeue" and group.gid.isdecimal()
    return may and int(group.life) < sight.budget("max_requeues")


def _withdraw(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, gid, skip = scene.before, args[0], args[1] == "skip"
    group = sight.groups.get(gid)
    if group and group.state == GroupState.DELIVERED:
        return "held"
    if gid in sight.live:
        return "dropped"
    if not skip:
        return "gone"
    if not sight.exists:
        return "lost"
    if int(gid) >= sight.frontier + sight.budget("W"):
        return "wait"
    return "done" if int(gid) in sight.terminal else "skipped"


def _requeue(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, group = scene.before, scene.before.groups.get(args[0])
    if not sight.exists:
        return "lost"
    if group is None:
        return "gone"
    if group.life != args[1]:
        return "other"
    return "exhausted" if int(group.life) >= sight.budget("max_requeues") else "requeued"


# --- the run -------------------------------------------------------------------------------------
def _control(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    if args[0] != "by" or not scene.before.exists:
        return _controlled(args, scene)
    m = scene.before.m
    if args[1] != m["consumer"]:
        return _words(m, int(m["control_seq"]))
    return _controlled(args[2:], scene)


def _controlled(args: list[str], scene: Scene) -> Any:
    sight, op = scene.before, args[0]
    if not sight.exists:
        return ControlAnswer("lost", 0, 0, 0)
    if op == "set" and (
        args[1] not in BUDGETS or (args[1] == "on_stale" and args[2] not in ON_STALE)
    ):
        return ControlAnswer("unknown", 0, 0, 0)
    m, changed = dict(sight.m), False
    if op == "connect" and int(args[2]) > int(m["connects"]):
        m, changed = m | {"consumer": args[1], "connects": args[2]}, True
    elif op == "version" and int(args[1]) > int(m["version"]):
        m, changed = m | {"version": args[1]}, True
    elif op == "pause" and m["state"] == "running":
        m, changed = m | {"state": "paused"}, True
    elif op == "pause":
        changed = m["state"] == "paused" and m["pause_mode"] != args[1]
    elif op == "label":
        changed = kept_labels(sight, int(args[1]), args[2]) != sight.lb
    elif op == "engines":
        changed = args[1] != m.get("engines", "")
    elif op == "resume" and m["state"] == "paused" and args[1:] in ([], [m["pause_by"]]):
        m, changed = m | {"state": "running"}, True
    elif op == "set":
        changed = m.get(args[1]) != args[2]
    return _words(m, int(m["control_seq"]) + changed)


def kept_labels(sight: Sight, version: int, label: str) -> dict[str, str]:
    """Return the labels that are known once somebody named `version`."""
    known = sight.lb | {label: str(max(version, int(sight.lb.get(label, -1))))}
    newest = sorted(known, key=lambda name: (int(known[name]), name))[-MAX_LABELS:]
    return {name: known[name] for name in newest}


def _present(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    if not scene.before.exists:
        return ControlAnswer("lost", 0, 0, 0)
    return _words(scene.before.m, int(scene.before.m["control_seq"]))


def _attend(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    if not scene.before.exists:
        return "lost"
    return "ok" if scene.before.m["consumer"] == args[0] else "taken"


def _words(m: dict[str, str], control_seq: int) -> ControlAnswer:
    return ControlAnswer(
        state=m["state"], version=int(m["version"]), control_seq=control_seq,
        epoch=int(m["epoch"]), consumer=m["consumer"], connects=int(m["connects"]),
        rewind_id=m["rewind_id"],
    )  # fmt: skip


def _end(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight, op = scene.before, args[0]
    if not sight.exists:
        return "lost"
    state = sight.m["state"]
    if op == "done":
        return state if args[1] == sight.m["epoch"] else "epoch"
    live = state in ("running", "paused")
    if op == "abort" and (live or state == "failed"):
        return "aborting"
    return "failed" if op == "fail" and live else state


def _state(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight = scene.before
    bits, skip = bytearray(), (sight.frontier - sight.base) // 8
    for i in sorted(sight.above):
        at = (i - sight.base) // 8
        bits.extend(bytes(at + 1 - len(bits)))
        bits[at] |= 1 << (7 - (i - sight.base) % 8)
    return _Bitmap(sight.frontier, bytes(bits[skip:]), int(sight.m["epoch"]))


class _Bitmap(StateAnswer):
    """Equal where the same ids are in it: zero bytes at the end are no difference."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateAnswer) and (
            (self.frontier, self.bitmap.rstrip(b"\0"), self.epoch)
            == (other.frontier, other.bitmap.rstrip(b"\0"), other.epoch)
        )

    __hash__ = None  # type: ignore[assignment]  # compared only


def rewound_to(call: ScriptCall[Any]) -> set[int]:
    """Return the terminal ids that a rewind sets."""
    frontier, bitmap = call.args[2], call.args[3]
    assert isinstance(frontier, int)
    assert isinstance(bitmap, bytes)
    return set(range(frontier)) | unpack_ids(frontier, bitmap)


def _rewind(call: ScriptCall[Any], args: list[str], scene: Scene) -> Any:
    sight = scene.before
    if _taken(args[0], sight):
        return RewindAnswer(taken=True)
    epoch = int(sight.m["epoch"])
    if sight.m["rewind_id"] == args[1]:
        return RewindAnswer(taken=False, frontier=sight.frontier, epoch=epoch)
    terminal = rewound_to(call)
    frontier = next(i for i in range(len(terminal) + 1) if i not in terminal)
    live = {int(gid) for gid in sight.gs}
    beyond = {i for i in live - terminal if i >= frontier + sight.budget("W")}
    return RewindAnswer(
        taken=False, frontier=frontier, epoch=epoch + 1, seen=len(live & terminal),
        beyond=len(beyond),
    )  # fmt: skip


_ORACLES: dict[str, Callable[[ScriptCall[Any], list[str], Scene], Any]] = {
    "open": _open, "enqueue": _enqueue, "lease": _lease, "beat": _beat, "complete": _complete,
    "fail": _fail, "park": _park, "confirm": _confirm, "verdict": _verdict, "deliver": _deliver,
    "ack": _ack, "retire": _retire, "withdraw": _withdraw, "requeue": _requeue, "control": _control,
    "present": _present, "attend": _attend, "end": _end, "state": _state, "rewind": _rewind,
}  # fmt: skip
"""By script; `sweep` is judged by its effects, `audit` by the invariants, `measure` changes nothing
and has tests of its own."""


def sweep_bounds(answer: SweepAnswer, scene: Scene, page: int) -> None:
    """What a page may have done at most, and that it says whether something may be left."""
    sight = scene.before
    clock, _, jumped = sight.clock(scene.now_ms)
    grace = jumped or clock < int(sight.m["grace_until"])
    assert answer.grace == grace, f"sweep says grace {answer.grace}, the model {grace}"
    due = [i for i, score in sight.z["l"].items() if score <= clock]
    wanted = 0 if grace else min(len(due), page)
    dangling = sum(lease_id.rsplit(":", 2)[0] in sight.dangling for lease_id in due)
    assert wanted - dangling <= answer.expired <= wanted, (
        f"invariant 12: {answer.expired} leases expired, {wanted} were due"
    )
    assert answer.promoted == min(page, sum(x <= clock for x in sight.z["d"].values()))
