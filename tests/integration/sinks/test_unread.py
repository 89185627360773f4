"""A client that does not read its answer keeps no process from ending."""

from __future__ import annotations

import asyncio

from worker.telemetry.server import SHUTDOWN_S, TelemetryServer

BODY = b"x 1\n" * (16 << 20)
"""More than all buffers on the way hold."""
BOUND_S = 15.0


class Large:
    def render(self) -> bytes:
        return BODY


async def ready() -> dict[str, bool]:
    return {}


async def test_the_server_ends_while_a_client_leaves_its_answer_unread() -> None:
    assert SHUTDOWN_S < BOUND_S
    server = TelemetryServer(Large(), lag_s=lambda: 0.0, ready=ready)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(BOUND_S):
        await server.aclose()
    writer.close()
