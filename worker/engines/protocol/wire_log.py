"""Keeps the exact bytes of every engine request and reply, for an auditor.

Owns the folder `debug.wire_dir`: `<rid>.req` and `<rid>.rep`. Never reads or changes what it keeps,
and never fails a rollout: a disk that is full, gone or hangs is said once, and its files are
missing. Invariant: `keep` returns when the file is whole, and a client waits for it before it hands
out the reply: while the disk takes files, every call of a delivered sample has its two, whenever
the worker was killed; what is there under its name is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import structlog

MAX_WAIT_S = 5.0
"""How long a rollout waits for one file; behind one that hangs, the next ones wait not at all."""

log = structlog.get_logger("worker")


class WireLog:
    """Writes in one thread of its own, so that the loop never waits for a disk.

    Attributes:
        num_failed: files that are not there.
    """

    def __init__(self, folder: Path) -> None:
        self.num_failed = 0
        self._folder = folder
        self._is_failing = False
        self._hanging: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wire-log")

    async def keep(self, rid: str, kind: Literal["req", "rep"], raw: bytes) -> None:
        """Write one file, or count it as failed."""
        if self._hanging is not None and not self._hanging.done():
            self.num_failed += 1
            return
        writing = self._thread.submit(self._write, self._folder / f"{rid}.{kind}", raw)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await asyncio.wrap_future(writing)
        except TimeoutError:
            self._hanging = writing
            self._failed(f"not written within {MAX_WAIT_S:g} s")
        except OSError as error:
            self._failed(str(error))
        else:
            self._is_failing = False

    def _write(self, target: Path, raw: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            target.write_bytes(raw)
        except OSError:
            with contextlib.suppress(OSError):
                target.unlink()
            raise

    def _failed(self, why: str) -> None:
        self.num_failed += 1
        if not self._is_failing:
            self._is_failing = True
            log.error("wire_log_failed", folder=str(self._folder), error=why,
                      action="make room; rollouts go on, and their files are missing")  # fmt: skip

    def close(self) -> None:
        """Finish what is being written; what hangs is left alone."""
        self._thread.shutdown(wait=self._hanging is None or self._hanging.done())
