"""Programs under the sandbox: as root, as an ordinary user, and with layers taken away.

The user "plain" is what the verifier is in a container: no capability but that to read the Python
of this machine, where only root can.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from worker.isolation import code, landlock, seccomp
from worker.isolation.program import ProgramLimits, ProgramResult
from worker.isolation.sandbox import run_here

NOBODY = 65534
SMALL = ProgramLimits(
    memory_bytes=256 << 20, max_processes=8, file_bytes=1 << 20, output_bytes=4096
)
USERS = ["root", "plain", "plain, no landlock", "plain, rlimits alone"]
"""Who runs the sandbox, and which layers it is left."""


class Raised(Exception):
    """What the call raised in its process."""


def become(user: str) -> None:
    """Be that user from now on, in a process of one's own."""
    if user == "root":
        return
    if os.getuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(8, 1, 0, 0, 0) == 0  # keep capabilities
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        data = struct.pack("=6I", 4, 4, 4, 0, 0, 0)  # CAP_DAC_READ_SEARCH
        assert libc.capset(struct.pack("=Ii", 0x20080522, 0), data) == 0
        assert libc.prctl(47, 2, 2, 0, 0) == 0
        assert libc.prctl(4, 1, 0, 0, 0) == 0  # its memory is its user's, as after any exec
    if "no landlock" in user or "alone" in user:
        landlock.abi = lambda: 0  # type: ignore[assignment]
    if "alone" in user:
        seccomp.available = lambda: False  # type: ignore[assignment]


def forked(user: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns as that user, in a process of its own.

    Raises:
        Raised: what it raised.
    """
    if user == "root" and os.getuid():
        pytest.skip("only root can be root")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(user)
            told = {"value": call()}
        except BaseException as error:  # noqa: BLE001 - the other process raises it
            told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        with open(writer, "wb") as pipe:
            pipe.write(json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)
    if "error" in told:
        raise Raised(told["error"])
    return told["value"]


def run(
    source: str,
    *,
    user: str = "plain",
    limits: ProgramLimits = SMALL,
    before: Callable[[], Any] = lambda: None,
    **how: Any,
) -> ProgramResult:
    """Run a program as that user."""
    how.setdefault("timeout_s", 20.0)

    def call() -> Any:
        before()
        told = asdict(run_here(source, limits=limits, **how))
        return told | {name: told[name].decode("latin-1") for name in ("stdout", "stderr")}

    told = forked(user, call)
    told |= {name: told[name].encode("latin-1") for name in ("stdout", "stderr")}
    told["layers"] = tuple(told["layers"])
    return ProgramResult(**told)


def judge(program: str, tests: dict[str, Any], *, user: str = "plain", **more: Any) -> Any:
    """Return the verdict of the job `code`."""
    before = more.pop("before", lambda: None)
    payload = {"program": program, "tests": tests, "timeout_s": 20.0, **more}

    def call() -> Any:
        before()
        return code.run(payload)

    return forked(user, call)


def lives(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def folders() -> list[str]:
    """Return the folders of programs whose process is gone."""
    return [
        str(path)
        for user in {os.getuid(), NOBODY}
        for path in Path(tempfile.gettempdir(), f"rollstream-programs-{user}").glob("*-*-*")
        if not Path("/proc", path.name.partition("-")[0]).exists()
    ]
