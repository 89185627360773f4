"""`DumpStream`: a stream of groups from a dump, for a trainer with no Redis and no engine.

Owns what of the dump is still to come. Never writes. Invariant: it has the whole face of
`GroupStream`, and gives out every group of the dump once an epoch, in order; what needs a run
(engines, evaluations, control) says that there is none.

Made by `GroupStream.from_dump`. Versions of weights are noted, and nobody is told.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rollstream.batch import Batch
from rollstream.dump.reader import DumpIndex
from rollstream.errors import StreamError, WireError
from rollstream.frontier import TerminalIds
from rollstream.group import FinishedGroup
from rollstream.queue.keys import SCHEMA
from rollstream.queue.reads import RunInfo
from rollstream.stream import GroupStream, check_bounds
from rollstream.trainer.checkpoint import FRESH, MAX_VERSION, Checkpoint
from rollstream.trainer.steering import ACK_TIMEOUT_S
from rollstream.updates.weights import BUSY, Updating, WeightUpdate

if TYPE_CHECKING:
    from rollstream.evaluation.eval_result import EvalResult
    from rollstream.evaluation.evaluate import EvalPrompt
    from rollstream.trainer.control import PauseMode


class DumpStream(GroupStream):
    """The groups of a dump, in batches, for one trainer; use `GroupStream.from_dump`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | Literal["fresh"] | None = None,
        epochs: int = 1,
        text: bool = True,
    ) -> None:
        """Look at every file's head; see `GroupStream.from_dump`."""
        if operator.index(epochs) < 1:
            raise ValueError(f"epochs={epochs}: must be positive")
        self._index, self._text, self._epochs = DumpIndex(folder), text, epochs
        manifest = self._index.manifest
        self._version = 0
        self._epoch, self._terminal = 0, TerminalIds()
        if state is not None and state != FRESH:
            checkpoint = Checkpoint.from_plain(state)
            checkpoint.check_belongs_to(manifest.run, manifest.fingerprint)
            self._version, self._terminal = checkpoint.weight_version, checkpoint.terminal
            self._epoch = checkpoint.dump_epoch
        self._lock = threading.RLock()
        self._iterating = threading.Lock()
        self._is_closed = False
        self._wait_s = 0.0
        self._num_batches = self._num_acked = self._num_updates = self._num_failed = 0
        self._updating: WeightUpdate | None = None
        self._handed_out: dict[int, tuple[Batch, int, list[FinishedGroup]]] = {}
        self._buffer: deque[tuple[int, FinishedGroup]] = deque()
        """(epoch, group) in hand that no batch has."""
        self._broken: Exception | None = None
        self._left: set[int] = set()
        """Of this epoch, what was not read yet."""
        self._coming: Iterator[FinishedGroup] = iter(())
        self._begin_epoch()

    # --- life ----------------------------------------------------------------------------------
    def close(self) -> None:
        """Hand out nothing more."""
        self._is_closed = True

    @property
    def info(self) -> RunInfo:
        """What the dump knows of its run, as if it had ended."""
        manifest, total = self._index.manifest, len(self._index.last)
        return RunInfo(
            run=manifest.run, schema=SCHEMA, fingerprint=manifest.fingerprint, state="ended",
            epoch=self._epoch, version=self._version, capacity=max(1, total), window=0, lease_s=0.0,
            max_attempts=0, max_crashes=0, max_stale=-1, max_body_bytes=0,
            frontier=self._terminal.frontier, done=True,
            delivered=sum(len(groups) for _, _, groups in self._handed_out.values()), error="",
            control_seq=0, connects=1, consumer="", rewind_id="", clock_ms=0, total=manifest.total,
            envs=manifest.rules,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """The weight version that this trainer asserts; it begins at 0, or at its state's."""
        return self._version

    # --- batches -------------------------------------------------------------------------------
    def batches(self, groups: int = 32, timeout_s: float = 600.0) -> Iterator[Batch]:
        """Yield batches of `groups` groups; the last one of every epoch may be short.

        Raises:
            WireError: a file of the dump is not sound; names it and the byte.
            StreamError: the stream was closed.
        """
        check_bounds(groups, timeout_s)
        return self._iterate(groups, timeout_s)

    def next_batch(
        self, groups: int, timeout_s: float, interrupt: threading.Event | None = None
    ) -> Batch | None:
        """Return the next batch, or None at the end; raises as `batches` does."""
        if not self._iterating.acquire(blocking=False):
            raise RuntimeError("one thread at a time may iterate over a GroupStream")
        started = time.monotonic()
        try:
            with self._lock:
                self._refuse_if_closed()
                if not self._fill(groups):
                    return None
                epoch, first = self._buffer.popleft()
                chosen = [first]
                while len(chosen) < groups and self._buffer and self._buffer[0][0] == epoch:
                    chosen.append(self._buffer.popleft()[1])
                self._num_batches += 1
                batch = Batch(list(chosen), self._num_batches, ack_through=self.ack)
                self._handed_out[batch.number] = (batch, epoch, chosen)
                batch.wait_s = time.monotonic() - started
                return batch
        finally:
            self._wait_s += time.monotonic() - started
            self._iterating.release()

    def _fill(self, groups: int) -> bool:
        """Read until a batch is full or its epoch ends; whether there is anything to hand out."""
        while len(self._buffer) < groups and self._epoch < self._epochs and self._index.last:
            group = self._next_group()
            if group is not None:
                self._buffer.append((self._epoch, group))
            elif self._buffer or self._epoch + 1 >= self._epochs:
                break  # batches end where their epoch does
            else:
                self._epoch, self._terminal = self._epoch + 1, TerminalIds()
                self._begin_epoch()
        return bool(self._buffer)

    def _next_group(self) -> FinishedGroup | None:
        if self._broken is not None:
            raise self._broken
        try:
            group = next(self._coming, None)
        except (OSError, WireError) as error:
            self._broken = error  # else what follows would look like the end of the dump
            raise
        except BaseException:  # Ctrl-C, no memory: the same, but it may be asked for again
            self._coming = self._groups_of(self._left)
            raise
        if group is not None:
            self._left.discard(group.group_index)
        return group

    def _begin_epoch(self) -> None:
        self._left = {gid for gid in self._index.last if gid not in self._terminal}
        self._coming = self._groups_of(self._left)

    def _groups_of(self, left: set[int]) -> Iterator[FinishedGroup]:
        for number in self._index.heads:
            yield from self._index.groups(number, only=left, text=self._text)

    def ack(self, batch: Batch, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """Say that a batch was trained on; a repeat does nothing."""
        with self._lock:
            if batch.acked:
                return
            self._must_be_out(batch)
            _, epoch, groups = self._handed_out.pop(batch.number)
            if epoch == self._epoch:
                self._terminal.add(group.group_index for group in groups)
            self._num_acked += len(groups)
            batch.acked = True

    def _must_be_out(self, batch: Batch) -> None:
        out = self._handed_out.get(batch.number)
        if out is None or out[0] is not batch:
            raise ValueError(f"batch {batch.number} was not handed out by this stream")

    def take_back(self, batch: Batch) -> None:
        """Put a batch that nobody trained on back to the front of the stream."""
        with self._lock:
            self._must_be_out(batch)
            _, epoch, groups = self._handed_out.pop(batch.number)
            self._buffer.extendleft((epoch, group) for group in reversed(groups))

    # --- checkpoints ---------------------------------------------------------------------------
    def state_dict(self, timeout_s: float = ACK_TIMEOUT_S) -> dict[str, Any]:
        """Return what `from_dump(state=…)` needs to go on from here: plain data.

        Raises:
            StreamError: a handed-out batch is not acked, or one of the epoch before was put back.
        """
        with self._lock:
            if self._buffer and self._buffer[0][0] != self._epoch:
                raise StreamError(
                    "groups of the epoch before wait, which were taken back: train on them first"
                )
            if self._handed_out:
                numbers = ", ".join(map(str, self._handed_out))
                raise StreamError(
                    f"batch {numbers} is handed out and not acked: ack it after its step, then "
                    "take the checkpoint (else the model has learned what the state does not count)"
                )
            manifest = self._index.manifest
            return Checkpoint(
                manifest.run, manifest.fingerprint, self._terminal, self._version, self._epoch
            ).to_plain()

    # --- weights -------------------------------------------------------------------------------
    def set_weight_version(self, version: int, label: str | None = None) -> None:
        """Note the version; nobody is told, as nobody samples."""
        if self._updating is not None:
            raise RuntimeError(BUSY)
        self._version = self._checked(version)

    def _checked(self, version: int) -> int:
        version = operator.index(version)
        if not self._version <= version <= MAX_VERSION:
            raise ValueError(
                f"weight version {version} is lower than {self._version}, or beyond {MAX_VERSION}: "
                "versions rise over the whole run; count on from stream.version"
            )
        return version

    def updating_weights(
        self,
        version: int,
        mode: PauseMode | None = None,
        *,
        label: str | None = None,
        wait_idle: bool | None = None,
        deadline_s: float = 600.0,
        confirm_s: float = 30.0,
        ack: Batch | Sequence[Batch] | None = None,
        post: bool = True,
    ) -> Updating:
        """Run the block, with no engine to push to; then ack and note the version."""
        batches = [] if ack is None else [ack] if isinstance(ack, Batch) else list(ack)
        update = WeightUpdate(self._checked(version), mode or "keep")
        return _Noting(self, update, batches)

    def engines(self) -> list[str]:
        """Return none: nobody samples."""
        return []

    # --- what there is no run for --------------------------------------------------------------
    def set_engines(self, urls: Sequence[str] | None) -> None:
        """Raise StreamError."""
        self._refuse("set_engines")

    def pause(
        self, mode: PauseMode = "keep", deadline_s: float = 0.0, *, timeout_s: float = ACK_TIMEOUT_S
    ) -> None:
        """Raise StreamError."""
        self._refuse("pause")

    def resume(self, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """Raise StreamError."""
        self._refuse("resume")

    def drain(self, timeout_s: float = 600.0, interrupt: threading.Event | None = None) -> None:
        """Raise StreamError."""
        self._refuse("drain")

    def evaluate(
        self,
        name: str,
        prompts: Sequence[EvalPrompt],
        n: int = 1,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        env: str | None = None,
        interrupt: threading.Event | None = None,
    ) -> EvalResult:
        """Raise StreamError."""
        self._refuse("evaluate")

    def withdraw(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Raise StreamError."""
        self._refuse("withdraw")

    def requeue(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Raise StreamError."""
        self._refuse("requeue")

    def abort_run(self, reason: str = "", timeout_s: float = 30.0) -> None:
        """Raise StreamError."""
        self._refuse("abort_run")

    def _refuse(self, what: str) -> NoReturn:
        raise StreamError(
            f"{what}: this stream reads the dump in {self._index.folder}, behind which there is no "
            "run and no engine; GroupStream.connect has one"
        )

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StreamError("the stream was closed")

    def metrics(self) -> dict[str, float]:
        """Return figures of this stream for a tracker, all under `stream/`."""
        with self._lock:
            out = sum(len(groups) for _, _, groups in self._handed_out.values())
            return {
                "stream/version": self._version,
                "stream/held_groups": out + len(self._buffer),
                "stream/acked_here": self._num_acked,
                "stream/wait_s": self._wait_s,
                "stream/updates": self._num_updates,
                "stream/updates_failed": self._num_failed,
                "stream/dump_groups": len(self._index.last),
                "stream/epoch": self._epoch,
            }

    # --- for the update ------------------------------------------------------------------------
    def begin_update(self, update: WeightUpdate) -> None:
        """Enter the block of an update.

        Raises:
            RuntimeError: another is under way.
            StreamError: the stream was closed.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._updating is not None:
                raise RuntimeError(BUSY)
            self._checked(update.version)
            self._updating = update

    def end_update(self, update: WeightUpdate, ack: Sequence[Batch], *, is_failed: bool) -> None:
        """Leave it: as planned, or with the version as it was."""
        with self._lock:
            try:
                if not is_failed:
                    for batch in ack:
                        self.ack(batch)
                    self._version = update.version
            except BaseException:
                is_failed = True
                raise
            finally:
                self._updating = None
                self._num_updates += 1
                self._num_failed += is_failed


class _Noting(Updating):
    """One update of a stream without engines; the face of `Updating`."""

    def __init__(self, stream: DumpStream, update: WeightUpdate, ack: Sequence[Batch]) -> None:
        self._stream, self._update, self._ack = stream, update, ack

    def __enter__(self) -> WeightUpdate:
        return self.enter(threading.Event())

    def enter(self, interrupt: threading.Event) -> WeightUpdate:
        """Begin; there is nobody to wait for."""
        self._stream.begin_update(self._update)
        return self._update

    def leave(self, *, is_failed: bool) -> None:
        """End as planned, or with the version as it was."""
        self._stream.end_update(self._update, self._ack, is_failed=is_failed)
