"""The watchdog of a worker: a process whose event loop stands still ends, to be started again.

Owns the thread that notices, the stacks and the one line that say where it stood, and the exit code
of a process that cannot go on. Never touches a lease: whoever sweeps took them over long before.
Invariant: only time in which this process could run counts. The thread adds up its own short ticks,
so a process that was frozen (SIGSTOP, a paused container, a laptop asleep) is not ended for it: the
watchdog's clock stood still too. Nor is one whose loop waits in a debugger.

A thread sees everything but C code that keeps the GIL: there it cannot run itself. For that a timer
of the kernel counts CPU time, which a frozen process does not use either; each tick of the thread
winds it up again, and where it runs out, faulthandler writes the stacks without the GIL and SIGPROF
ends the process. (`faulthandler.dump_traceback_later` counts time on the wall: after a freeze it
would fire before the thread could wind it up.) What neither sees is C code that keeps the GIL and
uses no CPU; `/healthz` does not answer then.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import IO, Any

import structlog

from rollstream import log_sink
from rollstream.config import EXIT_STALLED
from rollstream.errors import RollstreamError

TICK_S = 0.25
MAX_FRAMES = 8
SAY_S = 2.0
"""How long the last words may take: standard error may be what the loop waits for."""
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.core.debugger")

log = structlog.get_logger("worker")


class Stalled(RollstreamError):
    """This process cannot go on; another one in its place can.

    Attributes:
        exit_code: what the process ends with.
    """

    exit_code = EXIT_STALLED


class Watchdog:
    """Watches one event loop from a thread."""

    def __init__(
        self,
        limit_s: float,
        *,
        lease_s: Callable[[], float],
        held: Callable[[], list[str]] = list,
        end: Callable[[int], None] = os._exit,
        stacks: IO[str] | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        """Prepare.

        Args:
            limit_s: how long the loop may stand still; never less than a lease, 0 is for ever.
            lease_s: of the run; behind it the leases are lost, which is said at once.
            held: lease ids in hand, for the message.
            end: ends the process with an exit code.
            stacks: where stacks are written; None is standard error.
            tick_s: how often the thread looks.
        """
        self._limit_s, self._lease_s, self._held = limit_s, lease_s, held
        self._end, self._stacks, self._tick_s = end, stacks, tick_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = 0
        self._turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running loop, which is this thread's, until `stop`."""
        if not self._limit_s:
            return
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._turn()
        if _has_cpu_timer():
            faulthandler.register(signal.SIGPROF, file=self._out(), all_threads=True, chain=True)
            self._wind_up()
        # A daemon: the process must not wait for it.
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(SAY_S)
            if _has_cpu_timer():
                signal.setitimer(signal.ITIMER_PROF, 0)
                faulthandler.unregister(signal.SIGPROF)

    def _turn(self) -> None:
        self._turns += 1
        assert self._loop is not None
        self._timer = self._loop.call_later(self._tick_s, self._turn)

    # --- in the thread ---------------------------------------------------------------------------
    def _watch(self) -> None:
        turns, stood_s, said = self._turns, 0.0, False
        before = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            self._wind_up()
            now = time.monotonic()
            # A longer tick is one in which this thread could not run either.
            stood_s += min(now - before, 2 * self._tick_s)
            before = now
            if self._turns != turns:
                turns, stood_s, said = self._turns, 0.0, False
                continue
            if stood_s >= self._lease_s() and not said:
                said = True
                where = self._where(stood_s)
                _speak(functools.partial(log.error, "event_loop_blocked", **where))
            if stood_s >= self._stall_s() and not self._is_debugged():
                self._finish(stood_s)
                return

    def _stall_s(self) -> float:
        return max(self._limit_s, self._lease_s())

    def _wind_up(self) -> None:
        if _has_cpu_timer():
            signal.setitimer(signal.ITIMER_PROF, self._stall_s())

    def _finish(self, stood_s: float) -> None:
        """Say where it stands, and end the process."""

        def last_words() -> None:
            log.error("event_loop_stalled", **self._where(stood_s), exit_code=EXIT_STALLED)
            log_sink.flush()  # the process ends without
            faulthandler.dump_traceback(self._out(), all_threads=True)

        _speak(last_words)
        self._end(EXIT_STALLED)

    def _where(self, stood_s: float) -> dict[str, Any]:
        """Return what both events say of the place at which the loop stands."""
        held = self._held()
        return {
            "stood_s": round(stood_s, 1),
            "task": self._task(),
            "at": [f"{f.filename}:{f.lineno} {f.name}" for f in self._stack()],
            "held": held[:MAX_FRAMES],
            "num_held": len(held),
        }

    def _task(self) -> str:
        """Return the name of the task that holds the loop: of a sample its lease id."""
        task = asyncio.current_task(self._loop)
        return "" if task is None else task.get_name()

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched)

    def _stack(self) -> list[traceback.FrameSummary]:
        """Return where the loop stands, innermost frame last."""
        frame = self._frame()
        return [] if frame is None else traceback.extract_stack(frame)[-MAX_FRAMES:]

    def _is_debugged(self) -> bool:
        frame = self._frame()
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(_DEBUGGERS):
                return True
            frame = frame.f_back
        return False

    def _out(self) -> IO[str]:
        return self._stacks or sys.stderr


def _speak(words: Callable[[], None]) -> None:
    """Say something, whatever standard error does."""
    speaker = threading.Thread(target=words, name="watchdog-speaks", daemon=True)
    speaker.start()
    speaker.join(SAY_S)


def _has_cpu_timer() -> bool:
    return hasattr(signal, "ITIMER_PROF") and hasattr(faulthandler, "register")
