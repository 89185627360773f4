"""The demo's child processes: start, readiness, end, and the tail of a log when one breaks.

Owns every process that the demo starts. Never restarts one by itself: `cast.py` decides.
Invariant: a child dies with the demo, however the demo ends; its output is a file of its own.

A child must be started by the main thread: Linux ties "die with my parent" to the thread that
forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.devserver import die_with_parent

TAIL_BYTES = 4096


class ChildFailed(RuntimeError):
    """A child ended, or did not become ready; the message ends with the tail of its log."""


class Child:
    """One process with a log file.

    Attributes:
        name: for people, e.g. `worker-1`.
        log: where its output goes.
        starts: how often it was started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        cwd: Path,
        ready_url: str | None = None,
    ) -> None:
        self.name, self.command = name, list(command)
        self.log = folder / f"{name}.log"
        self.environment, self.cwd, self.ready_url = dict(environment), cwd, ready_url
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again); the log goes on in the same file."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.cwd,
                # A Ctrl-C is the demo's: it ends the children in order.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def ready(self) -> bool:
        """Whether it says so at its `ready_url`; a running child without one is ready."""
        if not self.running:
            return False
        return self.ready_url is None or answers(self.ready_url)

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self.running:
            assert self.process is not None
            self.process.kill()
            self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it does nothing until `thaw`, and may be killed meanwhile."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """SIGTERM; `wait_or_kill` follows."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def wait_or_kill(self, timeout_s: float) -> None:
        """Wait for its end, then SIGKILL."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of its log."""
        if not self.log.exists():
            return "(no output)"
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            text = log.read().decode(errors="replace").strip()
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "(no output)"

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it is ready.

        Raises:
            ChildFailed: it ended, or was not ready in time.
        """
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            if not self.running:
                raise self.failure()
            if self.ready():
                return
            time.sleep(0.05)
        raise ChildFailed(
            f"{self.name} was not ready within {timeout_s:.0f} s; "
            f"its log ({self.log}) ends with:\n{self.tail()}"
        )

    def failure(self) -> ChildFailed:
        """Return the error that tells how it ended and what it said."""
        return ChildFailed(
            f"{self.name} ended with exit code {self.exit_code}; "
            f"its log ({self.log}) ends with:\n{self.tail()}"
        )


def answers(url: str, timeout_s: float = 1.0) -> bool:
    """Return whether `url` answers with a 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return bool(200 <= reply.status < 300)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def stop_all(children: Sequence[Child], timeout_s: float = 5.0) -> None:
    """Ask all to stop, then end what is left; bounded by `timeout_s` for all together."""
    for child in children:
        child.ask_to_stop()
    limit = time.monotonic() + timeout_s
    for child in children:
        child.wait_or_kill(max(0.0, limit - time.monotonic()))
