"""Every script call, typed: how its arguments are written and its answer is read.

Owns the calling convention between Python and the scripts. Never talks to a server: an executor
(`Queue` for asyncio, `BlockingQueue` for the trainer) runs what these functions describe, alone
or many in one round trip. Invariant: what a repeated call answers stands in the script's header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollstream.errors import DropReason, MemberReason, Report, RunLost
from rollstream.labels import is_between
from rollstream.queue.answers import (
    AuditAnswer,
    BeatAnswer,
    CompleteAnswer,
    ControlAnswer,
    Lease,
    LeaseAnswer,
    LeasedGroup,
    LeasedMember,
    Measured,
    RewindAnswer,
    StateAnswer,
    SweepAnswer,
)
from rollstream.queue.keys import (
    EVALUATION_PRIORITY,
    MAX_ENGINES_BYTES,
    MAX_LABEL_CHARS,
    PAST_MEMBERS,
)

T = TypeVar("T")
Arg = bytes | str | int | float
MAX_ERROR_CHARS = 2000
"""Of an error or a drop's detail that is kept for people."""


@dataclass(frozen=True, slots=True)
class ScriptCall(Generic[T]):
    """One call of one script."""

    script: str
    args: tuple[Arg, ...]
    parse: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one member, encoded."""

    lease: Lease
    header: bytes
    body: bytes
    text: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Size on the wire, for the bound of one call."""
        return len(self.header) + len(self.body) + len(self.text)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _told(text: str) -> str:
    """Return what people are told, bounded; a lone surrogate, which UTF-8 cannot say, as `?`."""
    return text[:MAX_ERROR_CHARS].encode(errors="replace").decode()


def _one_text(answer: Any) -> str:
    return _text(answer[0]) if isinstance(answer, list) else _text(answer)


def _texts(answer: Any) -> list[str]:
    return [_text(value) for value in answer]


# --- the producer's calls ------------------------------------------------------------------------
def open_run(schema: int, fingerprint: str, budgets: dict[str, Arg]) -> ScriptCall[list[str]]:
    """Create the run, or find it: ["created" | "same", state] or ["mismatch", schema, fingerprint].

    On "same" the budgets are set anew (a producer restarted with another capacity means it).
    Budgets: lease_ms, cap, W, max_attempts, max_crashes, max_requeues, max_stale, max_body,
    on_stale (`drop`, `requeue` or `deliver`), max_drops (verdicts in a row that drop, 0 is any
    number); beside them weights_mode, for workers and trainer.
    """
    flat = tuple(part for item in budgets.items() for part in item)
    return ScriptCall("open", (schema, fingerprint, *flat), _texts)


def enqueue(
    group_index: int | str,
    n: int,
    prompt: bytes,
    *,
    priority: int | None = None,
    timeout_ms: int = 0,
    env: str = "",
) -> ScriptCall[str]:
    """Add one group: `new`, `dup`, `done`, `full`, `wait`, or the state of a run that takes none.

    `full` is also the answer when the server's memory is; `lost` when there is no such run.

    Args:
        group_index: a whole number, or `e:…` for an evaluation.
        n: its members, at least one.
        prompt: its record.
        priority: the lower runs first; None is 0, and for an evaluation in front of all others.
        timeout_ms: from its first lease to its deadline; 0 is none.
        env: its environment, by which its end is counted once more; empty is none.

    Raises:
        ValueError: `n` is not positive (such a group would never end), or the name is none: a
            space in it would cut the record of what a worker was given.
    """
    name = str(group_index)
    is_evaluation = name.startswith("e:") and name.isascii() and name.isprintable()
    if not (name.isdecimal() and name.isascii()) and (not is_evaluation or " " in name):
        raise ValueError(f"group {name[:80]!r}: expected a whole number, or e:… without spaces")
    if n < 1:
        raise ValueError(f"group {group_index}: n = {n}, a group has at least one member")
    if priority is None:
        priority = EVALUATION_PRIORITY if str(group_index).startswith("e:") else 0
    args = (group_index, n, priority, timeout_ms, prompt, *((env,) if env else ()))
    return ScriptCall("enqueue", args, _one_text)


def skip(group_index: int) -> ScriptCall[str]:
    """Make the id of a bad row terminal: `skipped`, `done`, `wait`, `lost`.

    Where a group of that id lives after all it is `dropped`, or `held` while the trainer has it.
    """
    return ScriptCall("withdraw", (group_index, "skip"), _text)


