"""What a person sees while the demo runs: a live table on a terminal, plain lines elsewhere.

Owns the drawing. Never computes a figure, never changes anything. Invariant: with `--json` nothing
but the one line reaches stdout.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

LINE_EVERY_S = 4.0


@dataclass(frozen=True)
class Moment:
    """What is shown of one moment."""

    seconds: float
    batches: int
    wanted: int
    acked: int
    dropped: dict[str, int]
    samples: int
    samples_per_s: float
    version: int
    loss: float
    depths: dict[str, int]
    workers: dict[str, str]
    """{name: what it does}."""
    calls_audited: int
    mismatches: int
    kills: int


@dataclass
class Show:
    """Draws moments; a context manager."""

    title: str
    json: bool
    _console: Console = field(init=False)
    _live: Live | None = field(init=False, default=None)
    _next_line: float = 0.0

    def __post_init__(self) -> None:
        """Choose where to draw: stdout belongs to the JSON line where there is one."""
        self._console = Console(file=sys.stderr if self.json else sys.stdout, highlight=False)

    def __enter__(self) -> Self:
        self.say(self.title)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self, moment: Moment) -> None:
        """Draw the table anew, or print a line every few seconds."""
        if self._live is not None:
            self._live.update(table(moment))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self.say(line(moment))


def line(m: Moment) -> str:
    """Return a moment as one line."""
    dropped = sum(m.dropped.values())
    kills = f", {m.kills} killed" if m.kills else ""
    return (
        f"{m.seconds:5.1f} s  batch {m.batches}/{m.wanted}  groups {m.acked} acked, "
        f"{dropped} dropped, {m.depths.get('live', 0)} live  {m.samples_per_s:.0f} samples/s  "
        f"version {m.version}  audited {m.calls_audited} calls, {m.mismatches} wrong{kills}"
    )


def table(m: Moment) -> Table:
    """Return a moment as a table."""
    grid = Table(title=f"{m.seconds:.0f} s", title_justify="left", show_header=False, box=None)
    grid.add_column(style="dim")
    grid.add_column()
    drops = ", ".join(f"{count} {reason}" for reason, count in m.dropped.items()) or "none"
    d = m.depths
    rows = {
        "batches": f"{m.batches} of at least {m.wanted}"
        + (f", loss {m.loss:+.3f}, weight version {m.version}" if m.batches else ""),
        "groups": f"{m.acked} acked, {d.get('live', 0)} live; dropped: {drops}",
        "samples": f"{m.samples} trained, {m.samples_per_s:.0f}/s",
        "members": f"{d.get('q', 0)} queued, {d.get('l', 0)} leased, "
        f"{d.get('d', 0)} delayed, {d.get('s', 0)} suspect",
        "audit": f"{m.calls_audited} calls, {m.mismatches} wrong",
        **m.workers,
    }
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid
