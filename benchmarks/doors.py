"""The simulated engine with a clock at its door: `python -m benchmarks.doors … --port PORT`.

Owns the notes of when a request of which worker came and when its answer left. Never looks into the
engine and changes nothing that passes. Invariant: a request is noted once all of it is there and
before the engine sees it, its end before its answer leaves.

Arguments are those of `worker.engines.sim`. `GET /bench` answers all notes, `[seconds on the
machine's monotonic clock, worker's pid, 1 or -1]`, and how late this process's own loop was at most
since it was asked before; `GET /bench/in_flight` how many calls workers have, without what they ask
an engine to know it. A request says whose it is by its routing key, which `generate` writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from worker.engines.sim.__main__ import build, parser
from worker.engines.sim.http import Exchange, serve
from worker.generate import resumable, single_turn
from worker.types import GenerateInput, GenerateOutput

GENERATE = "/generate"
TICK_S = 0.01
_WORKER = re.compile(rb'"routing_key":"w(\d+)-')


@resumable
async def generate(given: GenerateInput) -> GenerateOutput:
    """Run `single_turn` under a routing key that names this process."""
    key = given.sample.routing_key or ""
    given.sample.routing_key = f"w{os.getpid()}-{key.rpartition('-')[2]}"
    return await single_turn(given)


class Door:
    """Passes exchanges on, and notes them."""

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self._handle = handle
        self.notes: list[tuple[float, int, int]] = []
        self.in_flight = 0
        self.late_s = 0.0

    def __call__(self, exchange: Exchange) -> None:
        """Take one whole request."""
        if exchange.path == "/bench/in_flight":
            exchange.answer(200, json.dumps(self.in_flight).encode())
            return
        if exchange.path == "/bench":
            late_s, self.late_s = self.late_s, 0.0
            said = {"notes": self.notes, "late_ms_max": 1e3 * late_s}
            exchange.answer(200, json.dumps(said).encode())
            return
        found = _WORKER.search(exchange.body) if exchange.path == GENERATE else None
        if found is None:
            self._handle(exchange)
            return
        worker = int(found[1])
        self.note(worker, 1)
        self._handle(_Noted(exchange, worker, self))

    def note(self, worker: int, step: int) -> None:
        """Note that a worker has one call more, or one less."""
        self.notes.append((time.monotonic(), worker, step))
        self.in_flight += step

    async def tick(self) -> None:
        """See how late this loop is, for ever."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s = max(self.late_s, time.monotonic() - due_s)


class _Noted:
    """An exchange whose end is noted once, however it ends."""

    def __init__(self, exchange: Exchange, worker: int, door: Door) -> None:
        self._exchange, self._worker, self._door = exchange, worker, door
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    @property
    def on_close(self) -> Callable[[], None] | None:
        return self._exchange.on_close

    @on_close.setter
    def on_close(self, call: Callable[[], None] | None) -> None:
        def closed() -> None:
            self._end()
            if call is not None:
                call()

        self._exchange.on_close = closed

    def answer(self, status: int, body: bytes, *more: Any) -> None:
        self._end()
        self._exchange.answer(status, body, *more)

    def break_off(self, status: int, body: bytes) -> None:
        self._end()
        self._exchange.break_off(status, body)

    def drop(self) -> None:
        self._end()
        self._exchange.drop()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._door.note(self._worker, -1)


async def run(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    args = parser().parse_args(arguments)
    door = Door(build(args).handle)
    server = await serve(door, args.host, args.port)
    ticking = asyncio.create_task(door.tick())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    ticking.cancel()
    server.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
