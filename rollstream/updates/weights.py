"""New weights for the engines of a run: pause, the trainer's push, version, resume.

Owns one update at a time, from the pause that every live worker confirmed to the resume. Never
moves a weight and never talks to a worker but through Redis. Invariant: however an update ends
(an exception, Ctrl-C, a run that ended), the run is resumed, or the pause's own deadline in Redis
resumes it; the run's version moves only once the push is done and the engines were told.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rollstream.batch import Batch
from rollstream.errors import RollstreamError
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.calls import ScriptCall
from rollstream.trainer import control
from rollstream.trainer.checkpoint import MAX_VERSION
from rollstream.trainer.control import PauseMode
from rollstream.trainer.hold import Hold
from rollstream.trainer.lineage import RunMissing
from rollstream.updates import confirmed
from rollstream.updates.engine_posts import post_all
from rollstream.updates.naming import Naming
from rollstream.updates.pausing import UNDO_TIMEOUT_S, Pausing
from rollstream.urls import checked_engines

log = logging.getLogger("rollstream.stream")

CALL_TIMEOUT_S = 60.0
"""How long one change of the run outlasts a Redis outage."""
CLEAR_TIMEOUT_S = 5.0
ABORT_ALL: Sequence[tuple[str, dict[str, object]]] = (
    ("/abort_request", {"abort_all": True}),  # SGLang's
    ("/abort_requests", {"request_ids": []}),  # vLLM's, in dev mode; an empty list is all
)
BUSY = (
    "this stream is inside updating_weights (or drain): it pauses, sets the version and resumes by "
    "itself, and only one is under way at a time"
)
NOTHING_SAMPLED = "inside updating_weights nothing is sampled: evaluate behind it"


@dataclass(slots=True)
class WeightUpdate:
    """What the block of `updating_weights` gets."""

    version: int
    """What the engines will serve when the block is left."""
    mode: PauseMode
    engines: list[str] = field(default_factory=list)
    """Who gets the weights. Take one out that your push did not reach: it is not told the version,
    so it gets no calls until a later update reaches it."""
    workers: list[str] = field(default_factory=list)
    """Live workers that confirmed the pause."""
    entered_s: float = 0.0
    """From the pause to the last confirmation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one update is to be done."""

    version: int
    mode: PauseMode
    label: str | None
    wait_idle: bool
    deadline_s: float
    confirm_s: float
    ack: Sequence[Batch]
    post: bool
    hides: bool
    """Calls go on while weights move that this names: until then engines have no version's name."""
    clears: bool
    """End every call at the engines before the block: they are this run's alone, and nobody's
    GPUs but the trainer's."""

    @property
    def engine_label(self) -> str:
        """What the engines are told that their weights are called."""
        return self.label or str(self.version)


@dataclass(slots=True)
class Figures:
    """What a stream counted of its updates."""

    updates: int = 0
    failed: int = 0
    enter_s: float = 0.0
    """Of the last one: until every worker had confirmed."""
    update_s: float = 0.0
    """Of the last one: from its pause to its resume."""
    paused_s: float = 0.0
    """Of all together."""
    not_told: int = 0
    """Engines that did not take the version, over all updates."""


