"""How a trainer steers its run: its engines, pauses, single groups, and its end.

Owns that part of the face of `GroupStream`. Never waits for groups, and knows no batch. Invariant:
an outage of the server is waited for, `timeout_s` at the most, and ends in one clear error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rollstream.trainer import control
from rollstream.trainer.control import PauseMode
from rollstream.trainer.hold import Hold
from rollstream.updates.weights import Weights

ACK_TIMEOUT_S = 60.0
"""How long an ack, and whatever else a trainer asks for, outlasts a Redis outage."""


class Steering:
    """What a trainer may ask of its run beside batches; `GroupStream` makes it whole."""

    _hold: Hold
    _lock: threading.RLock
    _weights: Weights

    def engines(self) -> list[str]:
        """Return the root URLs of the engines: those of `set_engines`, else what workers found.

        Of the latter without those that every worker finds down. Inside `updating_weights` it is
        the list of that update, which does not change.
        """
        return self._weights.engines()

    def set_engines(self, urls: Sequence[str] | None) -> None:
        """Name the engines for every worker, in place of its `engine.urls`, from now on.

        Args:
            urls: root URLs, also `dns+http://…` and `router+http://…`; None gives every worker its
                own configuration again.

        Raises:
            ValueError: one is no URL, or the list is empty.
            StreamError: Redis did not answer in time.
        """
        self._weights.set_engines(urls)

    def pause(
        self,
        mode: PauseMode = "keep",
        deadline_s: float = 0.0,
        *,
        timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        """Have no sample started and no call made until `resume`; deadlines stand still meanwhile.

        Finished groups go on to come. A repeat replaces the mode and the deadline.

        Args:
            mode: `keep` lets calls in flight end; `abort` has workers stop them, uncharged.
            deadline_s: after so long the pause ends by itself; 0 is never.
            timeout_s: how long a Redis outage is waited for.

        Raises:
            ValueError: no such mode, or a bad time.
            RuntimeError: inside `updating_weights`.
            RunFailed: the run was ended.
            RunLost: Redis does not know the run any more.
            StreamError: Redis did not answer in time.
        """
        self._weights.pause(mode, deadline_s, timeout_s)

    def resume(self, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """End a pause; does nothing where there is none. Raises as `pause` does."""
        self._weights.resume(timeout_s)

    def drain(self, timeout_s: float = 600.0, interrupt: threading.Event | None = None) -> None:
        """Pause the run, and return once no engine has a call of it; `resume` goes on.

        Args:
            timeout_s: how long calls in flight may take to end.
            interrupt: set by another thread to give up, with `Interrupted`.

        Raises:
            PauseNotConfirmed: calls are left after `timeout_s`; the run goes on.
            RuntimeError: inside `updating_weights`.
            RunFailed: the run was ended.
            StreamError: Redis did not answer in time.
        """
        self._weights.drain(timeout_s, interrupt or threading.Event())

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
        with self._lock:
            control.abort_run(self._hold, reason, timeout_s)
