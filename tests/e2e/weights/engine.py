"""The simulated engine with a witness at its door: `python -m tests.e2e.weights.engine NOTES …`.

Owns the notes of which request came and ended when, with how many tokens. Never looks into the
engine and changes nothing that passes. Invariant: a request is noted before the engine sees it, its
end before its answer leaves.

The other arguments are those of `worker.engines.sim`.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.weights.journal import Journal
from worker.engines.sim.__main__ import build, parser
from worker.engines.sim.http import Exchange, serve

GENERATE = ("/generate", "/inference/v1/generate")
_RID = re.compile(rb'"(?:rid|request_id)"\s*:\s*"([^"]+)"')


class _Watched:
    """An exchange whose answer is noted."""

    def __init__(self, exchange: Exchange, rid: str, journal: Journal) -> None:
        self._exchange, self._rid, self._journal = exchange, rid, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    @property
    def on_close(self) -> Callable[[], None] | None:
        return self._exchange.on_close

    @on_close.setter
    def on_close(self, call: Callable[[], None] | None) -> None:
        self._exchange.on_close = None if call is None else partial(self._left, call)

    def _left(self, call: Callable[[], None]) -> None:
        """Note that a client hung up: what it asked for ends with that, as with real servers."""
        self._journal.write("end", rid=self._rid, at_s=time.time(), finish="left")
        call()

    def answer(self, status: int, body: bytes, *more: Any, **how: Any) -> None:
        count, finish = reading_of(body) if status == 200 else (None, f"http {status}")
        self._journal.write("end", rid=self._rid, at_s=time.time(), num_tokens=count, finish=finish)
        self._exchange.answer(status, body, *more, **how)

    def drop(self) -> None:
        self._journal.write("end", rid=self._rid, at_s=time.time(), finish="dropped")
        self._exchange.drop()


def reading_of(body: bytes) -> tuple[int | None, str]:
    """Return (sampled tokens, finish) of a reply of either protocol."""
    reply = msgspec.json.decode(body)
    if "meta_info" in reply:
        meta = reply["meta_info"]
        return meta.get("completion_tokens", 0), meta["finish_reason"]["type"]
    choice = reply["choices"][0]
    return len(choice["token_ids"]), choice["finish_reason"]


def watching(handle: Callable[[Any], None], journal: Journal) -> Callable[[Exchange], None]:
    """Return a handler that notes what passes to `handle`."""

    def watch(exchange: Exchange) -> None:
        found = _RID.search(exchange.body) if exchange.path in GENERATE else None
        if found is None:
            handle(exchange)
            return
        rid = found[1].decode()
        journal.write("start", rid=rid, at_s=time.time())
        handle(_Watched(exchange, rid, journal))

    return watch


async def run(notes: Path, arguments: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    args = parser().parse_args(arguments)
    engine = build(args)
    server = await serve(watching(engine.handle, Journal(notes)), args.host, args.port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2:]))
