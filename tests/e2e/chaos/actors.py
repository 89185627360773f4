"""Who is on the stage: every process of the run, how it is hurt, and how it comes back.

Owns the life of each process through kills, freezes and restarts. Never decides what is done to
whom: the schedule does. Invariant: whoever ended, by chaos or by itself, is started again, and
whoever was frozen is thawed, at the latest by `heal`.

All of it runs on the main thread: Linux ties "die with my parent" to the thread that forked.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from examples.demo.children import Child
from examples.devserver import DevServer
from tests.e2e.chaos.schedule import Act

START_BYTES = 1 << 14
"""Of a log, in which a process says that it works."""
RESTART_S = 0.3
"""As a supervisor waits before it starts again what ended by itself."""
ZOMBIE_S = 20.0
"""How long a trainer that was taken over may take to notice, once it is awake."""


class Actor:
    """One process under chaos.

    Attributes:
        acts: what was done to it.
        exits: exit codes with which it ended by itself.
    """

    def __init__(self, name: str, role: str) -> None:
        self.name, self.role = name, role
        self.acts: Counter[Act] = Counter()
        self.exits: Counter[int] = Counter()
        self._start_mono_s: float | None = None
        self._thaw_mono_s: float | None = None

    @property
    def is_down(self) -> bool:
        """Whether it was killed or ended, and waits for its next start."""
        return self._start_mono_s is not None

    def kill(self, restart_in_s: float) -> None:
        """SIGKILL it, and start it again later; nothing where it is down."""
        if not self.is_down:
            self.acts[Act.KILL] += 1
            self._end(restart_in_s)

    def freeze(self, seconds: float) -> None:
        """Stop it for a while; nothing where it is down."""
        if self.is_down:
            return
        self.acts[Act.FREEZE] += 1
        self._thaw_mono_s = time.monotonic() + seconds
        self._freeze()

    def tick(self) -> None:
        """Do what is due: thaw it, start it again, notice that it ended."""
        now = time.monotonic()
        if self._thaw_mono_s is not None and now >= self._thaw_mono_s:
            self._thaw_mono_s = None
            self._thaw()
        if self._start_mono_s is None and (code := self._exit_code()) is not None:
            self.exits[code] += 1
            self._thaw_mono_s, self._start_mono_s = None, now + RESTART_S
        if self._start_mono_s is not None and now >= self._start_mono_s:
            self._start_mono_s = None
            self.start()

    def heal(self) -> None:
        """Make everything due now."""
        if self._thaw_mono_s is not None:
            self._thaw_mono_s = 0.0
        if self._start_mono_s is not None:
            self._start_mono_s = 0.0
        self.tick()

    def start(self) -> None:
        """Start it (again)."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask it to end."""

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end, then kill it; return its exit code."""
        raise NotImplementedError

    def _end(self, restart_in_s: float) -> None:
        self._kill()
        self._thaw_mono_s = None
        self._start_mono_s = time.monotonic() + restart_in_s

    def _kill(self) -> None:
        raise NotImplementedError

    def _freeze(self) -> None:
        raise NotImplementedError

    def _thaw(self) -> None:
        raise NotImplementedError

    def _exit_code(self) -> int | None:
        raise NotImplementedError


class ProcessActor(Actor):
    """A child process.

    Attributes:
        child: the process.
        ready_mark: what it logs once it works; empty counts from its start.
    """

    def __init__(self, name: str, role: str, child: Child, ready_mark: bytes = b"") -> None:
        super().__init__(name, role)
        self.child, self.ready_mark = child, ready_mark
        self._log_offset = 0

    def start(self) -> None:
        """Start it (again)."""
        self._log_offset = self.child.log.stat().st_size if self.child.log.exists() else 0
        self.child.start()

    @property
    def works(self) -> bool:
        """Whether it is there, has come up since its last start, and is not frozen."""
        if self.is_down or self._thaw_mono_s is not None or not self.child.running:
            return False
        with self.child.log.open("rb") as log:
            log.seek(self._log_offset)
            return self.ready_mark in log.read(START_BYTES)

    def stop(self) -> None:
        """Ask it to end."""
        self.child.ask_to_stop()

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end, then kill it; return its exit code."""
        self.child.wait_or_kill(timeout_s)
        return self.child.exit_code

    def _kill(self) -> None:
        self.child.kill()

    def _freeze(self) -> None:
        self.child.freeze()

    def _thaw(self) -> None:
        self.child.thaw()

    def _exit_code(self) -> int | None:
        return self.child.exit_code


