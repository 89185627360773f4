"""What a trainer asks of a run beside its groups: its state, and to withdraw or requeue a group.

Owns the meaning of the answers. Never waits for workers to hear of it: the change stands in Redis
and in its control stream. Invariant: a group that a handed-out batch has is never touched here;
the model may have learned it already, so only its ack tells what became of it.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Sequence
from typing import Literal, get_args

from rollstream.errors import DropReason, RunFailed, StreamError
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import StreamEntry
from rollstream.trainer.hold import Hold
from rollstream.trainer.lineage import Fenced, RunMissing

PauseMode = Literal["keep", "abort"]
MODES: tuple[str, ...] = get_args(PauseMode)
_LIVE = ("running", "paused")


def check_mode(mode: str) -> None:
    """Refuse a way of pausing that there is not.

    Raises:
        ValueError: names those that there are.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: expected {' or '.join(map(repr, MODES))}")


def change(hold: Hold, call: ScriptCall[ControlAnswer]) -> ControlAnswer:
    """Change the state of a run that goes on; what it is then.

    Raises:
        RunMissing: there is no such run.
        RunFailed: it was ended.
        Fenced: this trainer is not the run's consumer; nothing was changed.
    """
    return change_all(hold, (call,))[0]


def change_all(hold: Hold, changes: Sequence[ScriptCall[ControlAnswer]]) -> list[ControlAnswer]:
    """Change the state of a run that goes on, several times in one round trip; see `change`."""
    answers = changed(hold, changes)
    state = answers[-1].state
    if state not in _LIVE:
        info = hold.queue.info()
        raise RunFailed(f"{state}: {(info and info.error) or 'no reason was given'}")
    return answers


def changed(hold: Hold, changes: Sequence[ScriptCall[ControlAnswer]]) -> list[ControlAnswer]:
    """Change a run in whatever state, several times in one round trip.

    Raises:
        RunMissing: there is no such run.
        Fenced: this trainer is not the run's consumer; nothing was changed.
    """
    consumer = hold.lineage.consumer
    answers = hold.queue.call_many([calls.by(consumer, change) for change in changes])
    if any(answer.state == "lost" for answer in answers):
        raise RunMissing(f"Redis has no run {hold.queue.run!r}")
    if any(answer.consumer != consumer for answer in answers):
        raise Fenced
    return answers


def withdraw(hold: Hold, group_index: int) -> bool:
    """Drop a live group as withdrawn; whether it was.

    Raises:
        RunMissing: there is no such run.
        Fenced: this trainer is not the run's consumer.
        ConsumerTaken: a later trainer took the run over.
    """
    group_index = operator.index(group_index)
    hold.lineage.check()
    if _is_out(hold, group_index):
        return False
    answer = hold.queue.call(calls.withdraw(str(group_index)))
    if answer == "held":
        # Taken in hand, by this process or one before it, but in no batch: nobody trains on it.
        call = calls.retire(hold.lineage.consumer, str(group_index), DropReason.WITHDRAWN)
        answer = hold.queue.call(call)
        if answer == "taken":
            raise Fenced
    # `gone` of a group in hand: dropped by a try whose answer was lost.
    return hold.let_go(group_index) or answer == "dropped"


def requeue(hold: Hold, group_index: int) -> bool:
    """Make a live group run again from its prompt; whether it does.

    Raises:
        RunMissing: there is no such run.
        ConsumerTaken: a later trainer took the run over.
    """
    group_index = operator.index(group_index)
    hold.lineage.check()
    if _is_out(hold, group_index):
        return False
    group = hold.queue.headers([StreamEntry("", str(group_index), 0)])[0]
    answer = hold.queue.call(calls.requeue(str(group_index), group.life, "by the trainer"))
    if answer == "lost":
        raise RunMissing(f"Redis has no run {hold.queue.run!r}")
    # `other`: a new life since the look, by a try whose answer was lost or by somebody else.
    has_new_life = answer in ("requeued", "other")
    if has_new_life:
        hold.let_go(group_index)
    return has_new_life


def abort_run(hold: Hold, reason: str, timeout_s: float) -> None:
    """End the run, and stay until its live groups are dropped.

    Raises:
        ConsumerTaken: a later trainer took the run over.
        StreamError: Redis did not answer, or groups are left after `timeout_s`.
    """
    limit = time.monotonic() + timeout_s
    reason = reason.encode(errors="replace").decode()
    hold.patiently(lambda: _check_if_there(hold), timeout_s)
    hold.aborted_here = True
    hold.patiently(lambda: hold.queue.call(calls.abort_run(reason)), timeout_s)
    while hold.patiently(lambda: hold.sweep(1), timeout_s):
        if time.monotonic() > limit:
            raise StreamError(f"run {hold.info.run!r} still drops groups; abort it again")


def _check_if_there(hold: Hold) -> None:
    with contextlib.suppress(RunMissing):  # it is over already
        hold.lineage.check()


def _is_out(hold: Hold, group_index: int) -> bool:
    return any(
        held.group.group_index == group_index
        for out in hold.handed_out.values()
        for held in out.held
    )
