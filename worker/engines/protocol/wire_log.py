"""Keeps the exact bytes of every engine request and reply, for an auditor.

Owns the folder `debug.wire_dir`: `<rid>.req` and `<rid>.rep`. Never reads or changes what it keeps.
Invariant: `keep` returns when the file is whole, and a client waits for it before it hands out the
reply: every call of a delivered sample has its two files, whenever the worker was killed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal


class WireLog:
    """Writes in one thread of its own, so that the loop never waits for a disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wire-log")

    async def keep(self, rid: str, kind: Literal["req", "rep"], raw: bytes) -> None:
        """Write one file."""
        target = self._folder / f"{rid}.{kind}"
        await asyncio.get_running_loop().run_in_executor(self._thread, target.write_bytes, raw)

    def close(self) -> None:
        """Finish what is being written."""
        self._thread.shutdown()