def end_of_data(epoch: int) -> ScriptCall[str]:
    """Say that the scan of `epoch` is complete.

    Answers the run's state, `epoch` where it is another epoch by now, or `lost`.
    """
    return ScriptCall("end", ("done", epoch), _text)


# --- the worker's calls --------------------------------------------------------------------------
def lease(worker: str, call_no: int, limit: int) -> ScriptCall[LeaseAnswer]:
    """Lease up to `limit` members; call k+1 may start only after call k was answered."""
    return ScriptCall("lease", (worker, call_no, limit), _parse_lease)


def _parse_lease(answer: Any) -> LeaseAnswer:
    if len(answer) < 3:
        return LeaseAnswer(_text(answer[0]), 0, 0)
    groups = [_parse_group(row) for row in answer[3:]]
    return LeaseAnswer(_text(answer[0]), int(answer[1]), int(answer[2]), groups)


def _parse_group(row: list[Any]) -> LeasedGroup:
    gid, n, remaining, prompt = _text(row[0]), int(row[1]), int(row[2]), row[3]
    members = [
        LeasedMember(
            Lease(gid, int(row[j]), _text(row[j + 1])),
            int(row[j + 2]),
            int(row[j + 3]),
            int(row[j + 4]),
        )
        for j in range(4, len(row), 5)
    ]
    return LeasedGroup(gid, n, remaining / 1000 if remaining >= 0 else None, prompt, members)


def beat(worker: str, lease_ids: Sequence[str]) -> ScriptCall[BeatAnswer]:
    """Extend every lease in one call."""
    return ScriptCall("beat", (worker, *lease_ids), _parse_beat)


def _parse_beat(answer: Any) -> BeatAnswer:
    if len(answer) < 3:
        return BeatAnswer(_text(answer[0]), 0, 0, [])
    return BeatAnswer(_text(answer[0]), int(answer[1]), int(answer[2]), _texts(answer[3:]))


def complete(completions: Sequence[Completion]) -> ScriptCall[list[CompleteAnswer]]:
    """Report ended trajectories; at most 128 members and 1 MB a call."""
    args: list[Arg] = []
    for c in completions:
        args += (c.lease.group_index, c.lease.member, c.lease.token, c.header, c.body, c.text)
    return ScriptCall("complete", tuple(args), lambda answer: [_parse_landed(a) for a in answer])


def _parse_landed(answer: Any) -> CompleteAnswer:
    if isinstance(answer, int):
        return CompleteAnswer("ok", answer)
    return CompleteAnswer(_text(answer))


def fail(
    lease: Lease,
    report: Report,
    reason: MemberReason,
    error: str,
    *,
    delay_s: float = 0.0,
    forget: bool = False,
) -> ScriptCall[str]:
    """Send a member back or end it: `again`, `back`, `failed`, `fenced` (ignored by callers).

    Args:
        lease: of the member.
        report: `back` charges no budget, `retry` one attempt, `final` ends it.
        reason: why, where it fails for good.
        error: the same for people.
        delay_s: how long it waits before anybody may lease it again.
        forget: what it parked earlier is deleted, so the next attempt begins at the prompt.
    """
    text, delay_ms = _told(error), int(delay_s * 1000)
    args = (lease.group_index, lease.member, lease.token, report, reason, text, delay_ms)
    return ScriptCall("fail", (*args, "forget") if forget else args, _text)


def park(lease: Lease, parked_body: bytes, *, delay_s: float = 0.0) -> ScriptCall[str]:
    """Send a member back with what it has, uncharged: `parked`, `fenced` (ignored by callers).

    `too_large`: the member failed, since its result would be larger than the limit too. Whoever
    leases the member next hears the size (`parked_bytes`), and reads the body by `Queue.parked`.

    Args:
        lease: of the member.
        parked_body: what whoever goes on needs; a member has one, the last.
        delay_s: how long it waits before anybody may lease it again.
    """
    args = (lease.group_index, lease.member, lease.token, parked_body, int(delay_s * 1000))
    return ScriptCall("park", args, _text)


