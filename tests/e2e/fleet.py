"""Worker processes that are started again when they end, as compose does it.

Owns the processes of one test. Invariant: they are started by the main thread and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.integration.worker.parts import Run, wait_until
from tests.integration.worker.processes import WorkerProcess

POLL_S = 0.02


class Fleet:
    """Workers under supervision.

    Attributes:
        ends: exit codes of workers that ended, in order.
    """

    def __init__(
        self, folder: Path, count: int, options: dict[str, str], *, rss_limit_bytes: int = 0
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._options, self._rss_limit = folder, options, rss_limit_bytes
        self._numbers = iter(range(10_000))
        self.ends: list[int] = []
        self.all: list[WorkerProcess] = []
        self.running = [self._start() for _ in range(count)]

    def _start(self) -> WorkerProcess:
        one = WorkerProcess(self._folder, next(self._numbers), self._options)
        self.all.append(one)
        return one

    async def supervise(self) -> None:
        """Start again what ends; play the kernel for what eats too much memory."""
        while True:
            for place, one in enumerate(self.running):
                code = one.process.poll()
                if code is not None:
                    self.ends.append(code)
                    self.running[place] = self._start()
                elif self._rss_limit and rss_bytes(one.process.pid) > self._rss_limit:
                    one.process.kill()
            await asyncio.sleep(POLL_S)

    async def ready(self) -> None:
        """Wait until every worker says so."""
        for one in self.running:

            def is_ready(one: WorkerProcess = one) -> bool:
                # What its work did to it behind that, while others still start, is for the test.
                is_ready = "worker_ready" in one.log.read_text()
                assert is_ready or one.process.poll() is None, self.logs()
                return is_ready

            # A start takes two seconds; on a machine that does much else, many more.
            await until(is_ready, self, timeout_s=60, what="ready workers")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return every log record of that name."""
        return [e for one in self.all for e in one.events() if e["event"] == name]

    def logs(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"{one.log.name}: …{one.log.read_text()[-1500:]}" for one in self.all)

    def kill(self) -> None:
        """End them all."""
        for one in self.running:
            one.process.kill()
            one.process.wait()


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 where it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextlib.asynccontextmanager
async def a_fleet(
    folder: Path, count: int, options: dict[str, str], **how: Any
) -> AsyncIterator[Fleet]:
    """Run a fleet; its workers are ready."""
    fleet = Fleet(folder, count, options, **how)
    supervising: asyncio.Task[None] | None = None
    try:
        await fleet.ready()
        supervising = asyncio.create_task(fleet.supervise())
        yield fleet
    finally:
        if supervising is not None:
            supervising.cancel()
            await asyncio.wait((supervising,))
        fleet.kill()


async def until(
    condition: Callable[[], Any], fleet: Fleet, *, timeout_s: float = 45.0, what: str
) -> Any:
    """Wait for a condition (sync or async); on failure say what the workers said."""
    return await wait_until(condition, timeout_s=timeout_s, what=what, tell=fleet.logs)


async def all_ended(run: Run, groups: int, dropped: int, fleet: Fleet, **wait: Any) -> None:
    """Wait until so many groups are ready and so many were dropped, and prove the accounting."""

    async def ended() -> bool:
        drops = await run.drops()
        return (await run.queue.depths())["ready"] == groups and sum(drops.values()) == dropped

    await until(ended, fleet, what=f"{groups} ready, {dropped} dropped", **wait)
    await run.audit()
