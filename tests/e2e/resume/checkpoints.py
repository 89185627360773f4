"""What a trainer of this harness saves, and which of it survives.

Owns the files: a checkpoint is the stream's state together with the model, which here is the list
of the prompts that it was trained on. Never talks to Redis. Invariant: a file is whole or absent,
and is never written twice.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.frontier import TerminalIds


@dataclass(frozen=True)
class Checkpoint:
    """One save of one trainer process.

    `history`: group indexes in the order in which this model was trained on them, from the fresh
    model on.
    """

    generation: int
    """Which start of a trainer made it."""
    place: int
    """Which of that trainer's saves it is."""
    state: dict[str, Any]
    """What `state_dict()` returned."""
    history: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """File name; sorts by time of the trainer's start, then by time of the save."""
        return f"{self.generation:04d}-{self.place:04d}.json"

    def write(self, folder: Path) -> None:
        """Put it where it is whole or absent, as a trainer beside its weights would."""
        partial = self.partial(folder)
        partial.replace(folder / self.name)

    def partial(self, folder: Path) -> Path:
        """Write everything under a name that nobody reads; return its path."""
        path = folder / f"{self.name}.partial"
        path.write_text(json.dumps({"rollstream": self.state, "model": self.history}))
        return path


def read(path: Path) -> Checkpoint:
    """Return the checkpoint of a file."""
    data = json.loads(path.read_text())
    generation, place = path.stem.split("-")
    return Checkpoint(int(generation), int(place), data["rollstream"], data["model"])


@dataclass(frozen=True)
class Verdict:
    """How a history compares with what it should be."""

    trained_once: int
    skipped: frozenset[int]
    """Prompts that no training will ever see again."""
    twice: frozenset[int]
    """Prompts that the model learned from more than once, or will."""


def judge(checkpoint: Checkpoint, prompts: int) -> Verdict:
    """Judge the last checkpoint of a run that is over: every prompt once."""
    times = Counter(checkpoint.history)
    return Verdict(
        trained_once=sum(times[i] == 1 for i in range(prompts)),
        skipped=frozenset(i for i in range(prompts) if not times[i]),
        twice=frozenset(i for i, count in times.items() if count > 1 or not 0 <= i < prompts),
    )


def judge_midway(checkpoint: Checkpoint) -> Verdict:
    """Judge any checkpoint: the ids that its state counts as done are those its model has learned.

    One that is done and not learned is skipped by whoever goes on from here; one that is learned
    and not done is trained again.
    """
    times = Counter(checkpoint.history)
    terminal = TerminalIds.from_plain(checkpoint.state)
    done = {i for i in range(terminal.frontier + 8 * len(terminal.bitmap())) if i in terminal}
    return Verdict(
        trained_once=sum(count == 1 for count in times.values()),
        skipped=frozenset(done - set(times)),
        twice=frozenset(i for i, count in times.items() if count > 1 or i not in done),
    )
