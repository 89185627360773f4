"""The HTTP face of a worker and of the exporter: `/metrics`, `/healthz`, `/readyz`.

Owns the listening socket. Never decides health: it asks the two functions it was given.
Invariant: `/healthz` speaks of this process alone (alive, loop lag), `/readyz` of what it needs
(Redis and one engine, or the run), so an engine outage never makes an orchestrator restart workers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from ..bounded import in_thread

PORTS_TRIED = 64
SHUTDOWN_S = 0.5
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Checks = Callable[[], Awaitable[dict[str, bool]]]


class Rendered(Protocol):
    """What is served: safe to ask in a thread, while somebody counts."""

    def render(self) -> bytes:
        """Return the exposition text."""
        ...


class TelemetryServer:
    """Serves one process's telemetry."""

    def __init__(self, metrics: Rendered, *, lag_s: Callable[[], float], ready: Checks) -> None:
        self._metrics, self._lag_s, self._ready = metrics, lag_s, ready
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listen on `port`, else on the next free one (0 takes any); return which.

        Raises:
            OSError: none of `PORTS_TRIED` ports is free.
        """
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_health)
        app.router.add_get("/readyz", self._serve_ready)
        # A client that does not read its answer must not keep the process from ending.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        listener = listen(host, port)
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        return self.port

    async def aclose(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        # A scrape walks every series in Python: off the loop, where rollouts are waiting.
        body = await in_thread(self._metrics.render)
        return web.Response(body=body, headers={"Content-Type": _CONTENT_TYPE})

    async def _serve_health(self, request: web.Request) -> web.Response:
        return _json(200, {"alive": True, "loop_lag_s": round(self._lag_s(), 4)})

    async def _serve_ready(self, request: web.Request) -> web.Response:
        checks = await self._ready()
        return _json(200 if all(checks.values()) else 503, checks)


def _json(status: int, body: object) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Return a socket that listens on `port`, else on the next free one; 0 takes any.

    Raises:
        OSError: none of `PORTS_TRIED` ports is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = range(port, min(port + PORTS_TRIED, 65536)) if port else (0,)
    last: OSError | None = None
    for candidate in tried:
        try:
            return socket.create_server((host, candidate), family=family, backlog=backlog)
        except OSError as error:
            last = error
    raise OSError(f"no free port from {port} on {host}: {last}")
