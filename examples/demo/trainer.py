"""The demo's trainer: what a user's own training loop looks like, with an audit beside it.

Owns the loop. Never talks to a worker. Invariant: a batch is in the trainer's own log before it is
acked, so a group that was handed out twice is seen.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from examples.demo.auditor import Auditor
from examples.demo.options import GROUPS_A_BATCH
from examples.demo.tally import Tally
from rollstream import GroupStream
from rollstream.arrays import TrainArrays

CHECKPOINT_EVERY = 4
STALL_S = 60.0
CONNECT_S = 30.0


@dataclass(eq=False)
class Trainer:
    """Trains until the run is over, or until it has what it wants.

    It runs in a thread: the main thread watches the processes, and is the one that may start them.
    """

    url: str
    run_name: str
    auditor: Auditor
    checkpoint: Path
    stop_after: int | None
    """Batches; None goes on to the end of the data."""
    tally: Tally = field(default_factory=Tally)
    version: int = 0
    loss: float = float("nan")
    started_s: float = 0.0
    ended_s: float = 0.0
    error: BaseException | None = None

    def start(self) -> threading.Thread:
        """Start the thread; a daemon, because a demo that gives up must not wait for it."""
        thread = threading.Thread(target=self.run, name="trainer", daemon=True)
        thread.start()
        return thread

    @property
    def seconds(self) -> float:
        """From its connect to its last ack."""
        return max(0.001, self.ended_s - self.started_s)

    def run(self) -> None:
        """Train; whatever goes wrong is kept in `error` for the main thread."""
        try:
            with GroupStream.connect(
                self.url, run=self.run_name, connect_timeout_s=CONNECT_S
            ) as stream:
                self.started_s = self.ended_s = time.monotonic()
                self.train(stream)
        except Exception as error:  # noqa: BLE001 - a thread's runner: the main thread reports it
            self.error = error

    def train(self, stream: GroupStream) -> None:
        """Take batches, step, publish new weights and ack, checkpoint."""
        for batch in stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
            self.tally.add(batch.groups)
            self.loss = toy_loss(batch.to_arrays(pad_id=0))
            # Workers hold their next calls meanwhile; calls in flight go on, under both versions.
            with stream.updating_weights(stream.version + 1, ack=batch) as update:
                push_weights(update.engines)
            self.version = stream.version
            self.ended_s = time.monotonic()
            self.auditor.check(batch.groups)
            if batch.number % CHECKPOINT_EVERY == 0:
                save(self.checkpoint, stream)
            if self.stop_after is not None and self.tally.batches >= self.stop_after:
                break
        save(self.checkpoint, stream)


def push_weights(engines: Sequence[str]) -> None:
    """Stand in for a real trainer's push; the stream tells the engines the version behind it."""


def toy_loss(arrays: TrainArrays) -> float:
    """Return a policy-gradient loss as a stand-in for a model's forward pass would give it.

    Shape: log_probs and loss_mask [B, L], reward and group_index [B].
    """
    reward = np.nan_to_num(arrays["reward"])
    advantage = np.zeros_like(reward)
    for group in np.unique(arrays["group_index"]):
        rows = arrays["group_index"] == group
        spread = reward[rows].std()
        advantage[rows] = (reward[rows] - reward[rows].mean()) / (spread + 1e-6)
    mask = arrays["loss_mask"].astype(np.float64)
    weighted = arrays["log_probs"] * mask * advantage[:, None]
    return float(-weighted.sum() / max(1.0, mask.sum()))


def save(path: Path, stream: GroupStream) -> None:
    """Keep the stream's state where a real trainer keeps it: beside the model."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"rollstream": stream.state_dict()}))
    partial.replace(path)
