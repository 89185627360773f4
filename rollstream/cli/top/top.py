"""`rollstream top`: looks at a run again and again, and says what holds it up.

Owns the rhythm and the choice of a form: a page on a terminal, a line a look elsewhere, a JSON
object a line with `--json`. Never writes to a run. Invariant: nothing that happens to Redis or to
the run ends it but the end of its looks, an interrupt, or a reader that went away; a run that was
not there at the start is exit code 3, as for every command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import FrameType
from typing import Any

from rollstream.cli.exits import OK
from rollstream.cli.reach import DAMAGE, the_run
from rollstream.cli.top.diagnosis import diagnose, gone, unreachable, unreadable
from rollstream.cli.top.figures import figures, line, unread
from rollstream.cli.top.reading import Reader
from rollstream.cli.top.snapshot import Snapshot, Window
from rollstream.runs import OUTAGES, REFUSALS

WINDOW_S = 60.0
"""How far back rates and reasons go."""
FIRST_S = 1.0
"""Between the first two looks at most: one look has no rates."""
Record = dict[str, Any]
Show = Callable[[Record], None]


def top(args: argparse.Namespace) -> int:
    """Show a run, `--count` times or for ever."""
    count = 1 if args.once else args.count
    with the_run(args) as (queue, _), _shown(args) as show:
        reader = Reader(queue, args.timeout_s)
        watch = Watch(reader, queue.run)
        shown = 0
        watch.look()
        pause_s = min(FIRST_S, args.interval_s)
        while count is None or shown < count:
            reader.wait(pause_s)
            show(watch.look())
            shown += 1
            pause_s = args.interval_s
    return OK


class Watch:
    """The looks of the last minute, and what they say."""

    def __init__(self, reader: Reader, run: str) -> None:
        """Begin with no look."""
        self._reader, self._run = reader, run
        self._looks: deque[Snapshot] = deque()
        self._was_read = False

    def look(self) -> Record:
        """Read the run once more, and return the record of it.

        Raises:
            ResponseError, LookupError, ValueError, RunMismatch: it cannot be read, and never could.
        """
        try:
            snapshot = self._reader.take()
        except (*OUTAGES, *REFUSALS, *DAMAGE) as error:
            # Some of either kind is a ConnectionError or a ResponseError for redis-py.
            if isinstance(error, OUTAGES) and not isinstance(error, REFUSALS):
                return unread(self._run, "unreachable", unreachable(_one_line(error)))
            if not self._was_read:
                raise
            return unread(self._run, "unreadable", unreadable(_one_line(error)))
        if snapshot is None:
            self._looks.clear()
            return unread(self._run, "gone", gone())
        self._was_read = True
        self._looks.append(snapshot)
        while snapshot.mono_s - self._looks[0].mono_s > WINDOW_S:
            self._looks.popleft()
        window = Window(tuple(self._looks))
        return figures(window, diagnose(window.looks))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


# --- forms ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def _shown(args: argparse.Namespace) -> Iterator[Show]:
    """Yield what shows a record."""
    if args.json:
        yield _print_json
    elif (
        sys.stdout is None
        or not sys.stdout.isatty()
        or os.environ.get("TERM") == "dumb"
        or find_spec("rich") is None
    ):
        yield _print_line
    else:
        with _page() as show:
            yield show


def _print_json(record: Record) -> None:
    print(json.dumps(record), flush=True)


def _print_line(record: Record) -> None:
    print(line(record), flush=True)


@contextlib.contextmanager
def _page() -> Iterator[Show]:
    """Draw a page that changes in place; whatever ends it, the terminal has its cursor again."""
    from rich.console import Console
    from rich.live import Live

    from rollstream.cli.top.view import Page

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            yield lambda record: live.update(Page(record), refresh=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
