"""The trainer of the chaos run: a process of its own that may be killed at any instant.

    python -m tests.e2e.chaos.trainer --url … --run … --folder … --life N --engine URL …

Owns the loop: take, train, record, ack, checkpoint, push weights. Never judges itself: what it was
handed goes to a file for the auditor, what it did to its journal. Invariant: a batch is in the
journal (on the disk) before it is acked, and a checkpoint holds what was acked and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgpack

from examples.demo.trainer import toy_loss
from rollstream import Batch, ConsumerTaken, GroupStream, ProducerGone, StreamStalled
from rollstream.errors import StreamError
from rollstream.group import Trajectory
from rollstream.sample import Prompt
from rollstream.trainer.control import PauseMode
from rollstream.wire import encode_body
from tests.e2e.chaos.journal import Journal
from tests.e2e.chaos.options import GROUPS_A_BATCH, LEASE_S

CONNECT_S = 60.0
STALL_S = 30.0
STEP_S = 0.08
CHECKPOINT_EVERY = 2
UPDATE_EVERY = 8
LONG_PAUSE_EVERY = 4
"""Of the updates, one in so many takes longer than a lease."""
EXIT_STREAM, EXIT_TAKEN = 3, 5


@dataclass
class Trainer:
    """One life."""

    stream: GroupStream
    journal: Journal
    handed_out: BinaryIO
    """What came out, for the auditor."""
    engines: Sequence[str]
    step: int = 0
    updates: int = field(default=0)

    def run(self) -> None:
        """Train until the run is over."""
        # A life that died within an update left the run paused.
        self.stream.resume()
        while True:
            try:
                for batch in self.stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
                    self.learn(batch)
                break
            except (StreamStalled, ProducerGone) as error:
                # Resumable, as their messages say; the judge reads the notes.
                self.journal.note(f"{type(error).__name__}: {error}")
        self.save()
        self.journal.ended()

    def learn(self, batch: Batch) -> None:
        """Do one step."""
        self.step += 1
        groups = batch.group_indexes
        self.journal.taken(self.step, groups)
        for group in batch.groups:
            record = [
                [prompt_of(trajectory), encode_body(trajectory)] for trajectory in group.samples
            ]
            self.handed_out.write(msgpack.packb([group.group_index, record]))
        self.handed_out.flush()
        toy_loss(batch.to_arrays(pad_id=0))
        time.sleep(STEP_S)
        self.journal.trained(self.step, groups)
        batch.ack()
        if self.step % CHECKPOINT_EVERY == 0:
            self.save()
        if self.step % UPDATE_EVERY == 0:
            self.update_weights()

    def save(self) -> None:
        """Write a checkpoint; the model is this life's journal."""
        self.journal.checkpoint(self.step, self.stream.state_dict())

    def update_weights(self) -> None:
        """Pause, push to every engine, raise the version, go on."""
        self.updates += 1
        mode: PauseMode = "abort" if self.updates % 3 == 0 else "keep"
        version = self.stream.version + 1
        self.stream.pause(mode)
        body = json.dumps({"new_version": str(version), "abort_all_requests": mode == "abort"})
        for url in self.engines:
            push(url, body.encode())
        if self.updates % LONG_PAUSE_EVERY == 0:
            time.sleep(1.5 * LEASE_S)
        self.stream.set_weight_version(version)
        self.stream.resume()


def prompt_of(trajectory: Trajectory) -> Prompt:
    """Return what a trajectory says that it was asked."""
    return trajectory[0].prompt if isinstance(trajectory, list) else trajectory.prompt


def push(engine: str, body: bytes) -> None:
    """Tell one engine its new version; one that is dead or frozen is left behind."""
    request = urllib.request.Request(
        f"{engine}/update_weight_version", data=body, headers={"content-type": "application/json"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=1.0):
        pass


def main(arguments: Sequence[str]) -> int:
    """Live one life; 0 where the run came to its end, 3 without Redis, 5 where taken over."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos.trainer")
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--engine", action="append", default=[])
    given = parser.parse_args(arguments)
    with contextlib.closing(Journal(given.folder, given.life)) as journal:
        try:
            live(journal, given)
        except ConsumerTaken as error:
            journal.note(f"ConsumerTaken: {error}")
            return EXIT_TAKEN
        except StreamError as error:
            journal.note(f"{type(error).__name__}: {error}")
            return EXIT_STREAM
    return 0


def live(journal: Journal, given: argparse.Namespace) -> None:
    """Connect where the journal stands, and train."""
    with (
        (given.folder / f"handed-out-{given.life}.bin").open("ab") as handed_out,
        GroupStream.connect(
            given.url, run=given.run, state=journal.state, connect_timeout_s=CONNECT_S
        ) as stream,
    ):
        journal.connected()
        step = 0 if journal.parent is None else journal.parent[1]
        trainer = Trainer(stream, journal, handed_out, given.engine, step=step)
        if journal.parent is None:
            trainer.save()  # or a second life would take for trained what nobody trained
        trainer.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