def confirm(
    worker: str, control_seq: int, in_flight: int, engines: bytes = b""
) -> ScriptCall[BeatAnswer]:
    """Say that this worker obeys every control word up to `control_seq`; a sign of life, too.

    Args:
        worker: as in `lease` and `beat`.
        control_seq: of the run as the worker read it, not of the word that it heard.
        in_flight: its calls to engines that are under way.
        engines: JSON of what it knows of its engines, for the trainer and for people; left out
            where it is larger than 16 KB.
    """
    kept = engines if len(engines) <= MAX_ENGINES_BYTES else b""
    return ScriptCall("confirm", (worker, control_seq, in_flight, kept), _parse_beat)


def sweep(page: int = 64) -> ScriptCall[SweepAnswer]:
    """Move the queue clock and do one page of what came due."""
    return ScriptCall("sweep", (page,), _parse_sweep)


def _parse_sweep(answer: Any) -> SweepAnswer:
    numbers = [int(value) for value in answer]
    if numbers[0] < 0:
        return SweepAnswer(more=False, lost=True)
    more, expired, promoted, deadlines, evicted, aborted, grace, vanished = numbers
    return SweepAnswer(
        more=bool(more),
        expired=expired,
        promoted=promoted,
        deadlines=deadlines,
        evicted=evicted,
        aborted=aborted,
        grace=bool(grace),
        vanished=vanished,
    )


# --- the aggregator's call -----------------------------------------------------------------------
def verdict(
    group_index: str,
    message_id: str,
    *,
    drop: DropReason | None = None,
    detail: str = "",
    headers: dict[int, bytes] | None = None,
) -> ScriptCall[str]:
    """Judge a full group: `ready`, `dropped`, or `noop` for a verdict of an earlier life.

    Drops in a row, none kept between them, end the run as failed once they are `max_drops`.

    Args:
        group_index: as Redis names it.
        message_id: of the entry in `full` that was judged: the fence.
        drop: why it is dropped; None keeps it.
        detail: of the drop, for people (`past`).
        headers: new headers per member (group rewards); of a drop only its record has them.
    """
    args: list[Arg] = [
        group_index,
        message_id,
        "keep" if drop is None else "drop",
        drop or "",
        _told(detail),
    ]
    for member, header in (headers or {}).items():
        if drop is None or member < PAST_MEMBERS:
            args += (member, header)
    return ScriptCall("verdict", tuple(args), _text)


# --- the trainer's calls -------------------------------------------------------------------------
def connect(consumer: str, number: int) -> ScriptCall[ControlAnswer]:
    """Make `consumer` the one that may deliver, ack and rewind.

    `number` is one more than the `connects` that was read before; a number that is not higher
    changes nothing. Where the answer's `consumer` is not the caller's, another one connected:
    a new trainer tries again with its number + 1, an older one was taken over. A later answer
    with `connects` below the caller's own number tells that the server lost its last second.
    """
    return ScriptCall("control", ("connect", consumer, number), _parse_control)


def pause(
    mode: str = "keep", deadline_s: float = 0.0, trainer: str = ""
) -> ScriptCall[ControlAnswer]:
    """Lease nothing more until `resume`; deadlines stand still.

    A pause of a paused run replaces its mode and its deadline, which begins anew.

    Args:
        mode: what becomes of calls under way: `keep` lets them go on, `abort` stops them.
        deadline_s: on the queue clock; then a sweep resumes the run. 0 is none.
        trainer: token of the trainer whose pause it is; empty is anybody's.
    """
    args = ("pause", mode, int(deadline_s * 1000), *((trainer,) if trainer else ()))
    return ScriptCall("control", args, _parse_control)


def resume(trainer: str = "") -> ScriptCall[ControlAnswer]:
    """End a pause; with `trainer` only one that is that trainer's."""
    args = ("resume", trainer) if trainer else ("resume",)
    return ScriptCall("control", args, _parse_control)


def drain(on: bool = True) -> ScriptCall[ControlAnswer]:
    """Take no new prompts (`enqueue` answers `full`) while what lives ends, or take them again.

    Evaluations are taken all the same. Neither a resume nor a producer that starts again ends it.
    """
    return ScriptCall("control", ("drain", "1" if on else "0"), _parse_control)


def by(consumer: str, change: ScriptCall[ControlAnswer]) -> ScriptCall[ControlAnswer]:
    """Do it only where `consumer` is the run's; the answer's `consumer` says who is.

    For what a trainer changes: one that another was connected after must change nothing any more.
    """
    return ScriptCall("control", ("by", consumer, *change.args), change.parse)


