"""`pause`, `resume`, `abort`, `withdraw`, `requeue` and `set`: what an operator changes of a run.

Owns what people may change, under the names of the configuration, and within which bounds. Never
takes a group from a trainer's hands. Invariant: a command may be repeated; what it changed is what
it says, and where it changed nothing it says why, with exit code 1.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollstream.cli.exits import OK, PROBLEM, UNREACHABLE, USAGE, CommandError
from rollstream.cli.reach import the_run
from rollstream.cli.view import print_json, print_text
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import window_of
from rollstream.queue.reads import RunInfo, StreamEntry

ABORT_S = 60.0
"""How long `abort` stays to drop live groups; workers and trainers go on with it."""
_LIVE = ("running", "paused")
_HELD = (
    "a trainer has it in hand: it ends with the ack of its batch, or withdraw and requeue it there "
    "(GroupStream.withdraw, GroupStream.requeue)"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """One number of a run that `set` changes."""

    field: str
    """In the run's hash."""
    low: float
    high: float
    factor: int = 1
    """From the configuration's unit to the queue's."""

    @property
    def expected(self) -> str:
        """What a value has to be."""
        kind = "a number" if self.factor != 1 else "a whole number"
        return f"{kind} from {self.low:g} to {self.high:g}"

    def read(self, text: str) -> int:
        """Return the value in the queue's unit.

        Raises:
            ValueError: no number, or out of bounds.
        """
        value = float(text) if self.factor != 1 else int(text)
        if not math.isfinite(value) or not self.low <= value <= self.high:
            raise ValueError(text)
        return round(value * self.factor)


@dataclass(frozen=True, slots=True)
class Choice:
    """One word of a run that `set` changes."""

    field: str
    """In the run's hash."""
    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """What a value has to be."""
        return " or ".join(self.words)

    def read(self, text: str) -> str:
        """Return the word.

        Raises:
            ValueError: no such word.
        """
        if text not in self.words:
            raise ValueError(text)
        return text


BUDGETS: dict[str, Budget | Choice] = {
    "producer.capacity_groups": Budget("cap", 1, 1_000_000),
    "worker.lease_s": Budget("lease_ms", 0.5, 86_400, factor=1000),
    "worker.max_attempts": Budget("max_attempts", 1, 1_000_000),
    "worker.max_crashes": Budget("max_crashes", 1, 1_000_000),
    "worker.max_body_bytes": Budget("max_body", 1024, 1 << 29),
    "weights.max_staleness": Budget("max_stale", -1, 1_000_000),
    "weights.max_requeues": Budget("max_requeues", 0, 1_000_000),
    "weights.on_stale": Choice("on_stale", ("drop", "requeue", "deliver")),
}
"""Name in the configuration → what of the run it is."""


# --- the run -------------------------------------------------------------------------------------
def pause(args: argparse.Namespace) -> int:
    """Lease nothing more and make no call until `resume`, or until the deadline."""
    return _change(args, lambda queue, _: queue.call(calls.pause(args.mode, args.deadline)))


def resume(args: argparse.Namespace) -> int:
    """End a drain and a pause; a pause that a trainer holds while it is drained stays its own."""
    return _change(args, _resume)


def _resume(queue: BlockingQueue, info: RunInfo) -> ControlAnswer:
    opened = queue.call(calls.drain(on=False))
    if info.draining and info.pause_by:
        return opened  # in an update of weights, which the trainer ends
    return queue.call(calls.resume())


def _change(
    args: argparse.Namespace, act: Callable[[BlockingQueue, RunInfo], ControlAnswer]
) -> int:
    with the_run(args) as (queue, info):
        answer = act(queue, info)
    if answer.state not in _LIVE:
        raise CommandError(f"run {queue.run!r} is {_state(info, answer.state)}", PROBLEM)
    if args.json:
        print_json({"run": queue.run, "state": answer.state})
    else:
        print_text(f"run {queue.run}: {answer.state}")
    return OK


def _state(info: RunInfo, state: str) -> str:
    return state + (f" ({info.error})" if info.error else "")


