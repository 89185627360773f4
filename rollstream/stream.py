"""`GroupStream`: the trainer's end of a run, synchronous.

Owns the public face and its lock. Never generates, filters or re-orders: `Hold` has the groups,
`Wait` the waiting, `Lineage` the claim, `Steering` what else is asked of a run. Invariant: nothing
is handed out twice by this process, whatever happens to the server or to an iteration; a
half-filled batch outlives every iterator.

Safe to use from several threads (one may wait in `batches` while another acks); only one at a
time may iterate.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rollstream.batch import Batch
from rollstream.errors import StreamError
from rollstream.evaluation.eval_result import EvalResult
from rollstream.evaluation.evaluate import EvalPrompt, ask, run_evaluation
from rollstream.queue.reads import RunInfo
from rollstream.runs import Interrupted
from rollstream.trainer.checkpoint import Checkpoint
from rollstream.trainer.connecting import Connecting, open_hold
from rollstream.trainer.control import PauseMode
from rollstream.trainer.figures import stream_figures
from rollstream.trainer.hold import Hold
from rollstream.trainer.steering import ACK_TIMEOUT_S, Steering
from rollstream.trainer.waiting import Wait
from rollstream.updates.weights import NOTHING_SAMPLED, Updating, Weights

if TYPE_CHECKING:
    from rollstream.dump.tee import Tee


def check_bounds(groups: int, timeout_s: float) -> None:
    """Refuse a batch or a wait that is none.

    Raises:
        ValueError: not positive.
        TypeError: `groups` is no whole number.
    """
    if operator.index(groups) < 1 or not timeout_s > 0:
        raise ValueError(f"groups={groups}, timeout_s={timeout_s}: both must be positive")


class GroupStream(Steering):
    """Finished groups of one run, in batches, for one trainer.

    Example:
        >>> with GroupStream.connect("redis://localhost", run="demo") as stream:
        ...     for batch in stream.batches(groups=32):
        ...         train(batch.to_arrays(pad_id=0))
        ...         batch.ack()
    """

    def __init__(self, hold: Hold, tee: Tee | None = None) -> None:
        """Use `connect`."""
        self._hold, self._tee = hold, tee
        self._lock = threading.RLock()
        self._iterating = threading.Lock()
        self._wait_s = 0.0
        self._weights = Weights(hold, self._lock, self.ack)

    # --- life ----------------------------------------------------------------------------------
    @classmethod
    def connect(
        cls,
        url: str,
        *,
        run: str,
        state: Mapping[str, Any] | Literal["fresh"] | None = None,
        connect_timeout_s: float = 30.0,
        ca: str | None = None,
        text: bool = False,
        dump_dir: str | os.PathLike[str] | None = None,
        interrupt: threading.Event | None = None,
    ) -> Self:
        """Become the trainer of a run; a trainer that is connected already is taken over.

        What the run handed out before and was not acked comes again, first.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            run: its name; a producer opens it, this waits until one has.
            state: what `state_dict()` returned: the run is rewound to it, so what was acked later
                comes again, and what it counts as ended does not. `"fresh"` is the state of a
                model that has learned nothing: every prompt comes. None goes on where the run
                stands, which skips what a trainer that died without a checkpoint has acked.
            connect_timeout_s: how long Redis may stay away and the run may not exist, now and
                later; also how long a run that vanished may take to be opened again.
            ca: file of the CA that signed the server's certificate, for `rediss://`.
            text: fetch the response texts too (`sample.response` is empty otherwise).
            dump_dir: write every batch there too before it is handed out, for `from_dump`; a disk
                that fails is counted in `metrics()`, and training goes on.
            interrupt: set by another thread to give up before the run is claimed.

        Raises:
            ValueError: `state` is not a checkpoint of ours, or `url` no URL of a Redis.
            RunMismatch: `state` or `dump_dir` is of another run or other data, or the run has
                another schema.
            RunLost: there is no such run; names those that exist.
            StreamError: Redis cannot be reached.
        """
        how = Connecting(url, run, connect_timeout_s, ca=ca, text=text, dump_dir=dump_dir)
        return cls(*open_hold(how, state, interrupt or threading.Event()))

    @classmethod
    def from_dump(
        cls,
        dump_dir: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | Literal["fresh"] | None = None,
        epochs: int = 1,
        text: bool = True,
    ) -> GroupStream:
        """Return a stream of the groups in a dump: the same face, no Redis and no engine.

        What needs a run (`evaluate`, `pause`, …) raises StreamError; versions are only noted.

        Args:
            dump_dir: what `connect(dump_dir=…)` or `rollstream dump` wrote.
            state: what `state_dict()` returned, of this stream or of one of the run itself.
            epochs: how often every group comes; a batch never has groups of two.
            text: with the response texts, where the dump has them.

        Raises:
            WireError: it is no dump, or its files are not sound; names the file and the byte.
            RunMismatch: `state` is of another run or other data.
            ValueError: `state` is not a checkpoint of ours, or `epochs` below 1.
        """
        from rollstream.dump.stream import DumpStream

        return DumpStream(dump_dir, state=state, epochs=epochs, text=text)

    def close(self) -> None:
        """Close every connection; groups that were not acked stay for the next trainer."""
        self._hold.close()
        if self._tee is not None:
            self._tee.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def info(self) -> RunInfo:
        """What the run is, as of the last look (at most a second old while iterating)."""
        return self._hold.info

    @property
    def version(self) -> int:
        """The weight version that this trainer asserts."""
        return self._hold.lineage.version

    # --- batches -------------------------------------------------------------------------------
    def batches(self, groups: int = 32, timeout_s: float = 600.0) -> Iterator[Batch]:
        """Yield batches of `groups` finished groups until the run is over.

        The last batch may be short. An iteration that raised, or that was left, keeps what it
        gathered: iterate again to go on.

        Args:
            groups: groups a batch.
            timeout_s: how long nothing may end before `StreamStalled`.

        Raises:
            StreamStalled: nothing ended for `timeout_s`, or Redis was away that long.
            ProducerGone: prompts are missing and no producer lives.
            RunFailed: the run was ended as failed, or aborted by somebody else.
            RunLost: Redis does not know the run any more.
            ConsumerTaken: a later trainer took over.
            CapacityTooSmall: such a batch can never fill.
            WireTooNew: the workers speak a newer wire version.
        """
        check_bounds(groups, timeout_s)
        self._hold.refuse_too_large(groups)
        return self._iterate(groups, timeout_s)

    def _iterate(self, groups: int, timeout_s: float) -> Iterator[Batch]:
        while (batch := self.next_batch(groups, timeout_s)) is not None:
            yield batch

    def next_batch(
        self, groups: int, timeout_s: float, interrupt: threading.Event | None = None
    ) -> Batch | None:
        """Return the next batch, or None where the run is over; raises as `batches` does.

        Args:
            groups: groups a batch.
            timeout_s: how long nothing may end.
            interrupt: set by another thread to end the wait early, with `Interrupted`.
        """
        if not self._iterating.acquire(blocking=False):
            raise RuntimeError("one thread at a time may iterate over a GroupStream")
        started = time.monotonic()
        try:
            wait = Wait(self._hold, groups, timeout_s)
            while True:
                with self._lock:
                    self._hold.refuse_if_closed()
                    if wait.step() or (wait.over and self._hold.buffer):
                        batch = self._hold.hand_out(groups, self.ack)
                        batch.wait_s = time.monotonic() - started
                        break
                if wait.over:
                    return None
                if interrupt is not None and interrupt.is_set():
                    raise Interrupted
                wait.block()
            return self._dumped(batch)
        finally:
            self._wait_s += time.monotonic() - started
            self._iterating.release()

    def _dumped(self, batch: Batch) -> Batch:
        """Have a batch written beside the training, where that is wished."""
        if self._tee is not None:
            try:
                self._tee.take(batch, self.version)
            except BaseException:  # Ctrl-C: nobody has it yet
                self.take_back(batch)
                raise
        return batch

    def ack(self, batch: Batch, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """Say that a batch was trained on; a repeat does nothing.

        Args:
            batch: one that this stream handed out.
            timeout_s: how long a Redis outage is waited for.

        Raises:
            ConsumerTaken: a later trainer took over; nothing was acked.
            RunLost: Redis does not know the run any more.
            StreamError: Redis did not answer in time; the batch is still held.
        """
        with self._lock:
            if batch.acked:
                return
            self._must_be_out(batch)
            ids = batch.group_indexes
            self._hold.patiently(lambda: self._hold.ack(ids), timeout_s)
            self._hold.forget(batch)
            batch.acked = True

    def _must_be_out(self, batch: Batch) -> None:
        if not self._hold.has_handed_out(batch):
            raise ValueError(f"batch {batch.number} was not handed out by this stream")

    def take_back(self, batch: Batch) -> None:
        """Put a batch that nobody trained on back to the front of the stream."""
        with self._lock:
            self._must_be_out(batch)
            self._hold.take_back(batch)

    # --- checkpoints and control ---------------------------------------------------------------
    def state_dict(self, timeout_s: float = ACK_TIMEOUT_S) -> dict[str, Any]:
        """Return what `connect(state=…)` needs to go on from here: plain data for JSON or pickle.

        Raises:
            StreamError: a handed-out batch is not acked (it would be trained again after a
                restart from a model that has learned it), or Redis did not answer in time.
            ConsumerTaken: a later trainer took over.
        """
        with self._lock:
            hold = self._hold
            if hold.handed_out:
                numbers = ", ".join(map(str, hold.handed_out))
                raise StreamError(
                    f"batch {numbers} is handed out and not acked: ack it after its step, then "
                    "take the checkpoint (else the model has learned what the state does not count)"
                )
            terminal = hold.patiently(hold.lineage.snapshot, timeout_s)
            version = hold.lineage.version
            return Checkpoint(hold.info.run, hold.info.fingerprint, terminal, version).to_plain()

    def set_weight_version(self, version: int, label: str | None = None) -> None:
        """Say which policy the engines serve from now on; groups get stale by it.

        `updating_weights` does it at its end.

        Args:
            version: rises with every update of the weights.
            label: the engines' own name of these weights, where they report one.

        Raises:
            ValueError: lower than the version before, or beyond 2^53.
            TypeError: no whole number.
            RuntimeError: inside `updating_weights`.
            StreamError: Redis did not answer in time.
        """
        self._weights.set_version(version, label)

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
        """Pause the run for the block, in which you push weights to `engines()`; then resume.

        The block begins once every live worker obeys. At its end the engines are told the version
        (`/update_weight_version`), the run gets it, and goes on. A block that raises leaves the
        run with the version that it had, and going on. Where calls go on meanwhile, engines have a
        label that means no version until then: tokens that nobody can know the weights of are
        recorded as such.

        Args:
            version: what the engines will serve; the run's own version again gives them the same
                weights once more.
            mode: `keep`: no new call, calls in flight go on over the update; `abort`: they stop,
                and the block begins when none is left. None is `keep`, and `abort` where the run's
                `weights.mode` is not `async`.
            label: the engines' own name of these weights; None is the version as a number.
            wait_idle: wait with `keep` too until no call is in flight; None is only where the
                run is `colocated`.
            deadline_s: after so long the pause ends whatever becomes of this process.
            confirm_s: how long workers may take to obey.
            ack: batches to ack at the end, before anything new is sampled.
            post: tell the engines the version; False where your push names the weights itself, by
                the call that changes them.

        Raises:
            ValueError: the version is lower than the one before; no such mode; a bad time;
                `wait_idle=False` with `abort`.
            PauseNotConfirmed: a live worker did not obey in time; the run goes on as before.
            RuntimeError: another update of this stream is under way.
            RunFailed: the run was ended.
            StreamError: Redis did not answer in time, or the stream was closed.
            ConsumerTaken: a later trainer took over; nothing was changed.

        Example:
            >>> with stream.updating_weights(step) as update:
            ...     push(model, update.engines)
        """
        plan = self._weights.plan(
            version,
            mode,
            label=label,
            wait_idle=wait_idle,
            deadline_s=deadline_s,
            confirm_s=confirm_s,
            ack=ack,
            post=post,
        )
        return Updating(self._weights, self._hold, self._lock, plan)

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
        """Sample prompts to measure the policy; training goes on, and none of it is trained on.

        They run before all training groups, on a connection of its own: another thread may
        iterate, ack and update weights meanwhile. Which weights sampled it is in the result.

        Args:
            name: for metrics.
            prompts: texts, messages, rows (`prompt`, `label`, …) or prompt groups.
            n: samples a prompt.
            sampling: parameters that differ from the environment's, for all prompts.
            timeout_s: what has not ended by then is missing, with the reason `timeout`.
            env: its tools, reward and limits; None is the only one, or `default`.
            interrupt: set by another thread to give up, with `Interrupted`.

        Raises:
            ValueError: no prompt, a bad row, n or environment.
            RuntimeError: in the block of `updating_weights` itself, where nothing is sampled.
            RunFailed: the run was ended.
            RunLost: there is no such run.
            StreamError: Redis did not answer, and nothing was read; or the stream was closed.
            ConsumerTaken: a later trainer took over.
        """
        self._hold.refuse_if_closed()
        if self._weights.block_thread == threading.get_ident():
            raise RuntimeError(NOTHING_SAMPLED)
        text = self._hold.intake.text
        asked = ask(self.info, name, prompts, n, sampling, timeout_s, env, text=text)
        return run_evaluation(self._hold, self._lock, asked, interrupt or threading.Event())

    def metrics(self) -> dict[str, float]:
        """Return figures of the run and of this stream for a tracker, all under `stream/`.

        During an outage, and behind `close`, only what this process knows by itself.
        """
        figures = stream_figures(self._hold, self._weights.figures, self._wait_s)
        return figures if self._tee is None else figures | self._tee.figures()
