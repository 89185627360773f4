"""Small builders of what `top` sees: snapshots of a run that is well, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollstream.cli.top.snapshot import Snapshot, Spans
from rollstream.updates.confirmed import EngineView

INTERVAL_S = 2.0
DEPTHS = {"q": 0, "d": 0, "s": 0, "l": 64, "full": 0, "ready": 2, "delivered": 8, "live": 60}


def an_engine(state: str = "up", *, url: str = "http://e:1", version: int = 3) -> EngineView:
    """Return an engine as every worker sees it."""
    view = EngineView(url, "sglang", version=version)
    view.states[state] += 2
    return view


def some_spans(
    *, generate: float = 4.0, tool: float = 0.0, reward: float = 0.1, tokens: int = 400
) -> Spans:
    """Return where the time of four samples went; by default at 100 tokens/s."""
    seconds = {"generate": generate, "tool": tool, "reward": reward}
    return Spans("7", 4, seconds, tokens)


def a_look(at_s: float = 0.0, **changes: Any) -> Snapshot:
    """Return a run that is well: its trainer is busy, its engine is up, nothing waits."""
    depths: Mapping[str, int] = changes.pop("depths", {})
    known: dict[str, Any] = {
        "mono_s": at_s, "run": "r", "state": "running", "version": 3, "capacity": 64,
        "workers": 2, "producers": 1, "aggregators": 1, "in_flight": 60,
        "engines": (an_engine(),), "trainer_connects": 1, "trainer": "here",
        "counters": {"acked": 100, "completed": 400}, "round_trip_ms": 0.4,
        "spans": some_spans(),
    }  # fmt: skip
    return Snapshot(**(known | {"depths": {**DEPTHS, **depths}} | changes))


def looks(count: int = 10, *, each: Any = None, **changes: Any) -> list[Snapshot]:
    """Return looks two seconds apart; the counters in `each` rise by so much a look."""
    counters = changes.pop("counters", {"acked": 100, "completed": 400})
    found: list[Snapshot] = []
    for j in range(count):
        risen = {name: int(counters.get(name, 0) + j * step) for name, step in (each or {}).items()}
        found.append(a_look(j * INTERVAL_S, counters={**counters, **risen}, **changes))
    return found
