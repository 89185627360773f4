"""The process that jobs run in: forked warm, bounded, replaced whenever it is not as new.

Owns the fork, the pipe to it, its limits, and its end with all that it started. Never talks to
Redis. Invariant: `run` returns what the job returned, or raises within the time given, and when it
has raised, no process of the job is left.

A process runs one job after another, because a fork costs more than most jobs: up to `MAX_JOBS`
built-in ones, or a single function of the operator's. One that left processes or threads behind, or
grew, is replaced at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rollstream.settings import VerifierTable

from . import leftovers
from .messages import MAX_RESULT_BYTES, failure
from .table import Job, perform

MAX_JOBS = 256
"""Of one process."""
_MAX_GROWN_SHARE = 0.25
"""Of `verifier.memory_mb`: a process that grew by more is replaced."""
_TICK_S = 0.1
"""How soon a server that lost its supervisor notices, while a job runs."""
_HEAD_BYTES = 5
_CLEAN, _DIRTY = b"\0", b"\1"
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


class Crashed(Exception):
    """The process ended before it answered, or answered what is no answer."""


class Overdue(Exception):
    """The job did not end in time."""


class Abandoned(Exception):
    """Whoever started this server is gone, and so is whoever could be told."""


class Pen:
    """The one process of a server that jobs run in."""

    def __init__(
        self,
        table: Mapping[str, Job],
        limits: VerifierTable,
        *,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; the first process is forked by `prepare` or the first job.

        Args:
            table: what may run.
            limits: of a process.
            is_abandoned: asked while a job runs.
        """
        self._table, self._limits, self._is_abandoned = table, limits, is_abandoned
        self._pid, self._num_jobs, self._first_kb = 0, 0, 0
        self._pipe: socket.socket | None = None

    def prepare(self) -> None:
        """Fork the process for the next job, where there is none."""
        if self._pipe is not None:
            return
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_pen(theirs, server, self._table, self._limits)
        theirs.close()
        with contextlib.suppress(OSError):  # it does so too; whoever is first
            os.setpgid(pid, pid)
        self._pid, self._pipe, self._num_jobs = pid, ours, 0
        self._first_kb = _size_kb(pid)

    def run(self, name: str, token: str, payload: Any, timeout_s: float) -> bytes:
        """Return the message that the job ends with.

        Args:
            name: an entry of the table.
            token: that the message must carry.
            payload: of the job.
            timeout_s: until it is killed.

        Raises:
            Overdue: the time was over.
            Crashed: the process ended, or gave no message.
            Abandoned: nobody waits any more.
        """
        try:
            self.prepare()
        except OSError as error:
            raise Crashed(f"no process can be made for it: {error}") from error
        try:
            head, message = self._exchange(
                json.dumps([name, token, payload]).encode(), time.monotonic() + timeout_s
            )
            if not _carries(message, token):
                raise Crashed("its process answered what is no message")
        except BaseException:
            self.end()
            raise
        self._num_jobs += 1
        if head != _CLEAN or self._is_used_up(name):
            self.end()
        return message

    def _exchange(self, request: bytes, limit_mono_s: float) -> tuple[bytes, bytes]:
        assert self._pipe is not None
        try:
            self._pipe.settimeout(max(0.001, limit_mono_s - time.monotonic()))
            self._pipe.sendall(len(request).to_bytes(4, "little") + request)
            head = self._receive(_HEAD_BYTES, limit_mono_s)
            size = int.from_bytes(head[1:], "little")
            if size > MAX_RESULT_BYTES:
                raise Crashed(f"its process answered {size} bytes")
            return head[:1], self._receive(size, limit_mono_s)
        except TimeoutError:
            raise Overdue from None
        except OSError:  # it is gone
            raise Crashed(self._how_it_ended()) from None

    def _receive(self, size: int, limit_mono_s: float) -> bytes:
        assert self._pipe is not None
        data = bytearray()
        while len(data) < size:
            left_s = limit_mono_s - time.monotonic()
            if left_s <= 0:
                raise Overdue
            if self._is_abandoned():
                raise Abandoned
            self._pipe.settimeout(min(left_s, _TICK_S))
            try:
                part = self._pipe.recv(size - len(data))
            except TimeoutError:
                if self._has_ended():  # though a process of its own may hold the pipe
                    raise Crashed(self._how_it_ended()) from None
                continue
            if not part:
                raise Crashed(self._how_it_ended())
            data += part
        return bytes(data)

    def _has_ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._pid, options) is not None

    def _how_it_ended(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # closing the pipe is as bad as ending
        found = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        if found.si_code == os.CLD_EXITED:
            return f"its process ended with exit code {found.si_status}"
        return f"its process was ended by {signal.Signals(found.si_status).name}"

    def _is_used_up(self, name: str) -> bool:
        """Return whether the next job needs another process."""
        if not self._table[name].shares_process or self._num_jobs >= MAX_JOBS:
            return True
        if leftovers.descendants(os.getpid()) != [self._pid]:
            return True
        grown_kb = _size_kb(self._pid) - self._first_kb
        return grown_kb > 1024 * self._limits.memory_mb * _MAX_GROWN_SHARE

    def end(self) -> None:
        """End the process and all that it started; the next job gets a new one.

        Raises:
            Unkillable: some did not go.
        """
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            # Whatever left its group or lost its parent is a descendant of ours all the same.
            leftovers.end_children([self._pid])
            leftovers.remove_abandoned()


def _carries(message: bytes, token: str) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(message)
        return isinstance(found, dict) and found.get("token") == token
    return False


def _size_kb(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[0]) * _PAGE_KB
    except (OSError, ValueError, IndexError):
        return 0


# --- in the forked process -----------------------------------------------------------------------
def _be_a_pen(
    pipe: socket.socket, server: int, table: Mapping[str, Job], limits: VerifierTable
) -> NoReturn:
    """Run jobs until killed; returns to nobody."""
    try:
        os.setpgid(0, 0)
        leftovers.die_with(server)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _close_others(pipe.fileno())
        _set_limits(limits)
        random.seed()
        while True:
            _run_one(pipe, table)
    except BaseException:  # noqa: BLE001 - nothing of the server's may run on in this process
        os._exit(1)


def _run_one(pipe: socket.socket, table: Mapping[str, Job]) -> None:
    own = os.getpid()
    size = int.from_bytes(_read(pipe, 4), "little")
    name, token, payload = json.loads(_read(pipe, size))
    try:
        message = perform(table[name], token, payload)
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like are the job's, too
        message = failure(token, f"{type(error).__name__}", "raised")
    if os.getpid() != own:
        os._exit(0)  # a fork of the job's own, which came back here
    signal.setitimer(signal.ITIMER_REAL, 0)
    state = _CLEAN if threading.active_count() == 1 else _DIRTY
    pipe.sendall(state + len(message).to_bytes(4, "little") + message)


def _read(pipe: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pipe.recv(size - len(data))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _close_others(keep: int) -> None:
    """Put nothing in the place of every inherited file: the server's connections are not a job's.

    Not by closing: objects of the server's still name these numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in (1, 2, keep, nothing):
            with contextlib.suppress(OSError):  # the listing's own
                os.fstat(fd)
                os.dup2(nothing, fd, inheritable=fd == 0)


def _set_limits(limits: VerifierTable) -> None:
    """Bound memory (over what the verifier itself has), files, and core files."""
    own = _size_kb(os.getpid()) << 10
    lower(resource.RLIMIT_AS, own + (limits.memory_mb << 20))
    lower(resource.RLIMIT_FSIZE, limits.file_mb << 20)
    lower(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError):  # what a full memory ends first
        Path("/proc/self/oom_score_adj").write_text("500")


def lower(what: int, value: int) -> None:
    """Set a limit, unless it is lower already."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))
