"""What every trainer of a run did, in one file that all of them append to.

Owns the lines: each is one event with a clock that all processes of a machine share. Never read by
a trainer: the checkpoint alone tells a trainer where it is. Invariant: a line is one write.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """The writing end of one trainer."""

    def __init__(self, path: Path, generation: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._generation = generation

    def note(self, event: str, **details: Any) -> None:
        """Append an event."""
        line = {"mono_s": time.monotonic(), "generation": self._generation, "event": event}
        os.write(self._file, json.dumps(line | details).encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every event, oldest first; a line that a death cut short is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


@dataclass
class Account:
    """What the journal of a whole run adds up to."""

    trained: int = 0
    """Groups that were acked, in all histories together."""
    rewinds: int = 0
    rollbacks: int = 0
    """How often a living trainer found that Redis had forgotten something, and told it again."""
    taken: int = 0
    """Trainers that learned that a later one is connected."""
    zombie_acks: int = 0
    """Acks that were sent after a later trainer had connected, and that Redis took."""
    errors: dict[str, int] = field(default_factory=dict)


def account(path: Path) -> Account:
    """Add a journal up."""
    found = Account()
    connected: dict[int, float] = {}
    for line in lines(path):
        event, generation = line["event"], line["generation"]
        if event == "connected":
            connected[generation] = line["mono_s"]
        elif event == "rewound":
            found.rewinds += 1
        elif event == "told_again":
            found.rollbacks += 1
        elif event == "acked":
            found.trained += len(line["groups"])
            # By connects, not by starts: one that froze before it connected is the latest then.
            own = connected.get(generation, 0.0)
            found.zombie_acks += any(own < at < line["sent_mono_s"] for at in connected.values())
        elif event == "ended":
            found.taken += line["how"] == "ConsumerTaken"
            if line["how"] not in ("over", "ConsumerTaken"):
                found.errors[line["how"]] = found.errors.get(line["how"], 0) + 1
    return found
