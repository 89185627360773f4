"""What a person sees while prompts go out: a bar on a terminal, a line now and then elsewhere.

Owns the drawing. Never asks Redis more than once a second, and never fails the producer: what it
cannot read it does not show. Invariant: the bar counts group indexes that are behind the scan, so
after a restart it begins where the run is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from rollstream.link import OUTAGE
from rollstream.queue.queue import Queue

from .gate import Gate

BAR_S = 1.0
LINE_S = 5.0
log = structlog.get_logger("producer")


@contextmanager
def bar(total: int) -> Iterator[Any]:
    """Draw a bar on stderr; logs written meanwhile go above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        progress.add_task("groups", total=total, note="")
        yield progress


async def follow(gate: Gate, queue: Queue, capacity: int, drawn: Any | None) -> None:
    """Keep the bar up to date, or log a line every few seconds; for ever."""
    try:
        while True:
            await asyncio.sleep(LINE_S if drawn is None else BAR_S)
            try:
                shown = await _numbers(queue, capacity)
            except OUTAGE:
                continue  # the gate says that Redis is away
            standing = gate.standing
            if drawn is None:
                log.info(
                    "producing",
                    position=standing.position,
                    total=standing.total,
                    waiting_for=standing.waiting_for,
                    **shown,
                )
            else:
                note = _note(standing.waiting_for, shown)
                drawn.update(0, completed=standing.position, note=note)
    finally:
        if drawn is not None:
            drawn.update(0, completed=gate.standing.position)


async def _numbers(queue: Queue, capacity: int) -> dict[str, int]:
    depths, counters = await queue.depths(), await queue.counters()
    return {
        "live": depths.get("live", 0),
        "capacity": capacity,
        "acked": counters.get("acked", 0),
        "dropped": sum(n for name, n in counters.items() if name.startswith("dropped:")),
    }


def _note(waiting_for: str, shown: dict[str, int]) -> str:
    note = (
        f"live {shown['live']}/{shown['capacity']} · "
        f"acked {shown['acked']} · dropped {shown['dropped']}"
    )
    return f"{note} · {_WAITING[waiting_for]}" if waiting_for else note


_WAITING = {
    "capacity": "waiting for room",
    "drain": "an operator drains the run (rollstream resume ends it)",
    "memory": "the memory of Redis is full",
    "window": "waiting for the oldest group",
    "rewind": "all enqueued; stays for rewinds (Ctrl-C ends it)",
}
