"""Runs a model's program under limits, and leaves nothing of it behind.

Owns the folder, the processes and the pipes of each program from start to end. Never judges what it
printed, never lets it outlive the call. Invariant: on every path (it ended, hung, forked, was too
large, or we broke) all of its processes are gone and its folder is removed before the call ends.

`run_program` works anywhere; `run_here` is for a process that has no other children, as that of a
job, and saves a fork. It is isolation, not a sandbox against an attacker with a kernel exploit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from . import leftovers
from .confine import Confinement
from .program import Cause, ProgramLimits, ProgramResult, Starvation

MAIN = "main.py"
PATIENCE = 3.0
"""A program that gets no CPU is ended after so many times its time, and is `starved`."""
_MIN_PATIENCE_S = 5.0
_MAX_WAITING_THREADS = 4
"""A program with more of them, or with processes, waits for itself."""
MAX_ENTRIES = 2048
"""Files and folders that a program may make."""
_TICK_S = 0.05
_READ_BYTES = 1 << 16
_NUM_TICKS_A_COUNT = 5
_KEEPER_EXTRA_S = 30.0
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # A pool as large as the machine is more threads than a program may have.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
_MIN_CAPTURE = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


_running: set[int] = set()
"""First processes of the programs of this process that have not ended."""


class SandboxBroken(RuntimeError):
    """The program could not be run or ended as it must: no result, whatever it did."""


class Sink(Protocol):
    """Takes what a program writes to one pipe."""

    num_bytes: int

    def take(self, data: bytes) -> None:
        """Take the next bytes."""


class Head:
    """Keeps the beginning of a stream, counts the rest."""

    def __init__(self, max_bytes: int) -> None:
        self.kept, self.num_bytes = bytearray(), 0
        self._max_bytes = max_bytes

    def take(self, data: bytes) -> None:
        """Keep what there is room for."""
        self.num_bytes += len(data)
        self.kept += data[: self._max_bytes - len(self.kept)]


class Program:
    """One program: a folder, a fresh interpreter, its pipes. Closed on every path."""

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        limits: ProgramLimits,
        timeout_s: float,
        stdin: bytes = b"",
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        output_bytes: int | None = None,
        cpu_s: float | None = None,
        hides_memory: bool = False,
    ) -> None:
        """Start it.

        Args:
            files: name → text; `main.py` is what runs.
            limits: of the program.
            timeout_s: that it may take.
            stdin: what it can read.
            arguments: of `main.py`.
            pass_fds: file descriptors that it gets under the same numbers.
            output_bytes: kept of what it prints, in place of the limits' own.
            cpu_s: that it may use, where its clock is going to be restarted.
            hides_memory: it is ours, and hides what it holds from programs of the same user.
        """
        self.limits, self.timeout_s = limits, timeout_s
        self.max_cpu_s = limits.cpu_s(timeout_s if cpu_s is None else cpu_s)
        keep = limits.output_bytes if output_bytes is None else output_bytes
        self.stdout, self.stderr = Head(keep), Head(max(_MIN_CAPTURE, limits.output_bytes))
        self.killed_for: Cause | None = None
        self.timed_out = False
        self.starved: Starvation | None = None
        self._has_forked, self._hides_memory = False, hides_memory
        self._num_oom_kills = _num_oom_kills()
        self.status: int | None = None
        self._opened = contextlib.ExitStack()
        try:
            self._start(files, stdin, arguments, pass_fds)
        except BaseException:
            self._opened.close()
            raise

    def _start(
        self,
        files: Mapping[str, str],
        stdin: bytes,
        arguments: Sequence[str],
        pass_fds: Sequence[int],
    ) -> None:
        leftovers.adopt_orphans()
        folder = self.folder = leftovers.new_folder()
        self._opened.callback(leftovers.remove, folder)
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8", errors="surrogatepass")
        confinement = Confinement(
            folder, self.limits, self.max_cpu_s, hides_memory=self._hides_memory
        )
        self._opened.callback(confinement.close)
        self.layers = confinement.layers
        given: Any = subprocess.DEVNULL
        if stdin:
            # A file without a place: never full, and `/dev/stdin` can be opened, too.
            given = os.memfd_create("stdin")
            self._opened.callback(os.close, given)
            with open(given, "wb", closefd=False) as file:
                file.write(stdin)
            os.lseek(given, 0, os.SEEK_SET)
        self.started_mono_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", MAIN, *arguments],
            cwd=folder,
            env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=confinement.enter,
        )
        _running.add(self.pid)
        self._opened.callback(self._end)
        self.pidfd = -1
        with contextlib.suppress(OSError):  # where there is none, its end is seen at a tick
            self.pidfd = os.pidfd_open(self.process.pid)
            self._opened.callback(os.close, self.pidfd)

    @property
    def pid(self) -> int:
        """Of its first process, and of the group of all."""
        return self.process.pid

    def sinks(self) -> dict[int, Sink]:
        """Return its pipes by number."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return {
            self.process.stdout.fileno(): self.stdout,
            self.process.stderr.fileno(): self.stderr,
        }

    def seconds(self) -> float:
        """Return the time it had: without what it waited for a CPU."""
        return time.monotonic() - self.started_mono_s - self._waited_s()

    def _waited_s(self) -> float:
        """Return how long it waited for a CPU, where it did not itself keep them busy."""
        if self._has_forked:
            return 0.0
        try:
            tasks = os.listdir(f"/proc/{self.pid}/task")
            if len(tasks) > _MAX_WAITING_THREADS:
                return 0.0
            return max(_waited_s(self.pid, task) for task in tasks)
        except (OSError, ValueError, IndexError):
            return 0.0

    def restart_clock(self, timeout_s: float) -> None:
        """Give it so much time from now on."""
        self.timeout_s = timeout_s
        self.started_mono_s = time.monotonic() - self._waited_s()

    def has_ended(self) -> bool:
        """Return whether its first process ended; it is not waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def check(self, *, count_files: bool) -> bool:
        """Return whether it has to end now, and note why."""
        over = self._over_limit(count_files)
        if self.seconds() > self.timeout_s:
            self.timed_out = True
        elif time.monotonic() - self.started_mono_s > max(
            PATIENCE * self.timeout_s, self.timeout_s + _MIN_PATIENCE_S
        ):
            self.timed_out, self.starved = True, "cpu"
        elif max(self.stdout.num_bytes, self.stderr.num_bytes) > self.limits.printed_bytes:
            self.killed_for = "output"
        else:
            self.killed_for = over
        return self.timed_out or self.killed_for is not None

    def _over_limit(self, count_files: bool) -> Cause | None:
        tree = leftovers.descendants(self.pid)
        if tree:
            self._has_forked = True
            if len(tree) + 1 > self.limits.max_processes:
                return "processes"
            if sum(map(_resident_bytes, (self.pid, *tree))) > self.limits.memory_bytes:
                return "memory"
        if count_files:
            entries, size = leftovers.count(self.folder, max_entries=MAX_ENTRIES)
            size += leftovers.count_unlinked((self.pid, *tree), self.folder)
            if entries >= MAX_ENTRIES or size > self.limits.folder_bytes:
                return "files"
        return None

    def _end(self) -> None:
        """End its processes; the number of the group is its own until it is waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, self.status, usage = os.wait4(self.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(self.status)  # it is reaped here
        self.cpu_s = usage.ru_utime + usage.ru_stime
        _running.discard(self.pid)
        leftovers.end_children(spare=_running)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        """End it if it runs, and all that it started; remove its folder. Twice is once.

        Raises:
            Unkillable: a process did not go.
            OSError: a file did not.
        """
        self._opened.close()

    def result(self) -> ProgramResult:
        """Return how it ended; it is closed."""
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        number = -code if code < 0 else None
        killed_for = self.killed_for
        if code and not self.timed_out and _num_oom_kills() != self._num_oom_kills:
            self.starved = "memory"
        if number == signal.SIGXCPU or (number == signal.SIGKILL and self.cpu_s > self.max_cpu_s):
            killed_for = killed_for or "cpu"
        if number == signal.SIGXFSZ:
            killed_for = killed_for or "files"
        return ProgramResult(
            exit_code=None if number else code,
            signal=number,
            stdout=bytes(self.stdout.kept),
            stderr=bytes(self.stderr.kept),
            stdout_bytes=self.stdout.num_bytes,
            stderr_bytes=self.stderr.num_bytes,
            timed_out=self.timed_out,
            starved=self.starved,
            killed_for=killed_for,
            seconds=round(self.had_s, 4),
            layers=self.layers,
        )

    had_s: float = 0.0
    cpu_s: float = 0.0


def _num_oom_kills() -> int:
    """Return how many processes the kernel ended for want of memory; 0 where it does not say."""
    try:
        found = re.search(rb"^oom_kill (\d+)$", Path("/proc/vmstat").read_bytes(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _waited_s(pid: int, task: str) -> float:
    return int(Path(f"/proc/{pid}/task/{task}/schedstat").read_bytes().split()[1]) / 1e9


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def watch(
    programs: Sequence[Program],
    sinks: Mapping[int, Sink] | None = None,
    *,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Read what programs write until the first of them ended, or has to; then end all.

    Args:
        programs: running ones.
        sinks: further pipes to read, by number.
        until: asked whenever something was read: whether that is enough.
    """
    readers = {fd: sink for program in programs for fd, sink in program.sinks().items()}
    readers |= dict(sinks or {})
    endings = {program.pidfd for program in programs if program.pidfd >= 0}
    with selectors.DefaultSelector() as selector:
        for fd in (*readers, *endings):
            selector.register(fd, selectors.EVENT_READ)
        for fd in readers:  # a program can take back what made a pipe readable
            os.set_blocking(fd, False)
        next_check_s, num_ticks, ended = time.monotonic() + _TICK_S, 0, False
        while not ended:
            wait_s = max(0.0, next_check_s - time.monotonic())
            for key, _ in selector.select(wait_s):
                if key.fd in endings:
                    ended = True
                elif not _read(key.fd, readers[key.fd]):
                    selector.unregister(key.fd)
            ended |= until()
            if not ended and time.monotonic() >= next_check_s:
                num_ticks += 1
                count_files = num_ticks % _NUM_TICKS_A_COUNT == 0
                ended = any(program.has_ended() for program in programs)
                if not ended:
                    overdue = [one for one in programs if one.check(count_files=count_files)]
                    ended = bool(overdue)
                next_check_s = time.monotonic() + _TICK_S
    for program in programs:
        program.had_s = program.seconds()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)
    for fd, sink in readers.items():
        _drain(fd, sink)


def _read(fd: int, sink: Sink) -> bool:
    """Take what a pipe holds; return whether more may come."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return True
    sink.take(data)
    return bool(data)


def _drain(fd: int, sink: Sink) -> None:
    """Take what a pipe still holds; whoever keeps its other end open is not waited for."""
    held = 1 << 20  # no pipe holds more
    with contextlib.suppress(BlockingIOError):
        while held > 0 and (data := os.read(fd, _READ_BYTES)):
            held -= len(data)
            sink.take(data)


def run_here(
    source: str,
    *,
    stdin: str = "",
    limits: ProgramLimits,
    timeout_s: float,
    output_bytes: int | None = None,
) -> ProgramResult:
    """Run a program to its end; only for a process that has no other children.

    Raises:
        CannotConfine: not here.
        Unkillable: something of it is left.
        OSError: it could not be started, or its folder not be made or removed.
    """
    program = Program(
        {MAIN: source},
        limits=limits,
        timeout_s=timeout_s,
        stdin=stdin.encode("utf-8", "surrogatepass"),
        output_bytes=output_bytes,
    )
    with contextlib.closing(program):
        watch([program])
    return program.result()


def run_program(
    source: str, *, stdin: str = "", limits: ProgramLimits, timeout_s: float
) -> ProgramResult:
    """Run a program to its end: a fresh interpreter in a folder of its own, under `limits`.

    A process between adopts all that the program starts, and ends it.

    Raises:
        SandboxBroken: it could not be run, or not be ended; the message says why.
    """
    call = functools.partial(run_here, source, stdin=stdin, limits=limits, timeout_s=timeout_s)
    return keep(call, max(PATIENCE * timeout_s, timeout_s + _MIN_PATIENCE_S) + _KEEPER_EXTRA_S)


def keep(call: Callable[[], ProgramResult], timeout_s: float) -> ProgramResult:
    """Return what `call` returns in a process of its own, which ends with it.

    Raises:
        SandboxBroken: it raised, or did not return in time.
    """
    reader, writer = os.pipe()
    parent, keeper = os.getpid(), os.fork()
    if keeper == 0:
        code = 1
        try:
            os.close(reader)
            os.setpgid(0, 0)
            leftovers.die_with(parent)
            _tell(writer, call)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        told = json.loads(_read_all(reader, timeout_s))
    except ValueError as error:
        raise SandboxBroken("the process that keeps a program ended without a word") from error
    finally:
        os.close(reader)
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
    if "error" in told:
        raise SandboxBroken(told["error"])
    told |= {name: b64decode(told[name]) for name in ("stdout", "stderr")}
    told["layers"] = tuple(told["layers"])
    return ProgramResult(**told)


def _tell(writer: int, call: Callable[[], ProgramResult]) -> None:
    """Call in the keeper, and write what became of it."""
    try:
        told = asdict(call())
        told |= {name: b64encode(told[name]).decode() for name in ("stdout", "stderr")}
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    with open(writer, "wb") as pipe:
        pipe.write(json.dumps(told).encode())


def _read_all(fd: int, timeout_s: float) -> bytes:
    """Return what comes until the other end is closed, or what came in time."""
    limit, parts = time.monotonic() + timeout_s, []
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(0.0, limit - time.monotonic())):
            data = os.read(fd, _READ_BYTES)
            if not data:
                break
            parts.append(data)
    return b"".join(parts)
