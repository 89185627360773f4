"""The simulated engine with a witness at its door: `python -m tests.e2e.agents.engine NOTES …`.

Owns the notes of what was asked when, with all its ids, and how much of an answer left, whole or as
a stream. Never looks into the engine and changes nothing that passes. Invariant: a request is noted
before the engine sees it, its end before its last byte leaves.

It shows the bodies of the last requests at `/witness`, so that somebody can ask the same again. The
other arguments are those of `worker.engines.sim`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.weights.engine import GENERATE, reading_of
from tests.e2e.weights.journal import Journal
from worker.engines.sim.__main__ import KEEPALIVE_S, build, parser
from worker.engines.sim.http import Exchange, serve

WITNESS = "/witness"
SHOWN = 64


class _Watched:
    """An exchange whose answer is noted."""

    def __init__(self, exchange: Exchange, rid: str, journal: Journal) -> None:
        self._exchange, self._rid, self._journal = exchange, rid, journal
        self._pieces: list[bytes] = []
        self._noted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    @property
    def on_close(self) -> Callable[[], None] | None:
        return self._exchange.on_close

    @on_close.setter
    def on_close(self, call: Callable[[], None] | None) -> None:
        self._exchange.on_close = None if call is None else partial(self._left, call)

    def _note(self, finish: str, count: int = 0) -> None:
        if not self._noted:
            self._noted = True
            self._journal.write(
                "end", rid=self._rid, at_s=time.time(), num_tokens=count, finish=finish
            )

    def _left(self, call: Callable[[], None]) -> None:
        self._note("left", reading_of_stream(self._pieces)[0])
        call()

    def answer(self, status: int, body: bytes, *more: Any, **how: Any) -> None:
        count, finish = reading_of(body) if status == 200 else (0, f"http {status}")
        self._note(finish, count or 0)
        self._exchange.answer(status, body, *more, **how)

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._exchange.write(piece)

    def end(self) -> None:
        count, finish = reading_of_stream(self._pieces)
        self._note("left" if self._exchange.closed else finish, count)
        self._exchange.end()

    def break_piece(self, piece: bytes) -> None:
        self._note("dropped")
        self._exchange.break_piece(piece)

    def break_off(self, status: int, body: bytes) -> None:
        self._note("dropped")
        self._exchange.break_off(status, body)

    def drop(self) -> None:
        self._note("dropped")
        self._exchange.drop()


def reading_of_stream(pieces: Sequence[bytes]) -> tuple[int, str]:
    """Return (sampled tokens, finish) of the events that were sent; a broken end has no finish."""
    count, finish = 0, "broken"
    for line in b"".join(pieces).split(b"\n"):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = msgspec.json.decode(line[5:])
        if "meta_info" in event:
            count = event["meta_info"].get("completion_tokens", count)
            reason = event["meta_info"].get("finish_reason")
            finish = reason["type"] if reason else finish
            continue
        for choice in event.get("choices", ()):
            count += len(choice.get("token_ids") or ())
            finish = choice.get("finish_reason") or finish
    return count, finish


def asked_of(body: dict[str, Any]) -> tuple[str, list[int], dict[str, Any], bool]:
    """Return (rid, ids, sampling in SGLang's names, whether it is streamed) of either protocol."""
    rid = body.get("rid") or body.get("request_id") or ""
    sampling = dict(body["sampling_params"])
    if "max_tokens" in sampling:
        sampling["max_new_tokens"] = sampling.pop("max_tokens")
    if "sampling_seed" in sampling:
        sampling["seed"] = sampling.pop("sampling_seed")
    ids = body["input_ids"] if "input_ids" in body else body["token_ids"]
    return rid, ids, sampling, bool(body.get("stream"))


def watching(
    handle: Callable[[Any], None], journal: Journal, shown: deque[bytes]
) -> Callable[[Exchange], None]:
    """Return a handler that notes what passes to `handle`."""

    def watch(exchange: Exchange) -> None:
        if exchange.path == WITNESS:
            exchange.answer(200, b"[" + b",".join(shown) + b"]")
            return
        body = msgspec.json.decode(exchange.body) if exchange.path in GENERATE else {}
        if "sampling_params" not in body:  # or a look at what it can do
            handle(exchange)
            return
        rid, ids, sampling, stream = asked_of(body)
        shown.append(exchange.body)
        rid = rid or exchange.header(b"x-request-id") or ""
        journal.write("start", rid=rid, ids=ids, sampling=sampling, stream=stream, at_s=time.time())
        handle(_Watched(exchange, rid, journal))

    return watch


async def run(notes: Path, arguments: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    args = parser().parse_args(arguments)
    engine = build(args)
    handler = watching(engine.handle, Journal(notes), deque(maxlen=SHOWN))
    server = await serve(handler, args.host, args.port, keepalive_s=KEEPALIVE_S)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2:]))