def set_budget(name: str, value: int | str) -> ScriptCall[ControlAnswer]:
    """Change one budget of `open_run`; the answer's state is `unknown` for any other name.

    So it is for an `on_stale` that is none of its three words.
    """
    return ScriptCall("control", ("set", name, value), _parse_control)


@dataclass(frozen=True, slots=True)
class BlockedTime:
    """How long one producer process was blocked: what it reported before, and what it is now."""

    process: str
    """New with every process, whatever its name; without spaces."""
    from_ms: int
    """Since its start, as of the last report that was answered."""
    to_ms: int


def present(
    role: str,
    name: str,
    *,
    leaving: bool = False,
    about: str = "",
    blocked: BlockedTime | None = None,
) -> ScriptCall[ControlAnswer]:
    """Say that a process lives, or leaves; role is `worker`, `producer` or `aggregator`.

    Workers are present by `lease` and `beat` already. Whoever is not seen for four leases of the
    queue clock is forgotten. `about` says where it runs, for people. `blocked` is added to the
    run's counter `blocked_ms`, each millisecond once; not by a process that leaves.
    """
    args: tuple[Arg, ...] = (role, name, "leaving" if leaving else "here")
    if about or blocked is not None:
        args += (about,)
    if blocked is not None:
        args += (blocked.process, blocked.from_ms, blocked.to_ms)
    return ScriptCall("present", args, _parse_control)


def set_version(version: int, label: str | None = None) -> ScriptCall[ControlAnswer]:
    """Raise the run's weight version (never lowers it); `label` is the engines' own name of it.

    Raises:
        ValueError: the label is longer than 200 characters, or cannot be encoded.
        TypeError: it is no text.
    """
    return ScriptCall("control", ("version", version, _label(label or "")), _parse_control)


def set_label(version: int, label: str) -> ScriptCall[ControlAnswer]:
    """Say what the engines call a version that is still to come; the newest 64 labels are kept.

    Raises:
        ValueError: the label is empty, longer than 200 characters, or cannot be encoded.
        TypeError: it is no text.
    """
    if not label:
        raise ValueError(f"the label of weight version {version} is empty: give none, or a name")
    return ScriptCall("control", ("label", version, _label(label)), _parse_control)


def set_engines(urls: Sequence[str] | None) -> ScriptCall[ControlAnswer]:
    """Name the engines of the run for every worker; None is each worker's own configuration."""
    text = "" if urls is None else json.dumps(list(urls))
    return ScriptCall("control", ("engines", text), _parse_control)


def _label(label: str) -> str:
    if not isinstance(label, str):
        raise TypeError(f"label {label!r} is a {type(label).__name__}: expected a text")
    label.encode()  # a lone surrogate is refused here, and not by Redis
    if len(label) > MAX_LABEL_CHARS:
        raise ValueError(
            f"label {label[:40]!r}… has {len(label)} characters, allowed are {MAX_LABEL_CHARS}"
        )
    if is_between(label):
        raise ValueError(
            f"label {label!r}: engines are called number~number while new weights are on their way "
            "to them; name weights something else"
        )
    return label


def _parse_control(answer: Any) -> ControlAnswer:
    if len(answer) < 4:
        return ControlAnswer(_text(answer[0]), 0, 0, 0)
    state, version, control_seq, epoch, consumer, connects, rewind_id = answer
    return ControlAnswer(
        state=_text(state),
        version=int(version),
        control_seq=int(control_seq),
        epoch=int(epoch),
        consumer=_text(consumer),
        connects=int(connects),
        rewind_id=_text(rewind_id),
    )


def attend(
    consumer: str, connection: str, *, wait_ms: int = 0, leaving: bool = False
) -> ScriptCall[str]:
    """Say that the trainer is there: `ok`, `taken`, `lost`.

    Args:
        consumer: its token.
        connection: what the server calls its connections; empty for nothing.
        wait_ms: it waits for groups that are not there, and is believed for so long.
        leaving: it closes its stream.
    """
    word: Arg = "left" if leaving else wait_ms or "here"
    return ScriptCall("attend", (consumer, connection or "-", word), _text)


def deliver(consumer: str, groups: Sequence[str]) -> ScriptCall[list[str]]:
    """Mark groups as handed out: per group `ok`, `stale` (dropped here), `gone`; or ["taken"]."""
    return ScriptCall("deliver", (consumer, *groups), _texts)


