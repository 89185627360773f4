"""Clients that are not nice: raw bytes on a socket, and health that is asked for meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.gateway.doubles import Acts, DoubleBook, DoubleSession
from tests.integration.gateway.stage import HELLO, Stage, gateway_stage, wait_until
from worker.gateway.limits import HttpLimits

BODY = json.dumps({"model": "m", "messages": HELLO}).encode()
ASKER = str(Path(__file__).with_name("asker.py"))
STREAM = json.dumps({"model": "m", "messages": HELLO, "stream": True}).encode()


@contextlib.asynccontextmanager
async def double_stage(
    *acts: Acts, limits: HttpLimits | None = None, **options: Any
) -> AsyncIterator[tuple[Stage, DoubleSession]]:
    """Yield a gateway with one session that does what `acts` says; no engine, no renderer."""
    session = DoubleSession(*acts)
    book = DoubleBook(session)
    async with gateway_stage(None, book=book, engine=object(), limits=limits, **options) as stage:
        stage.session = session
        yield stage, session


def request(
    session: DoubleSession,
    body: bytes = BODY,
    *headers: str,
    path: str = "v1/chat/completions",
    length: int | None = None,
) -> bytes:
    """Return the bytes of a request; `length` is said in place of the body's."""
    lines = [f"POST /sessions/{session.key}/{path} HTTP/1.1", "host: x", *headers]
    if length is not None or not any("transfer-encoding" in h for h in headers):
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    """Return a body in chunks, its end included."""
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (*pieces, b""))


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read one response's head."""
        async with asyncio.timeout(20):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines[1:] if line]
        return int(lines[0].split(" ")[1]), {n.lower(): v.strip() for n, _, v in pairs}

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Read one response with a length and JSON in it."""
        status, headers = await self.head()
        async with asyncio.timeout(20):
            body = await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, json.loads(body)

    async def rest(self) -> bytes:
        """Read until the server closes; what a reset leaves counts as closed."""
        got = b""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(1 << 16):
                    got += piece
        return got

    def leave(self) -> None:
        """Go without a goodbye."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(stage: Stage) -> AsyncIterator[RawClient]:
    """Yield a connection to the gateway."""
    client = await connect(stage)
    try:
        yield client
    finally:
        client.leave()


async def connect(stage: Stage) -> RawClient:
    """Return a connection to the gateway."""
    return RawClient(*await asyncio.open_connection("127.0.0.1", stage.gateway.port))


@dataclass
class Health:
    """What became of the questions for health."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    """`late` for each that was not answered within a second; else what was answered."""

    async def during(self, attack: Callable[[], Awaitable[None]], *, answers: int = 10) -> None:
        """Attack once, and until so many questions were answered meanwhile."""
        enough = self.answered + answers
        await attack()
        while self.answered < enough and not self.failures:
            await attack()


@contextlib.asynccontextmanager
async def health_asked(stage: Stage) -> AsyncIterator[Health]:
    """Ask for health all the while, in a process of its own; each must be answered in a second.

    What there is before is none of the collector's business meanwhile, as in a worker: the millions
    of objects of a test process would hold its loop, and so the gateway's, for longer than that.
    """
    gc.collect()
    gc.freeze()
    pipe = asyncio.subprocess.PIPE
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", ASKER, str(stage.gateway.port)), stdin=pipe, stdout=pipe
    )
    assert asker.stdin is not None
    health = Health()
    hearing = asyncio.ensure_future(_hear(asker, health))
    try:
        await wait_until(lambda: health.answered > 0 or hearing.done())
        yield health
        asker.stdin.close()  # it asks once more
        async with asyncio.timeout(20):
            await hearing
    finally:
        with contextlib.suppress(ProcessLookupError):
            asker.kill()
        await hearing
        await asker.wait()
        gc.unfreeze()
    assert health.failures == [], f"{len(health.failures)} of {health.answered} and these"
    assert health.answered >= 2


async def _hear(asker: asyncio.subprocess.Process, health: Health) -> None:
    assert asker.stdout is not None
    while word := (await asker.stdout.readline()).decode().strip():
        if word == "ok":
            health.answered += 1
        else:
            health.failures.append(word)
