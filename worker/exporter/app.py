"""The exporter as a process: how it starts, looks, is asked and ends.

Owns the loop and the signals. Never changes anything in Redis. Invariant: nothing that Redis says
or does not say ends it: an outage, a run that is not there, was removed or is another version's is
published (`rollout_redis_up`, `rollout_run_state`, `/readyz`) and said once. SIGTERM ends it, with
exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

import structlog

from rollstream import __version__
from rollstream.errors import RunMismatch
from rollstream.link import OUTAGE, Link
from rollstream.settings import Settings
from rollstream.wire import WIRE_VERSION

from ..telemetry.server import TelemetryServer
from .figures import Figures
from .reader import Reader

LOOK_TIMEOUT_S = 5.0
"""A server that does not answer one look for so long is away."""
CLOSE_S = 2.0
log = structlog.get_logger("exporter")


class Exporter:
    """Looks at a run at intervals, and serves what it saw.

    Attributes:
        figures: what is published.
        server: where; `server.port` is the port once it serves.
    """

    def __init__(self, settings: Settings, reader: Reader) -> None:
        self._settings, self._reader = settings, reader
        self.figures = Figures(version=__version__, wire=WIRE_VERSION, envs=settings.envs())
        self.server = TelemetryServer(self.figures, lag_s=lambda: self._lag_s, ready=self._ready)
        self._link = Link("exporter")
        # On the run's own server an outage of it is said already.
        self._jobs_link = None if settings.rq.url is None else Link("exporter_jobs")
        self._lag_s = 0.0
        self._is_up = self._has_run = False
        self._said = ""
        """What is wrong with the run, as said last."""

    async def run(self) -> None:
        """Serve and look until cancelled.

        Raises:
            OSError: there is no port to listen on.
        """
        table = self._settings.exporter
        port = await self.server.start(table.host, table.port)
        log.info("exporter_serves", host=table.host, port=port, interval_s=table.interval_s)
        try:
            while True:
                due = time.monotonic() + table.interval_s
                await self.look()
                await self.look_at_verifiers()
                wait_s = max(0.0, due - time.monotonic())
                woken = time.monotonic() + wait_s
                await asyncio.sleep(wait_s)
                self._lag_s = max(0.0, time.monotonic() - woken)
        finally:
            await self.server.aclose()

    async def look(self) -> None:
        """Look at the run once and publish it, whatever comes of it."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                seen = await self._reader.look()
        except OUTAGE as error:
            self._link.failed(error)
            self._publish(up=False)
            return
        except RunMismatch as error:
            self._without_run(log.warning, "run_of_another_version", error=str(error))
        except Exception as error:  # noqa: BLE001 - keys that are not ours, a refusal: it goes on
            why = f"{type(error).__name__}: {error}"[:500]
            self._without_run(log.warning, "run_unreadable", error=why)
        else:
            if seen is None:
                self._without_run(log.info, "no_run")
            else:
                self._say(log.info, "run_seen", state=seen.run.info.state)
                self.figures.seen(seen.run, trainer_connected=seen.trainer_connected)
                self._has_run = True
        self._link.worked()
        self._publish(up=True)
        self.figures.took(time.monotonic() - started)

    def _publish(self, *, up: bool) -> None:
        self._is_up = up
        self.figures.redis(up=up)

    def _without_run(self, level: Callable[..., Any], event: str, **about: Any) -> None:
        self._has_run = False
        self._say(level, event, **about)
        self.figures.no_run(is_gone=event == "no_run")

    def _say(self, level: Callable[..., Any], event: str, **about: Any) -> None:
        """Log what the run is like, once until it changes."""
        said = f"{event} {about}"
        if said != self._said:
            self._said = said
            level(event, **about)

    async def look_at_verifiers(self) -> None:
        """Ask RQ once and publish it; while it is away, what was seen last stands."""
        if self._jobs_link is None and not self._is_up:
            return
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                found = await self._reader.verifiers()
        except OUTAGE as error:
            if self._jobs_link is not None:
                self._jobs_link.failed(error)
        except Exception as error:  # noqa: BLE001 - keys that are not RQ's
            log.debug("verifiers_unreadable", error=str(error))
        else:
            if self._jobs_link is not None:
                self._jobs_link.worked()
            self.figures.verifiers(found.alive, found.waiting)

    async def _ready(self) -> dict[str, bool]:
        return {"redis": self._is_up, "run": self._is_up and self._has_run}


def run(settings: Settings) -> None:
    """Run the exporter until SIGTERM or SIGINT."""
    structlog.contextvars.bind_contextvars(run=settings.run.name)
    asyncio.run(_until_stopped(settings))


async def _until_stopped(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reader = Reader.connect(settings)
    work = asyncio.create_task(Exporter(settings, reader).run())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait((work, stopped), timeout=CLOSE_S)
        with contextlib.suppress(*OUTAGE):
            async with asyncio.timeout(CLOSE_S):
                await reader.aclose()
    if work.done() and not work.cancelled():
        work.result()
    log.info("stopping", why="signal")
