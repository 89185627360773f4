"""One pause of a run that this process set, from its beginning to its end.

Owns the wait for the workers that have to obey, and what is left behind: a pause that stood before
and has no deadline is somebody's wish, and stands again afterwards. Never moves a version.
Invariant: while workers are waited for, the queue clock goes on (dead ones are told by it) and the
pause stands, whoever resumes and whatever Redis forgets.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from rollstream.errors import (
    ConsumerTaken,
    PauseNotConfirmed,
    RollstreamError,
    RunFailed,
    RunLost,
    StreamError,
)
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import Confirmation
from rollstream.runs import OUTAGES, Interrupted
from rollstream.trainer import control
from rollstream.trainer.control import PauseMode
from rollstream.trainer.hold import Hold
from rollstream.trainer.lineage import Fenced, RunMissing
from rollstream.updates import confirmed

log = logging.getLogger("rollstream.stream")

UNDO_TIMEOUT_S = 5.0
"""How long a failed update tries to resume; then the pause's deadline does."""
FIRST_POLL_S = 0.002
MAX_POLL_S = 0.05
LOOK_S = 0.25
"""Between two looks, while workers are waited for, at whether the pause still stands."""


class Pausing:
    """One pause that this process set, until it ends it."""

    def __init__(self, hold: Hold, lock: threading.RLock) -> None:
        self._hold, self._lock = hold, lock
        self._mode: PauseMode = "keep"
        self._deadline_s = 0.0
        self._seq = 0
        self._standing: ScriptCall[ControlAnswer] | None = None
        """A pause that stood before and has no deadline: somebody wants it to last."""
        self._was_here = False
        self._looked_mono_s = 0.0

    def begin(
        self,
        mode: PauseMode,
        deadline_s: float,
        timeout_s: float,
        before: list[ScriptCall[ControlAnswer]],
    ) -> None:
        """Pause the run, in one round trip behind what is to be said first."""
        self._mode, self._deadline_s = mode, deadline_s
        pause = calls.pause(mode, deadline_s, self._hold.lineage.consumer)
        with self._lock:
            hold = self._hold
            self._was_here = hold.paused_here
            self._standing = hold.patiently(self._lasting_pause, timeout_s)
            answers = hold.patiently(lambda: control.change_all(hold, [*before, pause]), timeout_s)
            hold.mark_paused(True)
        self._seq = answers[-1].control_seq

    def _lasting_pause(self) -> ScriptCall[ControlAnswer] | None:
        queue = self._hold.queue
        fields = ("state", "pause_mode", "pause_until", "pause_by")
        found: Any = queue.client.hmget(f"{queue.prefix}m", fields)
        state, mode, until, who = (b"" if value is None else bytes(value) for value in found)
        if state != b"paused" or until not in (b"", b"0"):
            return None
        return calls.pause("abort" if mode == b"abort" else "keep", trainer=who.decode())

    def await_workers(
        self, confirm_s: float, *, idle: bool, interrupt: threading.Event
    ) -> list[Confirmation]:
        """Return the live workers once all of them obey.

        Raises:
            PauseNotConfirmed: one did not within `confirm_s`.
            Interrupted: `interrupt` was set.
            RunFailed: the run was ended.
            StreamError: Redis did not answer in time.
        """
        limit, poll_s = time.monotonic() + confirm_s, FIRST_POLL_S
        while True:
            missing: list[Confirmation] = []
            trouble: Exception | None = None
            self._hold.refuse_if_closed()
            try:
                with self._hold.queue.within(max(0.1, limit - time.monotonic())):
                    self._keep_paused()
                    alive = confirmed.live(
                        self._hold.queue.confirmations(), self._hold.info.lease_s
                    )
                missing = confirmed.disobedient(alive, self._seq, idle=idle)
                if not missing:
                    return alive
            except (Fenced, RunMissing, *OUTAGES) as error:
                trouble, self._looked_mono_s = error, 0.0
            if interrupt.is_set():
                raise Interrupted
            if time.monotonic() >= limit:
                raise self._late(missing, trouble, confirm_s)
            interrupt.wait(poll_s)
            poll_s = min(MAX_POLL_S, 1.5 * poll_s)

    def _late(
        self, missing: Sequence[Confirmation], trouble: Exception | None, confirm_s: float
    ) -> StreamError:
        if trouble is not None:
            return StreamError(
                f"run {self._hold.queue.run!r}: whether workers obey the pause could not be read "
                f"for {confirm_s:g} s: {trouble or type(trouble).__name__}"
            )
        said = confirmed.not_confirmed(missing, self._seq, mode=self._mode, waited_s=confirm_s)
        return PauseNotConfirmed(f"run {self._hold.queue.run!r}: {said}",
                                 tuple(one.worker for one in missing))  # fmt: skip

    def _keep_paused(self) -> None:
        """Keep the queue clock going, by which dead workers are told, and the pause standing."""
        now = time.monotonic()
        if now - self._looked_mono_s < LOOK_S:
            return
        # Whoever has the lock (another thread that iterates) does the same meanwhile.
        if self._lock.acquire(blocking=False):
            try:
                self._hold.pulse()
            finally:
                self._lock.release()
        info = self._hold.queue.info()
        if info is None:
            raise RunMissing(f"Redis has no run {self._hold.queue.run!r}")
        if info.state != "paused" or info.control_seq < self._seq:
            # Resumed by somebody, or a Redis that lost its last moments; an ended run says so.
            with self._lock:
                pause = calls.pause(self._mode, self._deadline_s, self._hold.lineage.consumer)
                self._seq = control.change(self._hold, pause).control_seq
        self._looked_mono_s = now

    def end(self) -> ScriptCall[ControlAnswer]:
        """Return what ends this pause: a resume, or the pause that stood before.

        One that somebody else set meanwhile is theirs to end.
        """
        return self._standing or calls.resume(self._hold.lineage.consumer)

    def ended(self) -> None:
        """Count the pause as ended."""
        self._hold.mark_paused(self._was_here)

    def undo(self) -> None:
        """Let the run go on, with the version that it has; what prevents that is logged."""
        hold = self._hold
        deadline = f"ends by itself within {self._deadline_s:g} s" if self._deadline_s else (
            "stays: rollstream resume ends it"
        )  # fmt: skip
        try:
            with self._lock:
                hold.mark_paused(self._was_here)
                hold.patiently(self._end_of_ours, UNDO_TIMEOUT_S)
        except ConsumerTaken:
            log.warning("the pause is left to the trainer that took the run over")
        except (RunFailed, RunLost):
            pass  # nothing is paused any more
        except RollstreamError as error:
            log.warning("the pause could not be ended (%s); it %s", error, deadline,
                        extra={"run": hold.queue.run})  # fmt: skip

    def _end_of_ours(self) -> None:
        self._hold.lineage.check()  # a pause of a later trainer is none of ours
        control.change(self._hold, self.end())

    def say_if_over(self) -> None:
        """Log where the pause did not last as long as the push."""
        hold = self._hold
        with contextlib.suppress(*OUTAGES):
            info = hold.queue.info()
            if info is not None and info.state == "running":
                log.warning(
                    "the pause ended before the new weights were in place, by its deadline or by "
                    "somebody's resume: calls since then have tokens of both versions",
                    extra={"run": hold.queue.run, "deadline_s": self._deadline_s},
                )
