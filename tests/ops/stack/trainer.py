"""A trainer that learns nothing: it takes groups and names new weights at the pace of a file.

Owns one `GroupStream`. What stands in the file (`Pace`, as JSON) counts from the next step on, so a
test makes it slow, greedy, idle, or one that pushes weights all the time. Invariant: each batch is
acked once, and SIGTERM ends it with exit code 0.

    python -m tests.ops.stack.trainer PACE.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollstream import GroupStream, StreamError, StreamStalled

CONNECTED = "connected"
"""Its first line; from there on it ends well by a signal."""
LOOK_S = 0.05
"""How often it looks whether it is to do something again."""
STALL_S, STOP_S = 600.0, 40.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What a trainer does from its next step on."""

    groups: int = 4
    """A batch; 0 takes nothing."""
    step_s: float = 0.8
    """How long a step takes beside the waiting for its groups."""
    version_s: float = 1.0
    """Time between two versions of the weights; below 0 there is no new one."""

    def write(self, file: Path) -> None:
        """Let it count; a reader finds the one before or this one, whole."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(file)

    @staticmethod
    def read(file: Path) -> Pace:
        """Return what counts now."""
        return Pace(**json.loads(file.read_text()))


def say(text: str) -> None:
    """Write a line of the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train(stream: GroupStream, file: Path) -> None:
    """Take groups until the run is over."""
    while True:
        pace = Pace.read(file)
        if not pace.groups:
            time.sleep(LOOK_S)
            continue
        try:
            batch = stream.next_batch(pace.groups, STALL_S)
        except StreamStalled as stalled:
            say(str(stalled))
            continue
        if batch is None:
            say("the run is over")
            return
        batch.ack()
        time.sleep(pace.step_s)


def push(stream: GroupStream, file: Path, over: threading.Event) -> None:
    """Name new weights again and again, from a thread of its own, and end between two updates."""
    while True:
        pace = Pace.read(file)
        if over.wait(max(pace.version_s, LOOK_S)):
            return
        if pace.version_s < 0:
            continue
        try:
            with stream.updating_weights(stream.version + 1):
                pass
        except StreamError as error:  # e.g. a worker that a test has frozen
            say(f"no new weights: {error}")
        else:
            say(f"version {stream.version}")


def main() -> None:
    """Connect as docs/deploy.md says a trainer beside the compose file does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    url = Path(os.environ["ROLLSTREAM_REDIS__URL_FILE"]).read_text().strip()
    run = os.environ["ROLLSTREAM_RUN__NAME"]
    with GroupStream.connect(url, run=run, connect_timeout_s=60) as stream:
        pace = Path(sys.argv[1])
        say(CONNECTED)
        over = threading.Event()
        pushing = threading.Thread(target=push, args=(stream, pace, over), daemon=True)
        pushing.start()
        try:
            train(stream, pace)
        finally:  # an update that is left half-way leaves engines of which nobody takes tokens
            over.set()
            pushing.join(STOP_S)


if __name__ == "__main__":
    main()
