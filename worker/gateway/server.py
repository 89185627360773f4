"""The gateway's server: a socket of its own, served by uvicorn's protocol inside the running loop.

Owns the socket, the connections and their end. Never handles signals and never ends the process:
the worker does both. Invariant: after `aclose` no request is under way, every exchange was
committed or left, and the port is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from typing import Any

import structlog
from uvicorn.config import Config
from uvicorn.server import ServerState

from ..telemetry.server import listen
from .bodies import Bodies
from .limits import Connection, HttpLimits, sweep_forever
from .routes import OUTCOMES, Served, Sessions, build_app
from .types import Dialect

log = structlog.get_logger("gateway")

BACKLOG = 2048
END_S = 5.0
"""How long requests may take to end once their clients were cut off."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Gateway:
    """Serves the sessions of one worker to their agents.

    Attributes:
        port: where it listens; 0 before it does.
        instance_id: 32 hex, new for every gateway.
    """

    def __init__(
        self,
        sessions: Sessions,
        dialects: Sequence[Dialect],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str = "",
        model: str = "rollstream",
        limits: HttpLimits | None = None,
    ) -> None:
        """Prepare a server.

        Args:
            sessions: finds a session by its key (`book.Book`).
            dialects: of the chat APIs that are served.
            host: to listen on.
            port: to listen on; one in use takes the next free one, 0 takes any.
            public_url: what agents call the server by; `{port}` is replaced. Empty: host and port.
            model: the name of the one model, for clients that ask.
            limits: of HTTP.
        """
        self._host, self._wanted, self._public_url = host, port, public_url
        self.limits = limits or HttpLimits()
        self.port = 0
        self.instance_id = secrets.token_hex(16)
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._sessions = sessions
        self.bodies = Bodies(self.limits)
        self._app = build_app(
            Served(
                sessions=sessions,
                dialects=dialects,
                limits=self.limits,
                bodies=self.bodies,
                outcomes=self._outcomes,
                instance_id=self.instance_id,
                model=model,
            )
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- what it says of itself ------------------------------------------------------------------
    @property
    def counters(self) -> Mapping[str, int]:
        """Requests so far, by outcome: `ok`, `refused`, `failed`, `left`."""
        return self._outcomes

    @property
    def num_connections(self) -> int:
        """Connections now."""
        return len(self._state.connections)

    @property
    def num_requests(self) -> int:
        """Requests that are being served now."""
        return len(self._state.tasks)

    def base_url(self, key: str) -> str:
        """Return what an agent is given: the URL of its session, without a slash at its end."""
        url = self._public_url.replace("{port}", str(self.port)).rstrip("/")
        if not url:
            host = _WILDCARDS.get(self._host, self._host)
            url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        return f"{url}/sessions/{key}"

    # --- start and stop --------------------------------------------------------------------------
    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            OSError: none of the ports is free.
        """
        listener = listen(self._host, self._wanted, BACKLOG)
        self.port = listener.getsockname()[1]
        config = _config(self._app, self.limits)
        most = self.limits.connections()
        self._set_date()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(config, self._state, self.limits, most),
            sock=listener,
            backlog=BACKLOG,
        )
        self._tasks = [
            asyncio.ensure_future(self._keep_date()),
            asyncio.ensure_future(sweep_forever(self._state, self.limits, loop.time)),
        ]
        if self._wanted not in (0, self.port):
            log.warning("gateway_port_taken", wanted=self._wanted, port=self.port)
        return self.port

    async def aclose(self) -> None:
        """Stop listening, cut every client off and wait until their requests have ended."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in list(self._state.connections):
            if isinstance(connection, Connection):
                connection.abort()
        ending = [*self._state.tasks]
        if ending:
            _, late = await asyncio.wait(ending, timeout=END_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=END_S)
        for own in self._tasks:
            own.cancel()
        for own in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await own
        self._tasks = []

    async def _keep_date(self) -> None:
        while True:
            self._set_date()
            await asyncio.sleep(1.0)

    def _set_date(self) -> None:
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), (b"server", b"rollstream")]


def _config(app: Any, limits: HttpLimits) -> Config:
    """Return uvicorn's settings: no signals, no logs of its own, no headers that we set."""
    config = Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=max(1, round(limits.idle_s)),
        h11_max_incomplete_event_size=limits.max_head_bytes,
    )
    config.load()
    return config
