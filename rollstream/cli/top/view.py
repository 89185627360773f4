"""`top` on a terminal: the record of `figures.py` as a small page, drawn anew at every look.

Owns the layout and the colours; the only module of `top` that needs rich. Never decides anything.
Invariant: it fits any width from 40 columns on, in one column where two do not fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollstream.cli.top.figures import counts, shown_rate, state_of
from rollstream.health import megabytes

WIDE = 84
"""Columns from which sections stand side by side."""
NAME_WIDTH = 12
BAR = 24
GOOD, BAD, DIM = "green", "bold red", "dim"
_CALM = frozenset({"nothing"})
_WAITING_TO_END = frozenset({"draining", "producer_out_of_prompts", "run_over", "paused"})
_SPAN_STYLES = {"generate": "green", "tool": "yellow", "reward": "magenta", "merge": "blue",
                "submit": "cyan", "queue_wait": "bright_black"}  # fmt: skip
Row = tuple[str, Text]


class Page:
    """One record, as rich draws it."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Draw `record`, which may be one that says why nothing could be read."""
        self._record = record

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        record = self._record
        yield _title(record)
        yield _verdict(record)
        if "version" not in record:
            return
        left = Group(*(_section(*part) for part in _left(record)))
        right = Group(*(_section(*part) for part in _right(record)))
        if options.max_width < WIDE:
            yield left
            yield right
            return
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(left, right)
        yield grid


def _title(record: Mapping[str, Any]) -> Text:
    title = Text(f"run {record['run']}", style="bold")
    state = state_of(record)
    title.append(f"  {state}", style=GOOD if state == "running" else "bold yellow")
    if "version" in record:
        title.append(f"  weight version {record['version']}", style=DIM)
    at = time.strftime("%H:%M:%S", time.localtime(record["unix_s"]))
    title.append(f"  {at}", style=DIM)
    return title


def _verdict(record: Mapping[str, Any]) -> Panel:
    cause = record["cause"]
    style = GOOD if cause in _CALM else "yellow" if cause in _WAITING_TO_END else BAD
    said = Text(cause, style=style)
    said.append(f"  {record['evidence']}", style="default")
    if record["do"]:
        said.append(f"\n→ {record['do']}", style="default")
    return Panel(said, title="what holds it up", title_align="left", border_style=style,
                 padding=(0, 1))  # fmt: skip


def _section(title: str, rows: list[Row]) -> Group:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=NAME_WIDTH, style=DIM)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return Group(Text(), Text(title, style="bold cyan"), table)


# --- what is where -------------------------------------------------------------------------------
def _left(record: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    groups, members = record["groups"], record["members"]
    flow = [
        ("groups/min", Text(shown_rate(record["groups_per_min"]))),
        ("trained/min", Text(shown_rate(record["acked_per_min"]))),
        ("samples/min", Text(shown_rate(record["samples_per_min"]))),
        ("capacity", _capacity(record)),
        ("trainer", Text(record["trainer"], style="yellow" if _is_idle(record) else "")),
    ]
    where = [
        ("open", Text(str(groups["open"]))),
        ("to judge", Text(f"{groups['full']}{_age(record, 'full')}")),
        ("ready", Text(f"{groups['ready']}{_age(record, 'ready')}")),
        ("in training", Text(f"{groups['delivered']}{_age(record, 'delivered')}")),
    ]
    inside = [
        ("queued", Text(f"{members['queued']}{_age(record, 'queued')}")),
        ("running", Text(str(members["leased"]))),
        ("set back", Text(f"{members['delayed']} delayed, {members['suspect']} suspect")),
    ]
    return [("flow", flow), ("groups", where), ("members", inside)]


def _right(record: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    alive, redis = record["alive"], record["redis"]
    leased = record["members"]["leased"]
    memory = "unknown" if redis["used_memory"] is None else megabytes(redis["used_memory"])
    limit = f" of {megabytes(redis['max_memory'])}" if redis["max_memory"] else ""
    who = [
        ("workers", _alive(alive["workers"])),
        ("calls", Text(f"{record['calls_in_flight']} at engines, {leased} members run")),
        ("engines", _engines(record["engines"])),
        ("producers", _alive(alive["producers"])),
        ("redis", Text(f"{redis['round_trip_ms']:.1f} ms, {memory}{limit}")),
    ]
    ended = record["ended"]
    reasons = [
        ("acked", Text(str(ended["acked"]))),
        ("dropped", Text(counts(ended["dropped"]))),
        ("failed", Text(counts(record["failed"]))),
        ("sent back", Text(counts(record["sent_back"]))),
    ]
    sections = [("who", who), (f"last {record['window_s']:.0f} s", reasons)]
    if record["newest_group"] is not None:
        name = record["newest_group"]["group"]
        sections.append((f"a sample of group {name}", _spans(record)))
    return sections


def _capacity(record: Mapping[str, Any]) -> Text:
    live, capacity = record["groups"]["live"], record["capacity"]
    filled = min(BAR, round(BAR * live / capacity)) if capacity else 0
    bar = Text("█" * filled, style="cyan")
    bar.append("░" * (BAR - filled), style=DIM)
    full = "  full" if record["producer_blocked"] else ""
    return bar.append(f" {live}/{capacity}{full}", style="default")


def _is_idle(record: Mapping[str, Any]) -> bool:
    return bool(record["trainer"] != "here")


def _age(record: Mapping[str, Any], queue: str) -> str:
    age = record["oldest_s"].get(queue, 0.0)
    return f", oldest {age:.0f} s" if age >= 1 else ""


def _alive(count: int) -> Text:
    return Text(str(count), style="" if count else BAD)


def _engines(states: Mapping[str, int]) -> Text:
    return Text(counts(states), style="" if states.get("up") else BAD)


def _spans(record: Mapping[str, Any]) -> list[Row]:
    newest = record["newest_group"]
    seconds: Mapping[str, float] = newest["seconds"]
    longest = max(seconds.values(), default=0.0) or 1.0
    rows: list[Row] = []
    for name, took in seconds.items():
        bar = Text("█" * round(BAR * took / longest), style=_SPAN_STYLES.get(name, ""))
        gap = " " if bar else ""
        rows.append((name, bar.append(f"{gap}{took / newest['samples']:.2f} s", style="default")))
    if newest["tokens_per_s"] is not None:
        rows.append(("speed", Text(f"{newest['tokens_per_s']:.0f} tokens/s a sample")))
    return rows
