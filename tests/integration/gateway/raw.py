"""Clients that are not nice: raw bytes on a socket, and health that is asked for meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.integration.gateway.doubles import Acts, DoubleBook, DoubleSession
from tests.integration.gateway.stage import HELLO, Stage, gateway_stage, wait_until
from worker.gateway.limits import HttpLimits

BODY = json.dumps({"model": "m", "messages": HELLO}).encode()
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
    """Health requests during an attack."""

    asked: int = 0
    answered: int = 0
    failures: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def health_asked(stage: Stage) -> AsyncIterator[Health]:
    """Ask for health on a connection of its own all the while; all must be answered."""
    health = Health()
    url = f"http://127.0.0.1:{stage.gateway.port}/healthz"

    async def ask() -> None:
        while True:
            health.asked += 1
            answer = await stage.client.get(url)
            if answer.status_code != 200 or answer.json()["status"] != "ok":
                health.failures.append(answer.text)
            health.answered += 1
            await asyncio.sleep(0.005)

    asking = asyncio.ensure_future(ask())
    await wait_until(lambda: health.answered > 0 or asking.done())
    try:
        yield health
        before = health.answered
        await wait_until(lambda: health.answered > before + 1 or asking.done())
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert health.failures == []
    assert health.answered >= health.asked - 1  # the last one was cut off by us
