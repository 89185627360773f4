"""A trainer that checkpoints, as a process of its own: `python -m tests.e2e.resume.trainer JSON`.

Owns the loop that a user's trainer has: connect with the checkpoint's state, train, ack, save state
and model together. Never knows what is done to the processes around it. Invariant: what its model
has learned is lost with it, but for what the last checkpoint holds.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollstream import GroupStream
from rollstream.batch import Batch
from rollstream.errors import ConsumerTaken, StreamError
from tests.e2e.resume.checkpoints import Checkpoint, read
from tests.e2e.resume.fates import Fate, Point
from tests.e2e.resume.journal import Journal

EXIT_TAKEN, EXIT_STREAM = 3, 4
CONNECT_S = 30.0
STALL_S = 30.0
FRESH = "fresh"


@dataclass(frozen=True)
class Task:
    """What one trainer process is told."""

    url: str
    run: str
    folder: str
    """Of the checkpoints and the journal."""
    generation: int
    start: str
    """Name of the checkpoint to start from, or `fresh`."""
    groups: int
    """Groups a batch."""
    save_every: int
    """Batches."""
    step_s: float
    """How long the model takes to learn from a batch."""
    fate: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Return what the process reads from its command line."""
        return json.dumps(asdict(self))


@dataclass
class Trainer:
    """One process: a model (a list of what it learned), a stream, and a fate."""

    task: Task
    journal: Journal
    history: list[int] = field(default_factory=list)
    saves: int = 0

    def __post_init__(self) -> None:
        """Load the checkpoint."""
        self.folder = Path(self.task.folder)
        self.fate = None if self.task.fate is None else Fate.from_plain(self.task.fate)
        self.state: Any = FRESH
        if self.task.start != FRESH:
            checkpoint = read(self.folder / self.task.start)
            self.state, self.history = checkpoint.state, checkpoint.history

    def meet(self, point: Point) -> None:
        """Pass a point of the loop."""
        if self.fate is not None:
            self.fate.meet(point)

    def run(self) -> None:
        """Train until the run is over.

        Raises:
            StreamError: it ended otherwise.
        """
        with GroupStream.connect(
            self.task.url, run=self.task.run, state=self.state, connect_timeout_s=CONNECT_S
        ) as stream:
            self.journal.note("connected", start=self.task.start, version=stream.version)
            self.meet(Point.CONNECTED)
            for batch in stream.batches(groups=self.task.groups, timeout_s=STALL_S):
                self.step(stream, batch)
                if batch.number % self.task.save_every == 0:
                    self.save(stream)
            self.save(stream)

    def step(self, stream: GroupStream, batch: Batch) -> None:
        """Learn from a batch, ack it, and publish the new weights."""
        self.meet(Point.HANDED_OUT)
        time.sleep(self.task.step_s)
        self.history += batch.group_indexes
        self.meet(Point.TRAINED)
        sent = time.monotonic()
        batch.ack()
        self.journal.note("acked", sent_mono_s=sent, groups=batch.group_indexes)
        self.meet(Point.ACKED)
        stream.set_weight_version(stream.version + 1)

    def save(self, stream: GroupStream) -> None:
        """Save stream and model in one step."""
        checkpoint = Checkpoint(
            self.task.generation, self.saves, stream.state_dict(), list(self.history)
        )
        self.saves += 1
        self.meet(Point.STATE_TAKEN)
        checkpoint.partial(self.folder)
        self.meet(Point.WRITTEN)
        checkpoint.write(self.folder)
        self.journal.note("saved", name=checkpoint.name, learned=len(self.history))
        self.meet(Point.SAVED)


_EVENTS = {"rewound": "rewound", "redis lost what it knew: asserting again": "told_again"}
"""What the stream logs of its claim, by what the journal calls it."""


class _Listener(logging.Handler):
    """Notes what the stream logs of its claim."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        event = _EVENTS.get(record.getMessage())
        if event is not None:
            self._journal.note(event)


def main() -> int:
    """Run one trainer; return its exit code."""
    task = Task(**json.loads(sys.argv[1]))
    journal = Journal(Path(task.folder) / "journal.jsonl", task.generation)
    logging.basicConfig(level=logging.INFO, handlers=[_Listener(journal), logging.StreamHandler()])
    try:
        Trainer(task, journal).run()
    except ConsumerTaken:
        journal.note("ended", how="ConsumerTaken")
        return EXIT_TAKEN
    except StreamError as error:
        journal.note("ended", how=type(error).__name__, message=str(error))
        return EXIT_STREAM
    journal.note("ended", how="over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
