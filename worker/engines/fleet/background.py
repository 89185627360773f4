"""Tasks that run beside the calls of a pool: kept alive, heard of where they break, ended together.

Owns the tasks that were given to it. Never waits for one but at the end. Invariant: a task that
breaks is logged, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger("worker")


class Background:
    """Tasks of one owner."""

    def __init__(self) -> None:
        """Begin with none."""
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends, or all are ended."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine_watch_broke", exc_info=error)

    async def aclose(self) -> None:
        """Cancel every task, and wait until each has ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