def abort(args: argparse.Namespace) -> int:
    """End a run: its live groups are dropped as `run_aborted`, and may come again in a new run."""
    with the_run(args) as (queue, _):
        live = queue.depths()["live"]
        if not (args.yes or _asked(f"Abort run {queue.run} and drop {live} live groups?")):
            raise CommandError("nothing was changed: say y, or give --yes", USAGE)
        reason = args.reason.encode(errors="replace").decode()
        state = queue.call(calls.abort_run(reason))
        limit = time.monotonic() + ABORT_S
        while state == "aborting" and time.monotonic() < limit:
            queue.call(calls.sweep())
            state = _state_of(queue)
        left = queue.depths()["live"]
    if args.json:
        print_json({"run": queue.run, "state": state, "dropped": live - left, "live": left})
    else:
        print_text(f"run {queue.run}: {state}; {live - left} groups dropped, {left} live")
    return OK


def _state_of(queue: BlockingQueue) -> str:
    info = queue.info()
    if info is None:
        raise CommandError(f"run {queue.run!r} was removed meanwhile", UNREACHABLE)
    return info.state


def _asked(question: str) -> bool:
    if not sys.stdin or not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- one group -----------------------------------------------------------------------------------
def withdraw(args: argparse.Namespace) -> int:
    """Drop a live group as `withdrawn`."""
    with the_run(args) as (queue, _):
        outcome = queue.call(calls.withdraw(args.group))
    why = {"gone": "it is not live: it has ended, or was never enqueued", "held": _HELD}
    return _told(args, queue.run, outcome, "dropped", why.get(outcome, ""))


def requeue(args: argparse.Namespace) -> int:
    """Run a live group again from its prompt, before all that wait."""
    with the_run(args) as (queue, _):
        group = queue.headers([StreamEntry("", args.group, 0)])[0]
        if group.state == "delivered":
            outcome = "held"
        else:
            outcome = queue.call(calls.requeue(args.group, group.life, "by an operator"))
    why = {
        "gone": "it is not live: it has ended, or was never enqueued",
        "held": _HELD,
        "other": "somebody else requeued it at the same moment",
        "exhausted": f"it was requeued {group.life} times, as often as the run permits "
        "(rollstream set max_requeues N)",
    }
    return _told(args, queue.run, outcome, "requeued", why.get(outcome, ""))


def _told(args: argparse.Namespace, run: str, outcome: str, good: str, why: str) -> int:
    if args.json:
        print_json({"run": run, "group": args.group, "outcome": outcome, "why": why})
    elif outcome == good:
        print_text(f"run {run}: group {args.group} {outcome}")
    else:
        print_text(f"run {run}: group {args.group} stays as it is: {why or outcome}")
    return OK if outcome == good else PROBLEM


# --- budgets -------------------------------------------------------------------------------------
def set_value(args: argparse.Namespace) -> int:
    """Change one setting of a run that goes on, until its producer starts again."""
    name = _full_name(args.key)
    budget = BUDGETS[name]
    try:
        value = budget.read(args.value)
    except ValueError:
        said = f"{name} = {args.value!r}: expected {budget.expected}"
        raise CommandError(said, USAGE) from None
    with the_run(args) as (queue, info):
        wanted: dict[str, int | str] = {budget.field: value}
        if budget.field == "cap" and isinstance(value, int):
            wanted["W"] = window_of(value)
        for field, number in wanted.items():
            answer = queue.call(calls.set_budget(field, number))
            if answer.state in ("unknown", "lost"):
                raise CommandError(f"run {queue.run!r} answered {answer.state}", UNREACHABLE)
    shown: Any = value
    if isinstance(budget, Budget) and isinstance(value, int) and budget.factor != 1:
        shown = value / budget.factor
    if args.json:
        print_json({"run": queue.run, "key": name, "value": shown, "state": answer.state})
    else:
        print_text(f"run {queue.run}: {name} = {shown if isinstance(shown, str) else f'{shown:g}'}")
        if info.state not in _LIVE:
            print_text(f"the run is {_state(info, info.state)}: nothing follows from it")
    return OK


def _full_name(key: str) -> str:
    """Return the name in the configuration; its last part alone will do.

    Raises:
        CommandError: there is no such budget; names the nearest.
    """
    by_short = {name.rpartition(".")[2]: name for name in BUDGETS}
    if key in BUDGETS or key in by_short:
        return by_short.get(key, key)
    near = difflib.get_close_matches(key, [*BUDGETS, *by_short], 1)
    hint = f"did you mean {by_short.get(near[0], near[0])}? " if near else ""
    raise CommandError(
        f"{key!r} cannot be set in a running run; {hint}there are {', '.join(BUDGETS)}", USAGE
    )
