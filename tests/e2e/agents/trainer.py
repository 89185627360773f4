"""The trainer of the proof: takes, writes down, acks.

Owns the loop, in a thread: the main thread is the one that may start processes. Never judges.
Invariant: a batch is in the record before it is acked.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rollstream import GroupStream
from rollstream.group import FinishedGroup
from tests.e2e.agents.record import HandedGroup, HandedMember, Record
from tests.e2e.agents.scenes import GROUPS_A_BATCH, STALL_S

CONNECT_S = 60.0


@dataclass(eq=False)
class Trainer:
    """Trains until the run is over."""

    url: str
    record: Record
    error: BaseException | None = None
    groups: int = 0

    def start(self) -> threading.Thread:
        """Start the thread."""
        thread = threading.Thread(target=self.run, name="trainer", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Train; whatever goes wrong is kept in `error` for the main thread."""
        try:
            with GroupStream.connect(
                self.url, run=self.record.scene.name, state="fresh", connect_timeout_s=CONNECT_S
            ) as stream:
                for batch in stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
                    self.record.handed += [handed(group) for group in batch.groups]
                    self.groups += len(batch.groups)
                    batch.ack()
                    self.record.acked += [str(index) for index in batch.group_indexes]
        except Exception as error:  # noqa: BLE001 - a thread's runner: the main thread reports it
            self.error = error


def handed(group: FinishedGroup) -> HandedGroup:
    """Return a group as it came."""
    members = []
    for one in group.samples:
        samples = one if isinstance(one, list) else [one]
        members.append(HandedMember(samples[0].member, samples, isinstance(one, list)))
    missing = [f"{one.member}: {one.reason} {one.error}" for one in group.missing]
    return HandedGroup(str(group.group_index), members, missing)
