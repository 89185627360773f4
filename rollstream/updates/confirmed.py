"""What the workers of a run confirmed: who obeys a control word, and what they say of engines.

Owns the judgement over a list of `Confirmation`. Never does I/O. Invariant: only workers that live
count, those that were seen within a lease; what a worker wrote is data, and may be anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream.plain import BEYOND_INT64

if TYPE_CHECKING:
    from rollstream.queue.reads import Confirmation

MAX_URL_CHARS = 2048
MAX_PROBLEM_CHARS = 200
MAX_SHOWN = 8
"""Workers or engines that one message names."""
_AWAY = frozenset({"down", "refused"})
"""States in which an engine is not one to give weights to."""


@dataclass(slots=True)
class EngineView:
    """One engine, as all live workers see it together."""

    url: str
    kind: str = ""
    states: Counter[str] = field(default_factory=Counter)
    """State → how many workers say so."""
    version: int | None = None
    """The newest weight version that anybody read at it; None where nobody knows."""
    in_flight: int = 0
    """Calls of all workers together."""
    problem: str = ""
    """Why it is of no use, as the first worker says that finds one."""

    @property
    def state(self) -> str:
        """`up` where anybody may call it, else what most workers say."""
        if self.states["up"]:
            return "up"
        return self.states.most_common(1)[0][0] if self.states else "unknown"


def live(confirmations: Iterable[Confirmation], lease_s: float) -> list[Confirmation]:
    """Return those of workers that were seen within a lease."""
    return [one for one in confirmations if one.age_s <= lease_s]


def disobedient(
    alive: Iterable[Confirmation], control_seq: int, *, idle: bool
) -> list[Confirmation]:
    """Return who did not confirm the control word yet, or still has calls where none may be."""
    return [one for one in alive if one.control_seq < control_seq or (idle and one.in_flight > 0)]


def not_confirmed(
    missing: Sequence[Confirmation], control_seq: int, *, mode: str, waited_s: float
) -> str:
    """Return a sentence on the workers that did not obey a pause in time."""
    said = [
        f"{plain(one.worker)} (heard of {one.control_seq} of {control_seq} control words)"
        if one.control_seq < control_seq
        else f"{plain(one.worker)} ({one.in_flight} calls in flight)"
        for one in missing[:MAX_SHOWN]
    ]
    if len(missing) > MAX_SHOWN:
        said.append(f"{len(missing) - MAX_SHOWN} more")
    return (
        f"the pause ({mode}) was not confirmed within {waited_s:g} s by {', '.join(said)}. Look at "
        "their logs, and at whether their engines answer; a worker that is dead stops counting one "
        "lease after its last beat"
    )


def engine_views(alive: Iterable[Confirmation]) -> list[EngineView]:
    """Return the engines that these workers know, by URL."""
    views: dict[str, EngineView] = {}
    for one in alive:
        for row in one.engine_states():
            url = row.get("url")
            if not isinstance(url, str) or not 0 < len(url) <= MAX_URL_CHARS:
                continue
            if not url.isprintable():  # no URL that is one: it would write on a terminal
                continue
            view = views.setdefault(url, EngineView(url))
            view.states[_text(row.get("state"))] += 1
            view.kind = view.kind or _text(row.get("kind"))
            view.problem = view.problem or _problem(row.get("problem"))
            view.in_flight += _count(row.get("in_flight")) or 0
            version = _count(row.get("version"))
            if version is not None and (view.version is None or version > view.version):
                view.version = version
    return sorted(views.values(), key=lambda view: view.url)


def reachable(views: Sequence[EngineView]) -> list[str]:
    """Return the engines to give new weights to: all but those that every worker finds away.

    Where that leaves none, it is all of them: workers that find every engine away know nothing.
    """
    there = [view.url for view in views if not _AWAY.issuperset(view.states)]
    return there or [view.url for view in views]


def hindrances(views: Sequence[EngineView], version: int) -> str:
    """Return a sentence on engines that take no calls, empty where all do.

    Args:
        views: the engines.
        version: of the run's weights.
    """
    idle = [view for view in views if view.state != "up"]
    if not idle:
        return ""
    said = [_hindrance(view, version) for view in idle[:MAX_SHOWN]]
    if len(idle) > MAX_SHOWN:
        said.append(f"{len(idle) - MAX_SHOWN} more")
    return f"{len(idle)} of {len(views)} engines take no calls: {', '.join(said)}"


def _hindrance(view: EngineView, version: int) -> str:
    if view.state != "behind":
        return f"{view.url} is {view.state}" + (f" ({view.problem})" if view.problem else "")
    has = "unknown weights" if view.version is None else f"version {view.version}"
    return f"{view.url} is behind ({has}, the run has {version})"


def _text(value: Any) -> str:
    return plain(value[:40]) if isinstance(value, str) else "unknown"


def _problem(value: Any) -> str:
    return plain(value[:MAX_PROBLEM_CHARS]) if isinstance(value, str) else ""


def plain(text: str) -> str:
    """Return it without control characters, so that it cannot write on a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < BEYOND_INT64
    return value if is_count else None
