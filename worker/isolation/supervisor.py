"""The processes of one verifier: how many there are, and what becomes of those that end.

Owns every server process, and whatever loses its parent below. Never takes a job. Invariant: there
are between `verifier.processes` and `max_processes` servers until the end is asked for; of one that
died, whoever waits for its job is told, and nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis
import structlog

from rollstream.heartbeat import Heartbeat

from . import leftovers
from .desk import Desk
from .inboxes import Inboxes
from .messages import failure

TICK_S = 0.2
"""How often waiting jobs are counted."""
DRAIN_S = 30.0
"""After SIGTERM, running jobs have so long; then they are killed, and that is told."""
_QUICK_DEATH_S = 5.0
_MAX_BACKOFF_S = 5.0
_ENDS = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS = (signal.SIGCHLD, *_ENDS)
log = structlog.get_logger("verifier")


@dataclass(frozen=True, slots=True)
class _Process:
    slot: int
    started_mono_s: float


class Supervisor:
    """Keeps servers running, more while jobs wait and fewer when there is nothing to do."""

    def __init__(
        self,
        serve: Callable[[int], None],
        *,
        desk: Desk,
        inboxes: Inboxes,
        num_waiting: Callable[[], int],
        processes: int,
        max_processes: int,
        idle_s: float,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Prepare.

        Args:
            serve: runs one server in its forked process until it shall end; takes its slot.
            desk: with `max_processes` slots.
            inboxes: where the end of a job is told whose server died.
            num_waiting: jobs that wait in the queue; raises `redis.RedisError`.
            processes: to begin with, and at least.
            max_processes: at most.
            idle_s: after how long without need one server ends.
            heartbeat: beats with the loop.
        """
        self._serve, self._desk, self._inboxes = serve, desk, inboxes
        self._num_waiting = num_waiting
        self._min, self._max, self._idle_s = processes, max_processes, idle_s
        self._heartbeat = heartbeat or Heartbeat(None)
        self._servers: dict[int, _Process] = {}
        self._needed_mono_s = time.monotonic()
        """When all of them were last needed."""
        self._has_waited = False
        self._pause_until_mono_s = self._backoff_s = 0.0
        self._end_mono_s: float | None = None

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, and until every server ended."""
        leftovers.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            while True:
                self._heartbeat.beat()
                self._reap()
                if self._end_mono_s is None:
                    self._scale()
                elif not self._servers:
                    break
                elif time.monotonic() >= self._end_mono_s:
                    self._send(signal.SIGKILL)
                got = signal.sigtimedwait(_SIGNALS, TICK_S)
                # Behind a SIGSTOP that was longer than the wait, CPython makes a signal up from
                # memory that nobody wrote: only these two are believed.
                if got is not None and got.si_signo in _ENDS:
                    self._ask_to_end()
        finally:
            leftovers.end_children()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _ask_to_end(self) -> None:
        """Let running jobs end; asked twice, do not."""
        first = self._end_mono_s is None
        self._end_mono_s = time.monotonic() + (DRAIN_S if first else 0.0)
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # --- how many -------------------------------------------------------------------------------
    def _scale(self) -> None:
        now = time.monotonic()
        if now >= self._pause_until_mono_s:
            for _ in range(self._min - len(self._servers)):
                self._fork()
        waiting = self._count_waiting()
        # One look may catch a job on its way from the queue to a server that is free.
        if waiting and self._has_waited and now >= self._pause_until_mono_s:
            room = self._max - len(self._servers)
            for _ in range(min(waiting, room, len(self._servers))):
                self._fork()
        self._has_waited = waiting > 0
        kept = [p.slot for p in self._servers.values() if not self._desk.is_retired(p.slot)]
        if waiting or len(kept) <= self._min or all(map(self._desk.is_busy, kept)):
            self._needed_mono_s = now
        elif now - self._needed_mono_s >= self._idle_s:
            self._desk.retire(max(kept))
            self._needed_mono_s = now - self._idle_s + min(1.0, self._idle_s)

    def _count_waiting(self) -> int:
        if self._max == self._min:
            return 0
        try:
            return self._num_waiting()
        except redis.RedisError:  # the servers say so
            return 0

    def _fork(self) -> None:
        used = {process.slot for process in self._servers.values()}
        slot = next(number for number in range(self._max) if number not in used)
        self._desk.clear(slot)
        try:
            pid = os.fork()
        except OSError as error:
            log.error("verifier_process_not_made", error=str(error))
            self._back_off()
            return
        if pid == 0:
            code = 1
            try:
                self._servers.clear()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                self._serve(slot)
                code = 0
            except BaseException as error:  # noqa: BLE001 - it must not run on in the supervisor's code
                log.error("verifier_process_broke", slot=slot, error=repr(error))
            finally:
                os._exit(code)
        self._servers[pid] = _Process(slot, time.monotonic())

    def _back_off(self) -> None:
        self._backoff_s = min(max(0.1, 2 * self._backoff_s), _MAX_BACKOFF_S)
        self._pause_until_mono_s = time.monotonic() + self._backoff_s

    # --- what ended -----------------------------------------------------------------------------
    def _reap(self) -> None:
        died = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            process = self._servers.pop(pid, None)
            if process is not None:
                died |= self._note_end(process, status)
        if died:
            self._end_orphans()

    def _note_end(self, process: _Process, status: int) -> bool:
        """Tell whoever waits for its job; return whether it died."""
        code = os.waitstatus_to_exitcode(status)
        address = self._desk.address(process.slot)
        self._desk.clear(process.slot)
        if code == 0 and not address:
            self._backoff_s = 0.0
            return False
        lived_s = time.monotonic() - process.started_mono_s
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        log.warning("verifier_process_died", slot=process.slot, how=how)
        if lived_s < _QUICK_DEATH_S:
            self._back_off()
        if address:
            text = f"the process that served {address.get('job')} died ({how})"
            try:
                self._inboxes.push(
                    address["run"], address["inbox"], failure(address["token"], text, "crashed")
                )
            except (redis.RedisError, KeyError, ValueError) as error:
                log.error("end_of_job_not_told", error=str(error))
        return True

    def _end_orphans(self) -> None:
        """Kill what a dead server left: it is ours now, and no server's."""
        limit = time.monotonic() + _MAX_BACKOFF_S
        while time.monotonic() < limit:
            # In this order: what a server forks meanwhile is in neither list.
            found, kept = leftovers.descendants(os.getpid()), set(self._servers)
            for pid in self._servers:
                kept.update(leftovers.descendants(pid))
            orphans = [pid for pid in found if pid not in kept]
            if not orphans:
                return
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Collect those that ended, and no server: its end is to be noted."""
        for pid in leftovers.descendants(os.getpid()):
            if pid not in self._servers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
