"""Which files, signals and ports a model's program can reach, by the kernel's Landlock.

Owns the rule set of one program. Never needs a privilege or a namespace. Invariant: what no rule
names is refused, and what this kernel's Landlock does not know is not asked of it (`abi()` says
what it knows: 1 files, 4 ports of TCP, 6 signals to others).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_VERSION = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_ALL_OF_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_LATER = 0xFFFF
_TCP = 3
_SCOPES = 3
_SIGNALS_SINCE, _TCP_SINCE = 6, 4
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


@functools.cache
def abi() -> int:
    """Return the version of Landlock here; 0 is none."""
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)))


def scopes_signals() -> bool:
    """Return whether a program can be kept from sending signals outside."""
    return abi() >= _SIGNALS_SINCE


class RuleSet:
    """What one program may reach; made before the fork, entered behind it."""

    def __init__(self, *, network: bool) -> None:
        self._handled = _ALL_OF_ABI.get(abi(), _ALL_LATER)
        tcp = 0 if network or abi() < _TCP_SINCE else _TCP
        scopes = _SCOPES if scopes_signals() else 0
        attributes = struct.pack("=QQQ", self._handled, tcp, scopes)
        size = 24 if scopes else 16 if abi() >= _TCP_SINCE else 8
        self._fd = self._call(_CREATE, attributes, ctypes.c_size_t(size), 0)

    def allow_reading(self, paths: Iterable[str]) -> None:
        """Let it read and execute what is at or below these paths; missing ones are none."""
        for path in paths:
            self._allow(path, _EXECUTE | _READ_FILE | _READ_DIR)

    def allow_writing(self, path: str) -> None:
        """Let it do everything to the file, or below the folder."""
        self._allow(path, self._handled)

    def _allow(self, path: str, rights: int) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if not os.path.isdir(path):
                    rights &= _FILE_RIGHTS
                rule = struct.pack("=Qi", rights & self._handled, fd)
                self._call(_ADD, self._fd, _PATH_BENEATH, rule, 0)
            finally:
                os.close(fd)

    def enter(self) -> None:
        """Put this process, and all that it starts, under the rules.

        Raises:
            OSError: the kernel did not take it.
        """
        self._call(_RESTRICT, self._fd, 0)

    def close(self) -> None:
        """Forget it, in the process that made it."""
        os.close(self._fd)

    @staticmethod
    def _call(number: int, *arguments: object) -> int:
        value = int(_libc().syscall(number, *arguments))
        if value < 0:
            raise OSError(ctypes.get_errno(), "landlock")
        return value


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