def ack(consumer: str, groups: Sequence[str]) -> ScriptCall[list[str]]:
    """Say that groups were trained on: per group `acked`, `done`, `lost`; or ["taken"]."""
    return ScriptCall("ack", (consumer, *groups), _texts)


def retire(consumer: str, group_index: str, reason: DropReason) -> ScriptCall[str]:
    """Drop a group that the trainer holds: `dropped`, `gone`, `taken`."""
    return ScriptCall("retire", (consumer, group_index, reason), _text)


def state() -> ScriptCall[StateAnswer]:
    """Read the frontier, atomically; raises RunLost where there is no such run."""
    return ScriptCall("state", (), _parse_state)


def _parse_state(answer: Any) -> StateAnswer:
    if len(answer) < 3:
        raise RunLost("Redis holds no such run any more, so there is no frontier to read")
    return StateAnswer(int(answer[0]), answer[1], int(answer[2]))


def rewind(consumer: str, rewind_id: str, frontier: int, bitmap: bytes) -> ScriptCall[RewindAnswer]:
    """Set the frontier to a checkpoint's; repeats with the same id drop what is left, by pages."""
    return ScriptCall("rewind", (consumer, rewind_id, frontier, bitmap), _parse_rewind)


def _parse_rewind(answer: Any) -> RewindAnswer:
    if len(answer) < 4:
        return RewindAnswer(taken=True)
    frontier, epoch, seen, beyond, more = (int(value) for value in answer)
    return RewindAnswer(
        taken=False, frontier=frontier, epoch=epoch, seen=seen, beyond=beyond, more=bool(more)
    )


# --- the operator's calls ------------------------------------------------------------------------
def withdraw(group_index: str) -> ScriptCall[str]:
    """Drop a live group on a user's wish: `dropped`, `gone`, `held` (the trainer has it)."""
    return ScriptCall("withdraw", (group_index, DropReason.WITHDRAWN), _text)


def requeue(group_index: str, life: int, reason: str = "") -> ScriptCall[str]:
    """Let a live group begin anew under its id, in front of the queue.

    Answers `requeued`, `gone` (not live), `other` (its life is not `life`: it was requeued since,
    maybe by this very call, whose reply was lost), `exhausted` (as often as `max_requeues`), or
    `lost`. Workers that run its members are fenced. A trainer that holds its older results may
    still ack it, which ends it.

    Args:
        group_index: as Redis names it.
        life: how often it was requeued before, as read: the fence.
        reason: for people; kept on the group.
    """
    return ScriptCall("requeue", (group_index, life, reason[:MAX_ERROR_CHARS]), _text)


def abort_run(reason: str = "") -> ScriptCall[str]:
    """End the run: live groups are dropped as `run_aborted` by sweeps, then it is `ended`."""
    return ScriptCall("end", ("abort", reason), _text)


def fail_run(reason: str) -> ScriptCall[str]:
    """Stop the run as failed; its groups stay for inspection."""
    return ScriptCall("end", ("fail", _told(reason)), _text)


def measure() -> ScriptCall[Measured | None]:
    """Read ages of the queues and who is there; None where there is no such run."""
    return ScriptCall("measure", (), _parse_measured)


def _parse_measured(answer: Any) -> Measured | None:
    if len(answer) < 9:
        return None
    *numbers, trainer, connection = answer
    members, full, ready, delivered, workers, producers, aggregators = map(int, numbers)
    ages = {"queued": members, "full": full, "ready": ready, "delivered": delivered}
    return Measured(
        oldest_s={queue: max(0, age) / 1000 for queue, age in ages.items()},
        workers=workers,
        producers=producers,
        aggregators=aggregators,
        trainer=_text(trainer),
        connection=_text(connection).removeprefix("-"),
    )


def audit(*, deep: bool = False) -> ScriptCall[AuditAnswer]:
    """Prove the accounting identity (and, deep, that every member is in exactly one place)."""
    return ScriptCall("audit", ("deep",) if deep else (), _parse_audit)


def _parse_audit(answer: Any) -> AuditAnswer:
    enqueued, acked, dropped, live = (int(value) for value in answer[:4])
    return AuditAnswer(enqueued, acked, dropped, live, problems=_texts(answer[4:]))
