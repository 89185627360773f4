"""Which checkpoint the next trainer starts from, and which of them are one history.

Owns the list of checkpoints that survive: those of the line that the current trainer continues.
Never reads what is in them. Invariant: a trainer that starts from an older checkpoint abandons
the newer ones, and what a trainer writes after its successor was chosen does not count.
"""

from __future__ import annotations

import random
from enum import StrEnum
from pathlib import Path

from tests.e2e.resume.trainer import FRESH


class Choice(StrEnum):
    """Where the next trainer starts."""

    NEWEST = "newest"
    OLDER = "older"
    """Two or three saves back, or as far as there are."""
    FRESH = "fresh"
    """A model that has learned nothing, and no state."""
    ELSEWHERE = "elsewhere"
    """Any save of the run, of an abandoned line too."""


_WEIGHTS = {Choice.NEWEST: 50, Choice.OLDER: 35, Choice.FRESH: 7, Choice.ELSEWHERE: 8}


class Line:
    """The surviving saves, oldest first."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self._names: list[str] = []
        self._all: list[str] = []

    def add_saves_of(self, generation: int) -> None:
        """Take up what a trainer saved until now; later saves of it are a zombie's."""
        found = sorted(path.name for path in self._folder.glob(f"{generation:04d}-*.json"))
        new = [name for name in found if name not in self._all]
        self._names += new
        self._all += new

    @property
    def newest(self) -> str:
        """The last save of the line, or `fresh`."""
        return self._names[-1] if self._names else FRESH

    def draw(self) -> Choice:
        """Draw where to start while things break."""
        return self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]

    def go_to(self, choice: Choice) -> str:
        """Return the name to start from; what lies behind it in the line is abandoned."""
        if choice is Choice.ELSEWHERE and self._all:
            self._names = [self._rng.choice(self._all)]
        elif choice is Choice.FRESH:
            self._names = []
        elif choice is Choice.OLDER:
            back = self._rng.randint(1, 3)
            self._names = self._names[:-back]
        return self.newest
