"""A producer in the test's own process, and the trainer's side of the run it fills.

Owns short ways to write prompt files, start a gate and end groups. Invariant: everything runs on
a real server through the package's own calls; what was sent is recorded, not simulated.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from producer.app import make_supply
from producer.gate import Gate
from producer.identity import fingerprint_of, opening
from producer.mixture import Mixture, open_rows
from rollstream.config import load_settings
from rollstream.queue import calls
from rollstream.queue.calls import ScriptCall
from rollstream.queue.queue import Queue
from rollstream.settings import Settings

T = TypeVar("T")


class RecordingQueue(Queue):
    """A queue that remembers each round trip's scripts: [(script, its first argument), …]."""

    trips: list[list[tuple[str, Any]]]

    async def call_many(self, calls: Sequence[ScriptCall[T]]) -> list[T]:
        self.trips.append([(c.script, c.args[0] if c.args else None) for c in calls])
        return await super().call_many(calls)

    def enqueues(self) -> list[list[int]]:
        """Group indexes of each round trip that enqueued."""
        trips = [[arg for script, arg in trip if script == "enqueue"] for trip in self.trips]
        return [trip for trip in trips if trip]


@dataclass
class Producing:
    """A gate at work."""

    gate: Gate
    queue: RecordingQueue
    task: asyncio.Task[None]
    settings: Settings

    async def kill(self) -> None:
        """End it without a goodbye."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def rows_file(folder: Path, rows: int | Iterable[Any]) -> Path:
    """Write a prompt file: so many good rows, or these (text is written as it is)."""
    if isinstance(rows, int):
        rows = [{"prompt": f"prompt {k}", "label": k} for k in range(rows)]
    path = folder / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings_of(url: str, run: str, path: Path, *argv: str) -> Settings:
    """Return settings of a producer: n = 2, a lease of 2 s."""
    fixed = (
        f"--redis.url={url}", f"--run.name={run}", f"--producer.source=jsonl:{path}",
        "--producer.n_samples_per_prompt=2", "--worker.lease_s=2",
    )  # fmt: skip
    return load_settings(
        [*fixed, *argv], prog="test", environ={}, folder=Path("/nonexistent")
    ).settings


@asynccontextmanager
async def producing(
    settings: Settings, *, checked: int | None = None, name: str = "p"
) -> AsyncIterator[Producing]:
    """Run a gate until the block ends.

    Args:
        settings: of the producer.
        checked: rows that are read before anything is enqueued; None is all.
        name: of the process, for presence.
    """
    source = open_rows(settings)
    if checked is not None:
        assert not isinstance(source, Mixture)
        source.num_checked = checked  # type: ignore[misc]  # smaller than a file
    queue = RecordingQueue.connect(settings.redis_url(), settings.run.name)
    queue.trips = []
    try:
        supply = make_supply(settings, source)
        supply.check()
        fingerprint = fingerprint_of(settings, source)
        gate = Gate(
            queue, opening(settings, fingerprint, supply.order.total), fingerprint, supply,
            name=name, lease_s=settings.worker.lease_s, stay=settings.producer.stay,
        )  # fmt: skip
        await gate.open()
        it = Producing(gate, queue, asyncio.create_task(gate.run()), settings)
        yield it
        await it.kill()
    finally:
        source.close()
        await queue.aclose()


class Trainer:
    """Ends groups as a trainer does: `ack` ends any live state."""

    def __init__(self, url: str, run: str) -> None:
        self.queue = Queue.connect(url, run)
        self._connects = 0

    async def __aenter__(self) -> Trainer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.queue.aclose()

    async def connect(self) -> None:
        info = await self.queue.info()
        assert info is not None
        self._connects = info.connects + 1
        await self.queue.call(calls.connect("trainer", self._connects))

    async def ack(self, *groups: int) -> list[str]:
        if not self._connects:
            await self.connect()
        return await self.queue.call(calls.ack("trainer", [str(g) for g in groups]))

    async def rewind(self, rewind_id: str, frontier: int, bitmap: bytes = b"") -> None:
        await self.connect()
        answer = await self.queue.call(calls.rewind("trainer", rewind_id, frontier, bitmap))
        assert not answer.taken

    async def live(self) -> set[int]:
        members = await self.queue.client.smembers(f"{self.queue.prefix}gs")
        return {int(g) for g in members}

    async def until_live(self, groups: Iterable[int]) -> None:
        """Wait until exactly these groups are live."""
        wanted = set(groups)
        await until(lambda: self.live(), lambda live: live == wanted)

    async def until_done(self) -> None:
        """Wait until the producer said that the data ended."""
        await until(lambda: self.queue.info(), lambda info: info is not None and info.done)

    async def count(self, name: str) -> int:
        return (await self.queue.counters()).get(name, 0)

    async def check_accounts(self) -> None:
        """Prove the accounting identity and that every member is in one place."""
        answer = await self.queue.call(calls.audit(deep=True))
        assert answer.problems == []
        assert answer.enqueued == answer.acked + answer.dropped + answer.live


async def until(ask: Callable[[], Any], holds: Callable[[Any], bool], timeout_s: float = 45) -> Any:
    """Ask until the answer is what it should be; the last answer stands in the failure."""
    limit = time.monotonic() + timeout_s
    while True:
        answer = await ask()
        if holds(answer):
            return answer
        assert time.monotonic() < limit, f"after {timeout_s} s still {answer!r}"
        await asyncio.sleep(0.01)
