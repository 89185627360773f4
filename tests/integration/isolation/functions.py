"""Functions of an operator, most of them hostile: what runs in the processes of a verifier."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def pid(payload: dict[str, Any]) -> int:
    """Return the process that it runs in."""
    return os.getpid()


def echo(payload: dict[str, Any]) -> Any:
    """Return what it got."""
    return payload


def mark(payload: dict[str, Any]) -> None:
    """Leave a file behind."""
    Path(payload["path"]).touch()


def wait(payload: dict[str, Any]) -> str:
    """Say that it began, and return when it may."""
    with open(payload["began"], "a") as file:
        file.write(f"{os.getpid()}\n")
    while not Path(payload["go"]).exists():
        time.sleep(0.01)
    return "done"


def swallow(payload: dict[str, Any]) -> None:
    """Survive every signal and exception that can be survived."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:  # noqa: BLE001 - that is the point
            pass


def segfault(payload: dict[str, Any]) -> None:
    """Read what is not there."""
    ctypes.string_at(0)


def eat(payload: dict[str, Any]) -> int:
    """Take ten gigabytes."""
    return len(bytearray(10 << 30))


def write(payload: dict[str, Any]) -> None:
    """Write a file that is too large."""
    with open(payload["path"], "wb") as file:
        file.writelines(bytes(1 << 20) for _ in range(payload["mb"]))


def leave(payload: dict[str, Any]) -> int:
    """Return, and leave a process that is nobody's child and in no known group."""
    return _escape(payload)


def leave_and_hang(payload: dict[str, Any]) -> None:
    """The same, and never return."""
    _escape(payload)
    while True:
        time.sleep(0.01)


def leave_and_die(payload: dict[str, Any]) -> None:
    """The same, and be killed."""
    _escape(payload)
    os.kill(os.getpid(), signal.SIGKILL)


def _escape(payload: dict[str, Any]) -> int:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            while True:
                time.sleep(1)
        os._exit(0)
    escaped = int(os.read(reader, 16))
    os.close(reader)
    os.close(writer)
    os.wait()
    with contextlib.suppress(KeyError):
        Path(payload["path"]).write_text(str(escaped))
    return escaped


def fork_five_times(payload: dict[str, Any]) -> int:
    """Become 32 processes, each in a session of its own; the first returns."""
    first = os.getpid()
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
    if os.getpid() != first:
        while True:
            time.sleep(1)
    return 5


def return_twice(payload: dict[str, Any]) -> str:
    """Return in two processes."""
    return "parent" if os.fork() else "child"


def leave_a_thread(payload: dict[str, Any]) -> int:
    """Return, and leave a thread that goes on."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def leave_the_process(payload: dict[str, Any]) -> None:
    """End the interpreter."""
    sys.exit(7)


def shut_the_pipe(payload: dict[str, Any]) -> None:
    """Close every file, the way back included, and go on."""
    os.closerange(3, 1024)
    while True:
        time.sleep(0.01)


def lie(payload: dict[str, Any]) -> None:
    """Write to the way back, in the name of another job."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                text = b'{"token": "another", "value": 1.0}'
                os.write(int(name), b"\0" + len(text).to_bytes(4, "little") + text)


def surroundings(payload: dict[str, Any]) -> dict[str, Any]:
    """Return what this process may do and has open."""
    num_sockets = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            num_sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return {
        "sockets": num_sockets,
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "file": resource.getrlimit(resource.RLIMIT_FSIZE),
        "group": os.getpgid(0) == os.getpid(),
    }
