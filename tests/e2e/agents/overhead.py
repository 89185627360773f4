"""What the gateway costs a call: its time, less that of the same engine call made directly.

Owns one quiet run: one worker, one engine whose replies take the same time each, and nobody else.
Never judges tokens. Invariant: the direct call is the gateway's own, its bytes sent again to the
same engine right behind it, so that whatever else the machine does meets both alike.

Measured sequentially and with several sessions at once, with and without stream, to the last byte;
sessions go on for several turns, so prompts grow.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from examples.demo.children import ChildFailed, stop_all
from tests.e2e.agents.breaks import decode
from tests.e2e.agents.cast import Cast, assemble, flags
from tests.e2e.agents.engine import GENERATE, WITNESS
from tests.e2e.agents.hold import DONE
from tests.e2e.agents.scenes import SAMPLES_A_GROUP, Protocol, Scene
from tests.e2e.agents.words import DIALECTS, Item, reply_in

CONCURRENCY = 4
SESSIONS = 40
TURNS = 12
"""Of one session; then the next one is taken."""
READY_S, STOP_S = 60.0, 10.0
QUIET = {"latency_median_s": 0.02, "latency_sigma": 0.0, "token_s": 0.0}
_SETTLE_S = 0.005
"""What the gateway does behind its last byte is no part of the next call."""


@dataclass(slots=True)
class Overhead:
    """Differences in milliseconds, by (concurrency, streamed)."""

    found: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    direct: dict[tuple[int, bool], list[float]] = field(default_factory=dict)

    at = 1
    """The concurrency of the two figures that stand first in the line."""

    @property
    def headline(self) -> tuple[float, float]:
        """p50 and p95 of calls without stream, one at a time."""
        return _percentiles(self.found[self.at, False])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it."""
        rows = {}
        for (at, streamed), values in sorted(self.found.items()):
            p50, p95 = _percentiles(values)
            engine, _ = _percentiles(self.direct[at, streamed])
            rows[f"{at}{'-stream' if streamed else ''}"] = {
                "calls": len(values), "p50_ms": p50, "p95_ms": p95, "engine_p50_ms": engine,
            }  # fmt: skip
        return rows

    def __str__(self) -> str:
        return str(self.to_dict())


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ranked = sorted(values)
    return tuple(round(ranked[int(share * (len(ranked) - 1))], 2) for share in (0.5, 0.95))  # type: ignore[return-value]


def measure(folder: Path, redis_url: str, calls: int) -> Overhead:
    """Measure so many calls of each kind.

    Raises:
        ChildFailed: a process broke.
    """
    groups = SESSIONS // SAMPLES_A_GROUP
    scene = Scene("quiet", Protocol.SGLANG, "linear", "keep_prefix", False, groups, kills=0)
    cast = assemble(
        scene, folder, redis_url, 1, agent_name="hold.py:run", num_engines=1, num_workers=1,
        quiet=tuple(flags(QUIET)), concurrency=SESSIONS,
    )  # fmt: skip
    try:
        for child in (*cast.engines, cast.producer, *cast.workers):
            child.start()
        for child in cast.engines:
            child.wait_ready(READY_S)
        urls = _urls(folder, cast)
        found = asyncio.run(_measure(cast.urls[0], urls, calls))
        (folder / DONE).touch()
        return found
    finally:
        stop_all(cast.everyone, STOP_S)


def _urls(folder: Path, cast: Cast) -> list[str]:
    """Wait until every session is there; return their URLs."""
    limit = time.monotonic() + READY_S
    while len(found := sorted(folder.glob("url-*[0-9]"))) < SESSIONS:
        if time.monotonic() > limit or not cast.workers[0].running:
            raise ChildFailed(f"{len(found)} of {SESSIONS} sessions; {cast.workers[0].tail()}")
        time.sleep(0.05)
    return [path.read_text() for path in found]


async def _measure(engine_url: str, urls: list[str], calls: int) -> Overhead:
    found = Overhead()
    async with httpx.AsyncClient(timeout=30.0) as client:
        meter = _Meter(client, engine_url)
        for url in urls[:2]:
            await meter.session(url, 3, False, [], [])
        rest = iter(urls[2:])
        for at in (1, CONCURRENCY):
            for streamed in (False, True):
                kept: list[float] = []
                direct: list[float] = []
                while len(kept) < calls:
                    batch = [url for _, url in zip(range(at), rest, strict=False)]
                    if not batch:
                        break
                    turns = min(TURNS, -(-(calls - len(kept)) // at))
                    async with asyncio.TaskGroup() as group:
                        for url in batch:
                            group.create_task(meter.session(url, turns, streamed, kept, direct))
                found.found[at, streamed], found.direct[at, streamed] = kept, direct
    return found


class _Meter:
    """Holds calls of the gateway against the same calls of the engine."""

    def __init__(self, client: httpx.AsyncClient, engine_url: str) -> None:
        self._client, self._engine_url = client, engine_url

    async def session(
        self, url: str, turns: int, streamed: bool, kept: list[float], direct: list[float]
    ) -> None:
        """Play one session, and note both times of every call."""
        dialect, marker = DIALECTS["chat"], secrets.token_hex(8)
        items: list[Item] = []
        for turn in range(turns):
            items += dialect.user(f"[{marker}] What is {turn + 2} + {turn + 5}?")
            body = dialect.body(
                "Be brief.", items, tool=None, most=300, stream=streamed, previous=""
            )
            start = time.perf_counter()
            answer = await self._client.post(f"{url}/{dialect.path}", json=body)
            took_s = time.perf_counter() - start
            answer.raise_for_status()
            reply = reply_in(dialect.path, answer.text)
            assert reply is not None, answer.text
            items += dialect.said(reply).items
            asked_s = await self._directly(marker)
            kept.append(1000 * (took_s - asked_s))
            direct.append(1000 * asked_s)

    async def _directly(self, marker: str) -> float:
        """Send what the gateway sent again; return how long the engine took."""
        shown = await self._client.get(f"{self._engine_url}{WITNESS}")
        body = self._newest(shown.content, marker)
        body["rid"] = secrets.token_hex(16)
        raw = msgspec.json.encode(body)
        await asyncio.sleep(_SETTLE_S)
        start = time.perf_counter()
        answer = await self._client.post(
            f"{self._engine_url}{GENERATE[0]}", content=raw,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        took_s = time.perf_counter() - start
        answer.raise_for_status()
        return took_s

    def _newest(self, raw: bytes, marker: str) -> dict[str, Any]:
        """Return the newest body whose ids spell the marker."""
        bodies: list[dict[str, Any]] = msgspec.json.decode(raw)
        return next(body for body in reversed(bodies) if marker in decode(body["input_ids"]))
