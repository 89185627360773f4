"""`rollstream drain`: no new prompts, and what lives goes on to its end; before a maintenance.

Owns the order and the wait. Never aborts, pauses or gives anything back. Invariant: it may be
repeated, also after an interrupt or a timeout (the run stays closed to new prompts until `resume`),
and exit code 0 means that no member waits or runs and no group waits for its verdict.

What the trainer has not trained yet (ready, delivered) stays in Redis and is not waited for: it
needs no worker and no engine. `--trained` waits for it too.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from rollstream.cli.exits import OK, PROBLEM, UNREACHABLE, CommandError
from rollstream.cli.reach import the_run
from rollstream.cli.view import cleaned, print_json, print_text
from rollstream.log_sink import say
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo
from rollstream.runs import OUTAGES

LOOK_S = 0.5
LINE_S = 10.0
"""Between two lines where there is no terminal."""
_LIVE = ("running", "paused")
Tell = Callable[[int, int, str], None]
"""Told how much is done, of how much, and in words."""


def drain(args: argparse.Namespace) -> int:
    """Close the run to new prompts, and wait until what lives has ended.

    Raises:
        CommandError: an operator paused it (nothing would end), or it is over.
    """
    wait_s, args.timeout_s = args.timeout_s, args.redis_timeout_s
    started = time.monotonic()
    with the_run(args) as (queue, info):
        _refuse(info)
        answer = queue.call(calls.drain())
        if answer.state not in _LIVE:
            raise CommandError(f"run {queue.run!r} is {answer.state}", PROBLEM)
        try:
            with _progress(args) as tell:
                left = _await(queue, started + wait_s, tell, trained=args.trained)
        except KeyboardInterrupt:
            say(f"run {queue.run} takes no new prompts until rollstream resume")
            raise
    over = not _open(left, trained=args.trained)
    waited_s = round(time.monotonic() - started, 1)
    if args.json:
        print_json({"run": queue.run, "drained": over, "waited_s": waited_s, "left": left})
    elif over:
        print_text(
            f"run {queue.run}: drained in {waited_s:.0f} s; {_kept(left)}. "
            "rollstream resume takes new prompts again"
        )
    else:
        print_text(
            f"run {queue.run}: not drained after {waited_s:.0f} s: {_left(left)}. It takes no "
            "new prompts until resume: drain again, or stop workers, which give back what "
            "they run"
        )
    return OK if over else PROBLEM


def _refuse(info: RunInfo) -> None:
    if info.state == "paused" and not info.pause_by and info.pause_left_s is None:
        raise CommandError(
            f"run {info.run!r} is paused by an operator, so nothing in it ends: rollstream resume, "
            "then drain. Nothing was changed",
            PROBLEM,
        )


def _await(queue: BlockingQueue, limit: float, tell: Tell, *, trained: bool) -> dict[str, int]:
    """Wait until nothing is open or the time is over; return what is left."""
    most = 0
    left: dict[str, int] = {}
    while True:
        try:
            left = _look(queue)
        except OUTAGES as error:
            if time.monotonic() >= limit:
                raise
            tell(0, 0, f"Redis does not answer ({error}): waiting for it")
        else:
            rest = _open(left, trained=trained)
            most = max(most, rest)
            tell(most - rest, most, _left(left))
            if not rest or time.monotonic() >= limit:
                return left
        time.sleep(max(0.0, min(LOOK_S, limit - time.monotonic())))


def _look(queue: BlockingQueue) -> dict[str, int]:
    """Return what is left in the run; also who is there to end it."""
    info = queue.info()
    if info is None:
        raise CommandError(f"run {queue.run!r} was removed meanwhile", UNREACHABLE)
    if info.state not in _LIVE:
        raise CommandError(f"run {queue.run!r} is {info.state} by now", PROBLEM)
    if not info.draining:
        raise CommandError(f"run {queue.run!r}: somebody ended the drain (resume)", PROBLEM)
    depths = queue.depths()
    return {
        "queued": depths["q"] + depths["d"] + depths["s"],
        "running": depths["l"],
        "open": depths["live"] - depths["full"] - depths["ready"] - depths["delivered"],
        "full": depths["full"],
        "ready": depths["ready"],
        "delivered": depths["delivered"],
        "workers": queue.presence()["workers"],
    }


def _open(left: Mapping[str, int], *, trained: bool) -> int:
    """Return how many members and groups have to end still."""
    # A member that moves just now is found nowhere, its group is.
    rest = max(left["queued"] + left["running"], left["open"]) + left["full"]
    return rest + left["ready"] + left["delivered"] if trained else rest


def _left(left: Mapping[str, int]) -> str:
    said = (f"{left['queued']} members queued, {left['running']} running, "
            f"{left['full']} groups to judge, {left['ready']} ready, "
            f"{left['delivered']} in training")  # fmt: skip
    if not left["workers"] and left["queued"] + left["running"] + left["full"]:
        said += "; no worker is alive"
    return said


def _kept(left: Mapping[str, int]) -> str:
    return (f"no sample waits or runs; {left['ready']} groups wait for the trainer, "
            f"{left['delivered']} are in its hands")  # fmt: skip


# --- progress ------------------------------------------------------------------------------------
@contextlib.contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Tell]:
    """Yield what tells how far it is: a bar on a terminal, else a line now and then; on stderr."""
    if args.json or sys.stderr is None or not sys.stderr.isatty() or find_spec("rich") is None:
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("drain"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("drain", total=None, note="")

        def tell(done: int, total: int, words: str) -> None:
            bar.update(task, completed=done, total=total or None, note=words)

        yield tell


def _lines() -> Tell:
    told_mono_s = -LINE_S
    last = ""

    def tell(_done: int, _total: int, words: str) -> None:
        nonlocal told_mono_s, last
        now = time.monotonic()
        if words != last and now - told_mono_s >= LINE_S:
            told_mono_s, last = now, words
            say(f"drain: {cleaned(words)}")  # whether anybody reads it or not

    return tell
