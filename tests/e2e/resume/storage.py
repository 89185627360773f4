"""A Redis that dies, and what it remembers when it comes back.

Owns one Valkey with an append-only file and the three ways in which its memory may come back: all
of it, without its last moments, or none. Never talks to clients. Invariant: what it forgets is
forgotten in the order in which a host crash would: the newest first.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from enum import StrEnum
from pathlib import Path

from examples.devserver import DevServer

REMEMBERED_S = 3.0


class Memory(StrEnum):
    """What a server that was killed still knows when it is started again."""

    KEPT = "kept"
    LAST_MOMENTS_LOST = "last_moments_lost"
    """A host crash: AOF is on disk up to a moment ago."""
    EMPTY = "empty"


class Storage:
    """The server, and the length of its append-only file over the last seconds."""

    def __init__(self) -> None:
        self.server = DevServer(aof=True)
        self._lengths: deque[tuple[float, int]] = deque()

    @property
    def url(self) -> str:
        """Where it listens, whenever it lives."""
        return self.server.url

    def watch(self) -> None:
        """Note how long the file is now."""
        path, now = self._log(), time.monotonic()
        if path is not None:
            self._lengths.append((now, path.stat().st_size))
        while self._lengths and now - self._lengths[0][0] > REMEMBERED_S:
            self._lengths.popleft()

    def kill(self, memory: Memory, lost_s: float = 1.0) -> None:
        """End it, and make its folder what a server of that memory would find."""
        self.server.kill()
        if memory is Memory.EMPTY:
            shutil.rmtree(self.server.folder)
            self.server.folder.mkdir()
        elif memory is Memory.LAST_MOMENTS_LOST:
            self._forget(lost_s)
        self._lengths.clear()

    def _forget(self, lost_s: float) -> None:
        path = self._log()
        until = time.monotonic() - lost_s
        lengths = [length for at, length in self._lengths if at <= until]
        if path is not None and lengths:
            # Wherever that cuts a command in two, the server leaves it out when it loads.
            with path.open("r+b") as log:
                log.truncate(min(lengths[-1], path.stat().st_size))

    def _log(self) -> Path | None:
        found = list(self.server.folder.glob("appendonlydir/*.incr.aof"))
        return found[0] if len(found) == 1 else None
