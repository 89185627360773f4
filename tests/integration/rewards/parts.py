"""A judge's server, and a renderer that reads ids as characters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from worker.types import AssistantMessage


class Plain:
    """Parses a turn by decoding it: ids are code points."""

    def parse(self, ids: Any, *_: Any) -> AssistantMessage:
        """Return the whole turn as content."""
        return AssistantMessage(self.decode(ids), None, [])

    @staticmethod
    def decode(ids: Any) -> str:
        """Return the characters."""
        return "".join(map(chr, ids.tolist()))


class Server:
    """Answers what a test says, and keeps what it was sent."""

    def __init__(self, answer: Callable[[Any, int], Any]) -> None:
        self._answer = answer
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; the test's function gets its body and its number, from 1."""
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        answer = self._answer(body, len(self.bodies))
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@asynccontextmanager
async def serving(answer: Callable[[Any, int], Any]) -> AsyncIterator[Server]:
    """Serve until the block ends."""
    server = Server(answer)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/score", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        yield server
    finally:
        await runner.cleanup()
