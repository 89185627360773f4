"""The trainer's durable record, which is its checkpoint too, and the history that survives in it.

Owns the files `journal-<life>.jsonl` of one run: one per trainer process, appended and fsynced
line by line. Never asks Redis. Invariant: what a life did counts exactly as far as the checkpoint
that its successor started from; the rest is abandoned, as the weights of a real trainer would be.

A life is one process. Its first line names the checkpoint (life and step) that it starts from; a
line that a kill cut in half was never written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Place = tuple[int, int]
"""(life, step) of a checkpoint."""


class Journal:
    """The record that one life writes."""

    def __init__(self, folder: Path, life: int) -> None:
        before = read_lives(folder)
        self.life = life
        self.parent = last_checkpoint(before, life)
        self.state = None if self.parent is None else before[self.parent[0]].states[self.parent[1]]
        self._file: BinaryIO = (folder / f"journal-{life}.jsonl").open("ab")
        self._write({"life": life, "parent": self.parent})

    def connected(self) -> None:
        """This life is the run's trainer; the run was rewound to its checkpoint."""
        self._write({"connected": True})

    def taken(self, step: int, groups: list[int]) -> None:
        """A batch was handed out."""
        self._write({"taken": groups, "step": step})

    def trained(self, step: int, groups: list[int]) -> None:
        """A batch was trained on; durable before anybody is told."""
        self._write({"trained": groups, "step": step})

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Model and stream stand here; a later life may start from it."""
        self._write({"checkpoint": step, "state": state})

    def note(self, text: str) -> None:
        """Something for people."""
        self._write({"note": text})

    def ended(self) -> None:
        """The iteration ended normally: everything was trained."""
        self._write({"ended": True})

    def close(self) -> None:
        """Close the file; everything in it is on the disk already."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        line["unix_s"] = time.time()
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@dataclass
class Life:
    """What one trainer process did, as far as its journal says."""

    number: int
    parent: Place | None
    started_unix_s: float
    """Right before it connected."""
    connected: bool = False
    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    """(step, groups) of every batch that was trained on, in order."""
    taken: list[int] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step → `state_dict()` of every checkpoint."""
    checkpointed_unix_s: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: bool = False

    def until(self, step: int | None) -> list[int]:
        """Return the groups trained up to `step`, all where it is None."""
        return [g for at, groups in self.batches if step is None or at <= step for g in groups]


def read_lives(folder: Path) -> dict[int, Life]:
    """Return every life by its number."""
    lives: dict[int, Life] = {}
    for path in folder.glob("journal-*.jsonl"):
        life = _read_life(path)
        if life is not None:
            lives[life.number] = life
    return dict(sorted(lives.items()))


def _read_life(path: Path) -> Life | None:
    life: Life | None = None
    for raw in path.read_bytes().split(b"\n")[:-1]:
        line = json.loads(raw)
        if life is None:
            parent = line["parent"]
            place = None if parent is None else (parent[0], parent[1])
            life = Life(line["life"], place, line["unix_s"])
        elif "connected" in line:
            life.connected = True
        elif "taken" in line:
            life.taken += line["taken"]
        elif "trained" in line:
            life.batches.append((line["step"], line["trained"]))
        elif "checkpoint" in line:
            life.states[line["checkpoint"]] = line["state"]
            life.checkpointed_unix_s[line["checkpoint"]] = line["unix_s"]
        elif "note" in line:
            life.notes.append(line["note"])
        elif "ended" in line:
            life.ended = True
    return life


def last_checkpoint(lives: dict[int, Life], before: int) -> Place | None:
    """Return the newest checkpoint of a life below `before`."""
    for number in sorted((n for n in lives if n < before), reverse=True):
        if lives[number].states:
            return number, max(lives[number].states)
    return None


def ancestry(lives: dict[int, Life], number: int) -> list[tuple[Life, int | None]]:
    """Return the lives that one stands on, oldest first, each with the last step that counts."""
    chain: list[tuple[Life, int | None]] = []
    step: int | None = None
    at: int | None = number
    while at is not None:
        life = lives[at]
        chain.append((life, step))
        at, step = life.parent if life.parent is not None else (None, None)
    return chain[::-1]


def surviving(lives: dict[int, Life]) -> list[int]:
    """Return every group of the surviving history, in the order in which it was trained on."""
    if not lives:
        return []
    return [g for life, step in ancestry(lives, max(lives)) for g in life.until(step)]


def trained_twice(lives: dict[int, Life]) -> list[int]:
    """Return groups that some life trained on although its own history held them already.

    Abandoned lives are judged too: each must have kept the promise as long as it lived.
    """
    twice: list[int] = []
    for number in lives:
        chain = ancestry(lives, number)
        seen = {g for life, step in chain[:-1] for g in life.until(step)}
        for group in lives[number].until(None):
            if group in seen:
                twice.append(group)
            seen.add(group)
    return twice
