"""Writes every batch that a trainer is handed out to a dump, beside the training.

Owns a thread that writes and the few batches that wait for it. Never raises into a training, and
never waits for a disk longer than `MAX_WAIT_S` a batch. Invariant: what is counted as written is on
the disk, and every other group is counted as failed; a group is encoded before the trainer has it,
so whatever the trainer does to it, the dump has what was handed out.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollstream.batch import Batch
from rollstream.dump.records import EncodedGroup, encode_group
from rollstream.dump.writer import DumpWriter
from rollstream.errors import RollstreamError
from rollstream.queue.reads import RunInfo

log = logging.getLogger("rollstream.stream")

MAX_WAITING = 2
"""Batches in memory that the disk has not taken yet, beside the one that is being written."""
MAX_WAIT_S = 1.0
"""How long a batch waits for its place among them; behind one that got none, the next waits not."""
OPEN_WAIT_S = 10.0
CLOSE_WAIT_S = 10.0
KIND = "trained"
_TROUBLES = (OSError, RollstreamError)


@dataclass(slots=True)
class _Piece:
    groups: Sequence[EncodedGroup]
    weight_version: int


class Tee:
    """Takes batches for a dump.

    Attributes:
        num_batches: files that were written.
        num_groups: groups that are in the dump.
        num_failed: groups that are not.
        wait_s: how long the trainer waited for the disk, and for its groups to be encoded.
    """

    def __init__(
        self, folder: str | os.PathLike[str], open_writer: Callable[[], DumpWriter]
    ) -> None:
        """Begin to open the dump.

        Args:
            folder: for messages.
            open_writer: opens it; again at every batch until it does.

        Raises:
            RollstreamError: what is there is another run's, or no dump that can be read: the
                caller's mistake, said before a training begins. A disk that says no is none.
            ValueError: no folder can be called that.
        """
        self._folder, self._open_writer = str(folder), open_writer
        self.num_batches = self.num_groups = self.num_failed = 0
        self.wait_s = 0.0
        self._writer: DumpWriter | None = None
        self._pieces: queue.Queue[_Piece | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._is_failing = self._is_behind = self._is_closed = False
        self._opened = threading.Event()
        self._refused: Exception | None = None
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="rollstream-dump", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_WAIT_S)
        self._raise_if_refused()
        atexit.register(self.close)

    def _raise_if_refused(self) -> None:
        if self._refused is not None:
            self._pieces.put(None)
            raise self._refused

    def take(self, batch: Batch, weight_version: int) -> None:
        """Have a batch written that is about to be handed out."""
        started = time.monotonic()
        try:
            piece = _Piece([encode_group(group) for group in batch.groups], weight_version)
        except RollstreamError as error:
            self._failed(len(batch), error)
        else:
            self._enqueue(piece)
        self.wait_s += time.monotonic() - started

    def _enqueue(self, piece: _Piece) -> None:
        try:
            if self._is_closed:
                raise queue.Full
            if self._is_behind:
                self._pieces.put_nowait(piece)
            else:
                self._pieces.put(piece, timeout=MAX_WAIT_S)
            self._is_behind = False
        except queue.Full:
            self._is_behind = True
            self._failed(len(piece.groups), TimeoutError("the disk is slower than the training"))

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> None:
        """Write what waits, as far as the disk takes it in time; a repeat does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        limit = time.monotonic() + timeout_s
        try:
            self._pieces.put(None, timeout=timeout_s)
        except queue.Full:
            return  # counted as failed by nobody: the thread may still write them
        self._thread.join(max(0.0, limit - time.monotonic()))

    def figures(self) -> dict[str, float]:
        """Return what was counted, all under `stream/`."""
        with self._lock:
            return {
                "stream/dumped_batches": self.num_batches,
                "stream/dumped_groups": self.num_groups,
                "stream/dump_failed_groups": self.num_failed,
                "stream/dump_wait_s": self.wait_s,
            }

    # --- in the thread ---------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._open()
        except OSError as error:
            self._failed(0, error)
        except (RollstreamError, ValueError) as error:
            self._refused = error
        self._opened.set()
        while (piece := self._pieces.get()) is not None:
            self._write(piece)
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> DumpWriter:
        if self._writer is None:
            self._writer = self._open_writer()
        return self._writer

    def _write(self, piece: _Piece) -> None:
        try:
            written = self._open().write_encoded(piece.groups, KIND, piece.weight_version)
        except _TROUBLES as error:
            self._failed(len(piece.groups), error)
            return
        with self._lock:
            self.num_batches += written.path is not None
            self.num_groups += len(piece.groups)
            again, self._is_failing = self._is_failing, False
        if again:
            log.warning("the dump is written again", extra={"dump": self._folder})

    def _failed(self, num_groups: int, error: Exception) -> None:
        """Count groups that are not in the dump; said once until it is written again."""
        with self._lock:
            self.num_failed += num_groups
            said, self._is_failing = self._is_failing, True
        if not said:
            log.error(
                "the dump cannot be written, and training goes on: %s",
                error,
                extra={"dump": self._folder, "error": str(error)},
            )


def open_tee(folder: str | os.PathLike[str], info: RunInfo) -> Tee:
    """Return a tee to the dump of a run; raises as `Tee` does."""

    def open_writer() -> DumpWriter:
        return DumpWriter.open(
            folder,
            run=info.run,
            fingerprint=info.fingerprint,
            rules=info.envs,
            weight_version=info.version,
            total=info.total,
        )

    return Tee(folder, open_writer)
