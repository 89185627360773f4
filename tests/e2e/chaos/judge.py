"""The judgement: what became of every group, from records that no single part of the run wrote.

Owns the meaning of `lost` and `twice`. Never talks to anything. Invariant: a group counts as ended
only by evidence that still holds in the surviving history: trained in it, dropped and not undone
by a rewind since, or skipped by the harness at the end of the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.frontier import TerminalIds
from tests.e2e.chaos.journal import Life, ancestry, surviving
from tests.e2e.chaos.observer import Drop

FREE_REASONS = frozenset({"seen", "run_aborted"})
"""Drops that leave their id free to come again: they end a group, and explain nothing."""
FREE_DETAILS = ("beyond the window", "its record vanished", "its results vanished")
"""Of `withdrawn`: the queue's own, whose ids come again too."""


class History:
    """The checkpoints of the surviving history, as sets of ids.

    Lives that were abandoned do not count here: Redis was rewound to theirs too, but then to that
    of the surviving life that came after them.
    """

    def __init__(self, lives: dict[int, Life]) -> None:
        self._starts: list[tuple[float, TerminalIds]] = []
        """(right before a life connected, what it rewound the run to)"""
        self._saves: list[tuple[float, TerminalIds]] = []
        for life, last in ancestry(lives, max(lives)) if lives else []:
            if life.parent is not None and life.connected:
                state = lives[life.parent[0]].states[life.parent[1]]
                self._starts.append((life.started_unix_s, TerminalIds.from_plain(state)))
            for step, state in life.states.items():
                if last is None or step <= last:
                    saved = life.checkpointed_unix_s[step]
                    self._saves.append((saved, TerminalIds.from_plain(state)))

    def undoes(self, drop: Drop) -> bool:
        """Return whether a life connected after the drop with a checkpoint that lacks it."""
        return any(
            unix_s > drop.unix_s and drop.group not in terminal for unix_s, terminal in self._starts
        )

    def remembers(self, drop: Drop) -> bool:
        """Return whether a checkpoint held the id before the server forgot the drop."""
        until = drop.forgotten_unix_s
        return until is not None and any(
            drop.unix_s <= unix_s <= until and drop.group in terminal
            for unix_s, terminal in self._saves
        )


def lost_groups(
    num_rows: int,
    lives: dict[int, Life],
    drops: Iterable[Drop],
    skipped: frozenset[int],
) -> list[int]:
    """Return the groups of which nothing says how they ended.

    Args:
        num_rows: groups are 0..num_rows-1.
        lives: the trainers' journals.
        drops: everything that the observer saw.
        skipped: rows that the harness took out of the source at the end.
    """
    trained = frozenset(surviving(lives))
    history = History(lives)
    by_group: dict[int, list[Drop]] = defaultdict(list)
    for drop in drops:
        by_group[drop.group].append(drop)
    return [
        group
        for group in range(num_rows)
        if group not in trained
        and group not in skipped
        and not any(_explains(drop, history) for drop in by_group[group])
    ]


def _explains(drop: Drop, history: History) -> bool:
    if drop.reason in FREE_REASONS or drop.detail.startswith(FREE_DETAILS):
        return False
    if history.undoes(drop):
        return False
    return drop.forgotten_unix_s is None or history.remembers(drop)


def retaken(lives: Mapping[int, Life]) -> int:
    """Return how often a group was handed out to a trainer again."""
    taken: list[Any] = [group for life in lives.values() for group in life.taken]
    return len(taken) - len(set(taken))
