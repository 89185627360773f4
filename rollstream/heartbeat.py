"""A file whose time says that a process without an HTTP server is alive.

Owns the renewal of that file's time. Never decides who is alive: a health check does, by the age of
the file. Invariant: a disk that is full or gone is said once and stops nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

BEAT_S = 1.0
"""How often the time is renewed; a health check waits for many of these."""
_log = logging.getLogger("rollstream")


class Heartbeat:
    """Renews the time of one file, or does nothing where none is asked for."""

    def __init__(self, path: Path | None) -> None:
        """Prepare; `path` is `telemetry.heartbeat_file`."""
        self._path = path
        self._next_mono_s = 0.0
        self._has_failed = False

    def beat(self) -> None:
        """Renew it, at most once in `BEAT_S`; call this where the process does its work."""
        now = time.monotonic()
        if self._path is None or now < self._next_mono_s:
            return
        self._next_mono_s = now + BEAT_S
        try:
            self._path.touch()
        except OSError as error:
            if not self._has_failed:
                _log.warning(
                    "heartbeat_not_written", extra={"file": str(self._path), "error": str(error)}
                )
            self._has_failed = True

    async def run(self) -> None:
        """Renew it for as long as the event loop turns; ends when it is cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)
