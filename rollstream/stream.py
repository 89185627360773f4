"""`GroupStream`: the trainer's end of a run, synchronous.

Owns the public face and its lock. Never generates, filters or re-orders: `Hold` has the groups,
`Wait` the waiting, `Lineage` the claim. Invariant: nothing is handed out twice by this process,
whatever happens to the server or to an iteration; a half-filled batch outlives every iterator.

Safe to use from several threads (one may wait in `batches` while another acks); only one at a
time may iterate.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from rollstream import control
from rollstream.batch import Batch
from rollstream.checkpoint import FRESH, MAX_VERSION, Checkpoint
from rollstream.errors import StreamError
from rollstream.frontier import TerminalIds
from rollstream.hold import Hold
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import RunInfo
from rollstream.runs import OUTAGES, Interrupted, await_run, say_problems
from rollstream.urls import redis_url_problem
from rollstream.waiting import Wait

log = logging.getLogger("rollstream.stream")

METRICS_TIMEOUT_S = 2.0
"""How long figures of a silent server are waited for."""
ACK_TIMEOUT_S = 60.0
"""How long an ack outlasts a Redis outage."""


def check_bounds(groups: int, timeout_s: float) -> None:
    """Refuse a batch or a wait that is none.

    Raises:
        ValueError: not positive.
        TypeError: `groups` is no whole number.
    """
    if operator.index(groups) < 1 or not timeout_s > 0:
        raise ValueError(f"groups={groups}, timeout_s={timeout_s}: both must be positive")


class GroupStream:
    """Finished groups of one run, in batches, for one trainer.

    Example:
        >>> with GroupStream.connect("redis://localhost", run="demo") as stream:
        ...     for batch in stream.batches(groups=32):
        ...         train(batch.to_arrays(pad_id=0))
        ...         batch.ack()
    """

    def __init__(self, hold: Hold) -> None:
        """Use `connect`."""
        self._hold = hold
        self._lock = threading.RLock()
        self._iterating = threading.Lock()
        self._wait_s = 0.0

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
            interrupt: set by another thread to give up before the run is claimed.

        Raises:
            ValueError: `state` is not a checkpoint of ours, or `url` no URL of a Redis.
            RunMismatch: `state` is of another run or other data, or the run has another schema.
            RunLost: there is no such run; names those that exist.
            StreamError: Redis cannot be reached.
        """
        if problem := redis_url_problem(url):
            raise ValueError(f"url: expected {problem}")
        checkpoint = None if state is None or state == FRESH else Checkpoint.from_plain(state)
        queue = BlockingQueue.connect(
            url, run, ca=ca, connect_timeout_s=max(0.1, min(5.0, connect_timeout_s))
        )
        try:
            info = await_run(queue, url, connect_timeout_s, interrupt or threading.Event())
            if checkpoint is not None:
                checkpoint.check_belongs_to(run, info.fingerprint)
            say_problems(queue)
            hold = Hold(queue, info, url=url, reopen_s=connect_timeout_s, text=text)
            terminal, version = TerminalIds() if state == FRESH else None, None
            if checkpoint is not None:
                terminal, version = checkpoint.terminal, checkpoint.weight_version
            hold.patiently(lambda: hold.lineage.claim(terminal, version), connect_timeout_s)
        except BaseException:
            queue.close()
            raise
        return cls(hold)

    def close(self) -> None:
        """Close every connection; groups that were not acked stay for the next trainer."""
        self._hold.close()

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
                        return batch
                if wait.over:
                    return None
                if interrupt is not None and interrupt.is_set():
                    raise Interrupted
                wait.block()
        finally:
            self._wait_s += time.monotonic() - started
            self._iterating.release()

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

        Args:
            version: rises with every update of the weights.
            label: the engines' own name of these weights, where they report one.

        Raises:
            ValueError: lower than the version before, or beyond 2^53.
            TypeError: no whole number.
            StreamError: Redis did not answer in time.
        """
        version = operator.index(version)
        if version > MAX_VERSION:
            raise ValueError(f"weight version {version} is larger than {MAX_VERSION}")
        with self._lock:
            hold = self._hold
            if version < hold.lineage.version:
                raise ValueError(
                    f"weight version {version} is lower than {hold.lineage.version}: versions rise "
                    "over the whole run; count on from stream.version"
                )
            hold.lineage.version = version
            call = calls.set_version(version, label)
            answer = hold.patiently(lambda: hold.queue.call(call), ACK_TIMEOUT_S)
        if answer.version > version:
            # A checkpoint older than the run: versions of the abandoned future stay in Redis.
            log.warning(
                "the run has a higher weight version",
                extra={"run": hold.info.run, "version": version, "redis_version": answer.version},
            )

    def pause(self, mode: control.PauseMode = "keep", timeout_s: float = ACK_TIMEOUT_S) -> None:
        """Have no sample started until `resume`; deadlines of groups stand still meanwhile.

        Finished groups go on to come. A repeat with the same mode does nothing.

        Args:
            mode: `keep` lets running samples end; `abort` has workers stop them, uncharged.
            timeout_s: how long a Redis outage is waited for.

        Raises:
            ValueError: no such mode.
            RunFailed: the run was ended.
            RunLost: Redis does not know the run any more.
            StreamError: Redis did not answer in time.
        """
        control.check_mode(mode)
        self._change(calls.pause(mode), timeout_s)

    def resume(self, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """End a pause; does nothing where there is none. Raises as `pause` does."""
        self._change(calls.resume(), timeout_s)

    def _change(self, call: ScriptCall[ControlAnswer], timeout_s: float) -> None:
        with self._lock:
            self._hold.patiently(lambda: control.change(self._hold, call), timeout_s)

    def withdraw(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Drop a live group as `withdrawn`: no more of it is sampled, and it never comes.

        Args:
            group_index: of the group.
            timeout_s: how long a Redis outage is waited for.

        Returns:
            True where it was dropped. False where there is nothing to drop: it has ended or was
            never enqueued, or a batch has it that is handed out and not acked (ack that batch,
            whether or not you trained on the group).

        Raises:
            ConsumerTaken: a later trainer took over.
            StreamError: Redis did not answer in time.
        """
        with self._lock:
            hold = self._hold
            return hold.patiently(lambda: control.withdraw(hold, group_index), timeout_s)

    def requeue(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Run a live group again from its prompt, before all that wait; its samples are gone.

        Args:
            group_index: of the group.
            timeout_s: how long a Redis outage is waited for.

        Returns:
            True where it runs again. False where it stays what it is: it has ended or was never
            enqueued, a batch has it that is handed out and not acked, or it was requeued as often
            as the run permits.

        Raises:
            RunLost: Redis does not know the run any more.
            StreamError: Redis did not answer in time.
        """
        with self._lock:
            hold = self._hold
            return hold.patiently(lambda: control.requeue(hold, group_index), timeout_s)

    def abort_run(self, reason: str = "", timeout_s: float = 30.0) -> None:
        """End the run: live groups are dropped as `run_aborted`; their ids may come in a new run.

        Raises:
            StreamError: Redis did not answer, or groups are left after `timeout_s`.
        """
        limit = time.monotonic() + timeout_s
        reason = reason.encode(errors="replace").decode()
        with self._lock:
            hold = self._hold
            hold.aborted_here = True
            hold.patiently(lambda: hold.queue.call(calls.abort_run(reason)), timeout_s)
            while hold.patiently(lambda: hold.sweep(1), timeout_s):
                if time.monotonic() > limit:
                    raise StreamError(f"run {hold.info.run!r} still drops groups; abort it again")

    def metrics(self) -> dict[str, float]:
        """Return figures of the run and of this stream for a tracker, all under `stream/`.

        During an outage, and behind `close`, only what this process knows by itself.
        """
        hold = self._hold
        figures: dict[str, float] = {
            "stream/version": hold.lineage.version,
            "stream/held_groups": len(hold.held),
            "stream/acked_here": hold.num_acked,
            "stream/wait_s": self._wait_s,
            "stream/stale_at_hand_out": hold.intake.num_stale,
            "stream/unreadable": hold.intake.num_unreadable,
            "stream/rollbacks": hold.lineage.rollbacks,
        }
        if hold.is_closed:
            return figures
        try:
            with hold.queue.within(METRICS_TIMEOUT_S):
                counters, depths = hold.queue.counters(), hold.queue.depths()
        except OUTAGES:
            return figures
        figures["stream/dropped"] = 0
        for name, count in counters.items():
            kind, _, reason = name.partition(":")
            figures[f"stream/{kind}/{reason}" if reason else f"stream/{kind}"] = count
            if kind == "dropped":
                figures["stream/dropped"] += count
        figures["stream/live"] = depths["live"]
        figures["stream/leased_members"] = depths["l"]
        return figures
