"""An exporter in the test's own process, and what a scrape of it says.

Owns short ways to start one and to read a scrape. Invariant: what is read is the exposition text,
as Prometheus reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rollstream.config import load_settings
from rollstream.queue.queue import Queue
from rollstream.queue.reads import Command
from rollstream.settings import Settings
from tests.integration.producer.scene import until
from worker.exporter.app import Exporter
from worker.exporter.reader import Reader

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def settings_of(url: str, run: str, *argv: str) -> Settings:
    """Return settings of an exporter that looks ten times a second."""
    fixed = (
        f"--redis.url={url}", f"--run.name={run}", "--exporter.interval_s=0.1",
        "--exporter.host=127.0.0.1", "--exporter.port=0",
    )  # fmt: skip
    return load_settings(
        [*fixed, *argv], prog="test", environ={}, folder=Path("/nonexistent")
    ).settings


class CountingQueue(Queue):
    """A queue that remembers what each round trip sent."""

    trips: list[Sequence[Command]]

    async def _send(self, commands: Sequence[Command], client: Any = None) -> list[Any]:
        self.trips.append(commands)
        return await super()._send(commands, client)


class Watching:
    """An exporter, whose looks a test asks for."""

    def __init__(self, settings: Settings, queue: CountingQueue, reader: Reader) -> None:
        self.queue, self.exporter = queue, Exporter(settings, reader)

    @property
    def series(self) -> Series:
        """What a scrape says now."""
        text = self.exporter.figures.render().decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Return one series of `rollout_<name>`."""
        return self.series[f"rollout_{name}", tuple(sorted(labels.items()))]

    def nonzero(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the series of `rollout_<name>` that are not 0, by the values of their labels."""
        return {
            tuple(value for _, value in labels): count
            for (found, labels), count in self.series.items()
            if found == f"rollout_{name}" and count
        }

    async def look(self) -> None:
        """Look at the run, and at the verifiers."""
        await self.exporter.look()
        await self.exporter.look_at_verifiers()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Look until something holds."""

        async def look() -> bool:
            await self.look()
            await asyncio.sleep(0.01)
            return holds()

        await until(look, bool)


@asynccontextmanager
async def watching(url: str, run: str, *argv: str) -> AsyncIterator[Watching]:
    """Make an exporter that looks when it is told to, and nothing by itself."""
    settings = settings_of(url, run, *argv)
    queue = CountingQueue.connect(url, run, connect_timeout_s=2.0)
    queue.trips = []
    reader = Reader.connect(settings)
    await reader._queue.aclose()
    reader._queue = queue
    try:
        yield Watching(settings, queue, reader)
    finally:
        await reader.aclose()


@asynccontextmanager
async def serving(url: str, run: str, *argv: str) -> AsyncIterator[Watching]:
    """Run an exporter that looks by itself, and serves."""
    async with watching(url, run, *argv) as it:
        task = asyncio.create_task(it.exporter.run())
        await until(lambda: _nothing(), lambda _: it.exporter.server.port > 0 or task.done())
        try:
            yield it
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


async def _nothing() -> None:
    """Ask for nothing."""