class TrainerActor(ProcessActor):
    """The trainer: every start is another life, and an old one may wake up beside a new one.

    Attributes:
        lives: how many there were.
        findings: old lives that did not notice that they were taken over.
    """

    def __init__(self, make: Callable[[int], Child]) -> None:
        self.lives = 1
        self.findings: list[str] = []
        self._make = make
        self._zombies: list[tuple[Child, float]] = []
        """(an old life, when it is to be thawed)"""
        super().__init__("trainer", "trainer", make(1))

    def start(self) -> None:
        """Start the next life."""
        if self.child.starts:
            self.lives += 1
            self.child = self._make(self.lives)
        self.child.start()

    def usurp(self, seconds: float) -> None:
        """Freeze the trainer, start another one in its place, and thaw the old one later."""
        if self.is_down:
            return
        self.acts[Act.USURP] += 1
        self.child.freeze()
        self._zombies.append((self.child, time.monotonic() + seconds))
        self._thaw_mono_s = None
        self.start()

    def tick(self) -> None:
        """Do what is due, for old lives too."""
        super().tick()
        now, left = time.monotonic(), []
        for child, thaw_mono_s in self._zombies:
            if now >= thaw_mono_s:
                child.thaw()
            if child.running and now >= thaw_mono_s + ZOMBIE_S:
                self.findings.append(f"{child.log.name}: taken over, and still there")
                child.kill()
            if child.running:
                left.append((child, thaw_mono_s))
        self._zombies = left

    def heal(self) -> None:
        """Make everything due now."""
        self._zombies = [(child, min(at, time.monotonic())) for child, at in self._zombies]
        super().heal()

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end, then kill it and every old life; return its exit code."""
        for child, _ in self._zombies:
            child.kill()
        return super().end(timeout_s)


class ServerActor(Actor):
    """Redis: a real server that appends to a file and fsyncs it once a second.

    Attributes:
        forgotten_bytes: what was cut from the end of its file, all crashes together.
    """

    REMEMBERED_S = 1.2

    def __init__(self, server: DevServer, draw: random.Random, restarted: Callable[[], None]):
        super().__init__("redis", "redis")
        self._server, self._draw, self._restarted = server, draw, restarted
        self.forgotten_bytes = 0
        self._sizes: deque[tuple[float, Path, int]] = deque()
        """(when, newest append-only file, its size) of the last second."""

    def start(self) -> None:
        """Start it with what its file holds, and wait until it answers."""
        self._server.start()
        self._restarted()

    def forget(self, restart_in_s: float) -> None:
        """SIGKILL it, and cut its file back to what it was up to a second before.

        A killed process loses nothing (the kernel has it); a host that crashes loses what was not
        fsynced yet.
        """
        if self.is_down:
            return
        self.acts[Act.AMNESIA] += 1
        self._end(restart_in_s)
        newest = self._newest_file()
        since = time.monotonic() - self._draw.uniform(0.1, 1.0)
        known = [size for at, path, size in self._sizes if at >= since and path == newest]
        if newest is not None and known:
            self.forgotten_bytes += newest.stat().st_size - known[0]
            os.truncate(newest, known[0])
        self._sizes.clear()

    def tick(self) -> None:
        """Do what is due, and remember how long the file is."""
        super().tick()
        now, newest = time.monotonic(), self._newest_file()
        if newest is not None and not self.is_down:
            self._sizes.append((now, newest, newest.stat().st_size))
        while self._sizes and self._sizes[0][0] < now - self.REMEMBERED_S:
            self._sizes.popleft()

    def end(self, timeout_s: float) -> int | None:
        """Leave it to its owner."""
        return 0

    def _newest_file(self) -> Path | None:
        files = list((self._server.folder / "appendonlydir").glob("*.incr.aof"))
        return max(files, key=lambda path: path.stat().st_mtime, default=None)

    def _kill(self) -> None:
        self._server.kill()

    def _freeze(self) -> None:
        assert self._server.process is not None
        self._server.process.send_signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        assert self._server.process is not None
        self._server.process.send_signal(signal.SIGCONT)

    def _exit_code(self) -> int | None:
        return None if self._server.process is None else self._server.process.poll()