class Weights:
    """The weights of one stream's run: versions, pauses, engines, updates."""

    def __init__(self, hold: Hold, lock: threading.RLock, ack: Callable[[Batch], None]) -> None:
        """Do nothing yet.

        Args:
            hold: of the stream.
            lock: that guards it.
            ack: acks one batch.
        """
        self._hold, self._lock, self._ack = hold, lock, ack
        self._busy = threading.Lock()
        self.current: WeightUpdate | None = None
        """The update whose block runs now."""
        self.block_thread = 0
        """The thread in whose block it runs; 0 is none."""
        self.figures = Figures()
        self.naming = Naming(hold.queue.run)
        self._uncleared_engines: set[str] = set()
        """Engines of which it was said that they do not stop their calls."""

    # --- versions and pauses -------------------------------------------------------------------
    def set_version(self, version: int, label: str | None) -> None:
        """See `GroupStream.set_weight_version`."""
        self._refuse_inside()
        version = self.checked(version)
        with self._lock:
            hold, call = self._hold, calls.set_version(version, label)
            hold.lineage.version, hold.lineage.label = version, label
            (answer,) = hold.patiently(lambda: control.changed(hold, [call]), CALL_TIMEOUT_S)
        self._say_if_higher(answer, version)

    def checked(self, version: int) -> int:
        """Return the version as an int.

        Raises:
            ValueError: it is lower than the version before, or too large.
            TypeError: no whole number.
        """
        version, now = operator.index(version), self._hold.lineage.version
        if version > MAX_VERSION:
            raise ValueError(f"weight version {version} is larger than {MAX_VERSION}")
        if version < now:
            raise ValueError(
                f"weight version {version} is lower than {now}: versions rise over the whole run; "
                "count on from stream.version"
            )
        return version

    def _say_if_higher(self, answer: ControlAnswer, version: int) -> None:
        if answer.version > version:
            # A checkpoint older than the run: versions of the abandoned future stay in Redis.
            log.warning(
                "the run has a higher weight version",
                extra={"run": self._hold.info.run, "version": version,
                       "redis_version": answer.version},
            )  # fmt: skip

    def pause(self, mode: PauseMode, deadline_s: float, timeout_s: float) -> None:
        """See `GroupStream.pause`."""
        self._refuse_inside()
        control.check_mode(mode)
        check_seconds(deadline_s=deadline_s)
        with self._lock:
            pause = calls.pause(mode, deadline_s, self._hold.lineage.consumer)
            self._live([pause], timeout_s)
            self._hold.mark_paused(True)

    def resume(self, timeout_s: float) -> None:
        """See `GroupStream.resume`."""
        self._refuse_inside()
        with self._lock:
            self._live([calls.resume()], timeout_s)
            self._hold.mark_paused(False)

    def _refuse_inside(self) -> None:
        if self._busy.locked():
            raise RuntimeError(BUSY)

    def _live(
        self, changes: Sequence[ScriptCall[ControlAnswer]], timeout_s: float
    ) -> list[ControlAnswer]:
        """Change a run that goes on; raises as `control.change` does."""
        with self._lock:
            hold = self._hold
            return hold.patiently(lambda: control.change_all(hold, changes), timeout_s)

    # --- engines -------------------------------------------------------------------------------
    def engines(self, timeout_s: float = CALL_TIMEOUT_S) -> list[str]:
        """See `GroupStream.engines`."""
        current = self.current
        if current is not None:
            return list(current.engines)
        with self._lock:
            return self._hold.patiently(self._engines, timeout_s)

    def _engines(self) -> list[str]:
        queue = self._hold.queue
        info = queue.info()
        if info is None:
            raise RunMissing(f"Redis has no run {queue.run!r}")
        # A name or a router stands for engines that only the workers know.
        if info.engines is not None and all(u.startswith("http") for u in info.engines):
            return list(info.engines)
        alive = confirmed.live(queue.confirmations(), info.lease_s)
        return confirmed.reachable(confirmed.engine_views(alive))

    def set_engines(self, urls: Sequence[str] | None, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """See `GroupStream.set_engines`."""
        if urls is not None:
            urls = checked_engines(urls)
        self._live([calls.set_engines(urls)], timeout_s)

    # --- updates -------------------------------------------------------------------------------
    def plan(
        self,
        version: int,
        mode: PauseMode | None,
        *,
        label: str | None,
        wait_idle: bool | None,
        deadline_s: float,
        confirm_s: float,
        ack: Batch | Sequence[Batch] | None,
        post: bool,
    ) -> Plan:
        """Return the plan of an update; what is not given follows from the run's `weights.mode`.

        Raises:
            ValueError: no such mode, a bad version or time, a label that is none, `abort` without
                the wait for its end.
        """
        runs_as = self._hold.info.weights_mode
        if mode is None:
            mode = "keep" if runs_as == "async" else "abort"
        control.check_mode(mode)
        check_seconds(confirm_s=confirm_s)
        check_seconds(deadline_s=deadline_s)
        if not confirm_s > 0 or not deadline_s > 0:
            raise ValueError(
                f"confirm_s={confirm_s}, deadline_s={deadline_s}: both must be positive"
            )
        batches = [] if ack is None else [ack] if isinstance(ack, Batch) else list(ack)
        version = self.checked(version)
        if label is not None:
            calls.set_label(version, label)  # refuses an empty or endless one before the pause
        if mode == "abort" and wait_idle is False:
            raise ValueError(
                "wait_idle=False with mode 'abort': calls that are stopped are waited for, the "
                "engines hold their tokens until then; use mode 'keep'"
            )
        is_shared = runs_as == "colocated"
        wait_idle = mode == "abort" or (is_shared if wait_idle is None else wait_idle)
        return Plan(
            version=version,
            mode=mode,
            label=label,
            wait_idle=wait_idle,
            hides=post and not wait_idle,
            clears=is_shared and wait_idle,
            deadline_s=deadline_s,
            confirm_s=confirm_s,
            ack=batches,
            post=post,
        )

    def named(self, plan: Plan) -> list[ScriptCall[ControlAnswer]]:
        """Return what tells workers the engines' name of the weights that are about to come.

        One that has named other weights keeps that meaning until these are in place: what is
        sampled meanwhile may be of either, and the older version is the safe answer.
        """
        if plan.label is None:
            return []
        with self._lock:
            info = self._hold.patiently(self._hold.queue.info, plan.confirm_s)
        if info is not None and info.labels.get(plan.label, plan.version) != plan.version:
            return []
        return [calls.set_label(plan.version, plan.label)]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only update, or drain, of this stream.

        Raises:
            RuntimeError: there is one under way, in this thread or another.
        """
        self.take()
        try:
            yield
        finally:
            self.give()

    def take(self) -> None:
        """Begin what only one may do at a time; raises as `alone` does."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(BUSY)

    def give(self) -> None:
        """End it."""
        self._busy.release()

    def drain(self, timeout_s: float, interrupt: threading.Event) -> None:
        """See `GroupStream.drain`."""
        check_seconds(timeout_s=timeout_s)
        with self.alone():
            pausing = Pausing(self._hold, self._lock)
            try:
                pausing.begin("keep", 0.0, timeout_s, [])
                pausing.await_workers(timeout_s, idle=True, interrupt=interrupt)
            except BaseException:
                pausing.undo()
                raise

    @property
    def version(self) -> int:
        """Return the run's, as this trainer has it."""
        return self._hold.lineage.version

    def unhide(self, *, is_pushed: bool) -> None:
        """Give engines their old labels back, behind an update that failed."""
        if not self.naming.is_hiding:
            return
        if is_pushed:  # they have the new weights, and the old version
            self.naming.leave("the update failed behind its push")
            return
        try:
            with self._lock:
                # Behind a takeover they are the later trainer's.
                self._hold.patiently(self._hold.lineage.check, UNDO_TIMEOUT_S)
        except RollstreamError as error:
            self.naming.leave(error)
        else:
            self.naming.restore()

    def clear_engines(self, engines: Sequence[str]) -> None:
        """Have engines stop every call: what a killed worker asked for still runs there.

        No worker that lives has one. Engines answer first and stop the calls with their next step.
        """
        left, error = list(engines), ""
        for path, body in ABORT_ALL:
            posted = post_all(left, path, body, timeout_s=CLEAR_TIMEOUT_S)
            failed = [one for one in posted if one.error]
            left, error = [one.url for one in failed], failed[0].error if failed else ""
        new = set(left) - self._uncleared_engines
        self._uncleared_engines = set(left)
        if new:
            log.warning(
                "engines did not stop all calls (%s): of a worker that was killed some may still "
                "run in the block",
                error,
                extra={"run": self._hold.info.run, "engines": sorted(new)},
            )

    def finish(self, plan: Plan, update: WeightUpdate, pausing: Pausing) -> None:
        """End an update whose block is done: ack, engines, version, resume."""
        hold = self._hold
        with self._lock:
            # Behind a takeover nothing of the run or its engines is this trainer's to change.
            hold.patiently(hold.lineage.check, CALL_TIMEOUT_S)
        for batch in plan.ack:
            self._ack(batch)
        if plan.post:
            label, version = plan.engine_label, plan.version
            self.figures.not_told += self.naming.tell(update.engines, label, version)
        pausing.say_if_over()
        with self._lock:
            hold.lineage.version, hold.lineage.label = plan.version, plan.label
            first, _ = self._live(
                [calls.set_version(plan.version, plan.label), pausing.end()], CALL_TIMEOUT_S
            )
            pausing.ended()
        self._say_if_higher(first, plan.version)


class Updating:
    """One update as a context manager; `enter` and `leave` are the same for other threads."""

    def __init__(self, weights: Weights, hold: Hold, lock: threading.RLock, plan: Plan) -> None:
        self._weights, self._plan = weights, plan
        self._pausing = Pausing(hold, lock)
        self._update = WeightUpdate(plan.version, plan.mode)
        self._started_mono_s = 0.0

    def __enter__(self) -> WeightUpdate:
        update = self.enter(threading.Event())
        self._weights.block_thread = threading.get_ident()
        return update

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(is_failed=kind is not None)

    def enter(self, interrupt: threading.Event) -> WeightUpdate:
        """Pause the run; return once every live worker obeys.

        Raises:
            PauseNotConfirmed: one did not within `confirm_s`; the run goes on as before.
            RuntimeError: another update is under way.
            Interrupted: `interrupt` was set; the run goes on as before.
            RunFailed: the run was ended.
            StreamError: Redis did not answer in time.
            ConsumerTaken: a later trainer took over.
        """
        weights, plan, update = self._weights, self._plan, self._update
        weights.take()
        self._started_mono_s = time.monotonic()
        try:
            weights.checked(plan.version)
            self._pausing.begin(plan.mode, plan.deadline_s, plan.confirm_s, weights.named(plan))
            alive = self._pausing.await_workers(
                plan.confirm_s, idle=plan.wait_idle, interrupt=interrupt
            )
            update.workers = sorted(one.worker for one in alive)
            update.engines = weights.engines()
            if not update.engines:
                log.warning("no engine is known: name them with set_engines, or start a worker")
            if plan.hides:
                weights.naming.hide(update.engines, weights.version, plan.version)
            if plan.clears:
                weights.clear_engines(update.engines)
            update.entered_s = time.monotonic() - self._started_mono_s
            weights.figures.enter_s = update.entered_s
            weights.current = update
        except BaseException:
            self._end(is_failed=True, is_pushed=False)
            raise
        return update

    def leave(self, *, is_failed: bool) -> None:
        """End the update: as planned, or with the old version where it failed."""
        is_pushed = not is_failed
        try:
            if not is_failed:
                self._weights.finish(self._plan, self._update, self._pausing)
        except BaseException:
            is_failed = True
            raise
        finally:
            self._end(is_failed=is_failed, is_pushed=is_pushed)

    def _end(self, *, is_failed: bool, is_pushed: bool) -> None:
        weights = self._weights
        try:
            if is_failed:
                try:
                    weights.unhide(is_pushed=is_pushed)
                finally:
                    self._pausing.undo()
        finally:
            figures, lasted_s = weights.figures, time.monotonic() - self._started_mono_s
            figures.updates, figures.failed = figures.updates + 1, figures.failed + is_failed
            figures.update_s, figures.paused_s = lasted_s, figures.paused_s + lasted_s
            weights.current, weights.block_thread = None, 0
            weights.give()


def check_seconds(**given: float) -> None:
    """Refuse times that are none.

    Raises:
        ValueError: negative, or no number at all.
    """
    for name, value in given.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value}: expected seconds, 0 or more")
