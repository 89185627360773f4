"""The demo's trainer: what a user's own training loop looks like, with an audit beside it.

Owns the loop. Never talks to a worker. Invariant: a batch is in the trainer's own log before it is
acked, so a group that was handed out twice is seen.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
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
    engines: Sequence[str]
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
        """Take batches, step, ack, publish new weights, checkpoint."""
        for batch in stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
            self.tally.add(batch.groups)
            self.loss = toy_loss(batch.to_arrays(pad_id=0))
            batch.ack()
            self.ended_s = time.monotonic()
            self.auditor.check(batch.groups)
            self.publish(stream)
            if batch.number % CHECKPOINT_EVERY == 0:
                save(self.checkpoint, stream)
            if self.stop_after is not None and self.tally.batches >= self.stop_after:
                break
        save(self.checkpoint, stream)

    def publish(self, stream: GroupStream) -> None:
        """Say that the engines serve new weights: to each of them, then to the run.

        (A real trainer pushes its weights here. Requests in flight go on, under both versions.)
        """
        self.version += 1
        body = json.dumps({"new_version": str(self.version), "abort_all_requests": False})
        for engine in self.engines:
            request = urllib.request.Request(
                f"{engine}/update_weight_version",
                data=body.encode(),
                headers={"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=30):
                pass
        stream.set_weight_version(self.version)


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
