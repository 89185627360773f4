"""What confines a model's program between fork and exec, and which of it this machine has.

Owns the order in which that happens, and the uid of each program where this process is root. Never
starts anything. Invariant: `Confinement.enter` leaves a process that cannot get back what it lost;
whatever could not be applied raises, and the program does not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pwd
import random
import resource
import signal
import socket
import stat
import struct
import sys
import sysconfig
from pathlib import Path

from . import landlock, seccomp
from .program import ProgramLimits

LAYERS = {
    "rlimits": "CPU, memory, processes, file size, open files; no core files",
    "uid": "a user of its own for each program",
    "seccomp": "no sockets, no leaving the process group, no tracing, namespaces, limits of others",
    "landlock": "files: Python and its own folder; nothing else can be read or written",
    "signals": "none to processes outside",
}
"""What can confine a program, and what each is for."""
MAX_OPEN_FILES = 64
MAX_STACK_BYTES = 64 << 20
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _AMBIENT_RAISE = 38, 47, 2
_CAP_DAC_READ_SEARCH = 2
_CAP_VERSION_3 = 0x20080522
_UIDS = range(20_000, 60_000)
_SYSTEM_READABLE = (
    "/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/localtime", "/etc/timezone", "/etc/mime.types", "/dev/urandom", "/dev/random",
    "/dev/zero", "/sys/devices/system/cpu",
)  # fmt: skip


class CannotConfine(RuntimeError):
    """This process may not run programs of a model here; the message says what to change."""


def layers() -> tuple[str, ...]:
    """Return what confines programs here, of `LAYERS`."""
    has_uid = os.getuid() == 0
    has = {
        "rlimits": True,
        "uid": has_uid,
        "seccomp": seccomp.available(),
        "landlock": landlock.abi() > 0,
        "signals": has_uid or landlock.scopes_signals() or seccomp.available(),
    }
    return tuple(name for name in LAYERS if has[name])


def hide_memory() -> None:
    """Keep what runs as the same user out of this process's memory and environment.

    They hold the addresses and passwords of servers. Forked processes inherit it; root needs none.
    """
    if os.getuid() != 0:
        with contextlib.suppress(OSError):
            _call_prctl(_PR_SET_DUMPABLE, 0)


class Uid:
    """A user that no other program has while this lives: no account, no process of anybody."""

    def __init__(self) -> None:
        self._lock = socket.socket(socket.AF_UNIX)
        for number in random.sample(_UIDS, 64):
            with contextlib.suppress(OSError):
                # An abstract name: it goes with the process, however that ends.
                self._lock.bind(f"\0rollstream-program-{number}")
                if not _is_account(number):
                    self.number = number
                    return
                self._lock.close()
                self._lock = socket.socket(socket.AF_UNIX)
        raise CannotConfine("no uid is free for a program")

    def close(self) -> None:
        """Leave it to others."""
        self._lock.close()


def _is_account(number: int) -> bool:
    with contextlib.suppress(KeyError):
        pwd.getpwuid(number)
        return True
    return False


class Confinement:
    """Confines one program; made before the fork, entered behind it."""

    def __init__(
        self, folder: str, limits: ProgramLimits, cpu_s: int, *, hides_memory: bool = False
    ) -> None:
        """Prepare what a program in `folder` gets.

        Args:
            folder: its own.
            limits: of it.
            cpu_s: of each process.
            hides_memory: it may; one of ours, beside a program of the same user.

        Raises:
            CannotConfine: this process is root, and can neither change its user nor confine root.
        """
        self._limits, self._parent = limits, os.getpid()
        self._cpu_s, self._hides_memory = cpu_s, hides_memory
        self._uid = Uid() if os.getuid() == 0 else None
        if self._uid is not None:
            for name in (folder, *(entry.path for entry in os.scandir(folder))):
                os.chown(name, self._uid.number, self._uid.number)
        self._num_processes = limits.max_processes
        if self._uid is None:
            self._num_processes += _num_threads_of_system()
        self._rules: landlock.RuleSet | None = None
        if landlock.abi():
            self._rules = landlock.RuleSet(network=limits.network)
            self._rules.allow_reading((*_SYSTEM_READABLE, *_python()))
            self._rules.allow_writing(folder)
            self._rules.allow_writing("/dev/null")
        self._keeps_reading = self._uid is not None and not _python_is_public()
        if self._keeps_reading and self._rules is None:
            raise CannotConfine(
                f"root runs the verifier, programs get a user of their own, and {sys.executable} "
                "cannot be read by others: run the verifier as another user, or with a Python that "
                "others can read"
            )
        hide_memory()
        self.layers = layers()
        _libc()  # opened before the fork

    def enter(self) -> None:
        """Confine the calling process, which is the forked one; for `preexec_fn`.

        Raises:
            OSError: the kernel refused a part of it.
        """
        self._set_limits()
        with contextlib.suppress(OSError):  # the program is what a full memory ends first
            Path("/proc/self/oom_score_adj").write_bytes(b"1000")
        if self._uid is not None:
            self._change_user(self._uid.number)
        # Behind the change of user, which clears it.
        _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
        _call_prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self._rules is not None:
            self._rules.enter()
        if seccomp.available():
            shares_user = self._uid is None and not landlock.scopes_signals()
            own = os.getpid() if shares_user else 0
            seccomp.enter(
                seccomp.build(
                    network=self._limits.network,
                    own_signals_only=own,
                    hides_memory=self._hides_memory,
                )
            )

    def _set_limits(self) -> None:
        limits = self._limits
        for what, value in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
            (resource.RLIMIT_NPROC, self._num_processes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            _lower(what, value, value)
        # SIGXCPU first, which says why; SIGKILL a second later for those that catch it.
        _lower(resource.RLIMIT_CPU, self._cpu_s, self._cpu_s + 1)
        _lower(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK)[0], MAX_STACK_BYTES)

    def _change_user(self, uid: int) -> None:
        os.setgroups([])
        if self._keeps_reading:
            _call_prctl(_PR_SET_KEEPCAPS, 1)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if self._keeps_reading:
            _keep_only_reading()

    def close(self) -> None:
        """Give back what the parent holds for it."""
        if self._rules is not None:
            self._rules.close()
        if self._uid is not None:
            self._uid.close()


def _lower(what: int, soft: int, hard: int) -> None:
    """Set a limit, but never over what this process itself may have."""
    ceiling = resource.getrlimit(what)[1]
    if ceiling != resource.RLIM_INFINITY:
        hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(what, (soft, hard))


def _keep_only_reading() -> None:
    """Drop every capability but that to read Python, where only root can; Landlock bounds it.

    Raises:
        OSError: the kernel refused.
    """
    bit = 1 << _CAP_DAC_READ_SEARCH
    header = struct.pack("=Ii", _CAP_VERSION_3, 0)
    data = struct.pack("=6I", bit, bit, bit, 0, 0, 0)
    if _libc().capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")
    _call_prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)


def _num_threads_of_system() -> int:
    """Return how many threads there are, of whomever.

    `RLIMIT_NPROC` counts all processes of the user, those of other containers included, which
    cannot be counted from here: what there is of anybody is no less.
    """
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


@functools.cache
def _python() -> tuple[str, ...]:
    """Return the folders and files that the interpreter reads."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    found |= {os.path.realpath(path) for path in (sys.executable, *found)}
    found |= {path for path in sysconfig.get_paths().values() if path}
    covered = ("/usr", "/lib", "/bin")
    return tuple(path for path in sorted(found) if path != "/" and not path.startswith(covered))


@functools.cache
def _python_is_public() -> bool:
    """Return whether other users than this one can run the interpreter."""
    names = (sys.executable, os.path.realpath(sys.executable), os.__file__)
    return all(_is_public(Path(name).absolute()) for name in names)


def _is_public(path: Path) -> bool:
    try:
        folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
        return folders and bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call_prctl(option: int, *arguments: int) -> None:
    """Call it.

    Raises:
        OSError: it failed.
    """
    if _libc().prctl(option, *map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:4])):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
