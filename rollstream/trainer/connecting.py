"""How a trainer becomes the trainer of a run.

Owns the order: the run is there, the checkpoint and the dump are this run's, then the claim. Never
hands out groups. Invariant: what is refused is refused before the run is claimed, so a mistake of
one trainer never stops another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollstream.evaluation.evaluate import withdraw_all
from rollstream.frontier import TerminalIds
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo
from rollstream.runs import await_run, say_problems
from rollstream.trainer.checkpoint import FRESH, Checkpoint
from rollstream.trainer.hold import Hold
from rollstream.urls import redis_url_problem

if TYPE_CHECKING:
    from rollstream.dump.tee import Tee


@dataclass(frozen=True, slots=True)
class Connecting:
    """What `GroupStream.connect` was given, but for the state."""

    url: str
    run: str
    connect_timeout_s: float
    ca: str | None
    text: bool
    dump_dir: str | os.PathLike[str] | None

    def open_queue(self) -> BlockingQueue:
        """Return a queue of the run, connected at its first call."""
        one_s = max(0.1, min(5.0, self.connect_timeout_s))
        return BlockingQueue.connect(self.url, self.run, ca=self.ca, connect_timeout_s=one_s)

    def open_tee(self, info: RunInfo) -> Tee | None:
        """Return what writes batches beside the training, where that is wished."""
        if self.dump_dir is None:
            return None
        from rollstream.dump.tee import open_tee

        return open_tee(self.dump_dir, info)


def open_hold(
    how: Connecting,
    state: Mapping[str, Any] | Literal["fresh"] | None,
    interrupt: threading.Event,
) -> tuple[Hold, Tee | None]:
    """Connect, and claim the run; raises as `GroupStream.connect` does."""
    if problem := redis_url_problem(how.url):
        raise ValueError(f"url: expected {problem}")
    checkpoint = None if state is None or state == FRESH else Checkpoint.from_plain(state)
    queue, tee, patience_s = how.open_queue(), None, how.connect_timeout_s
    try:
        info = await_run(queue, how.url, patience_s, interrupt)
        if checkpoint is not None:
            checkpoint.refuse_dump_epochs()
            checkpoint.check_belongs_to(how.run, info.fingerprint)
        say_problems(queue)
        hold = Hold(
            queue, info, url=how.url, reopen_s=patience_s, text=how.text, open_queue=how.open_queue
        )
        tee = how.open_tee(info)
        terminal, version = TerminalIds() if state == FRESH else None, None
        if checkpoint is not None:
            terminal, version = checkpoint.terminal, checkpoint.weight_version
        hold.patiently(lambda: hold.lineage.claim(terminal, version), patience_s)
        hold.patiently(lambda: withdraw_all(queue), patience_s)
    except BaseException:
        queue.close()
        if tee is not None:
            tee.close()
        raise
    return hold, tee
