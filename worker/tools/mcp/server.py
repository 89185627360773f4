"""One MCP server: few sessions for many calls, made anew when they die.

Owns which session a call runs on and whether a call is sent again. Never decides what a call may
take. Invariants: a call that a tool may have seen is never sent again; a call ends within its time,
and one that no server took is no fault of the policy's; one session at a time is being made.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp.client
import structlog
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, PARSE_ERROR
from pydantic import ValidationError

from rollstream.errors import ConfigError, ToolFault
from rollstream.settings import McpTable

from ...bounded import LeakedCancel, Overdue, in_thread, run_bounded
from ...functions import describe
from ..outcome import ToolError, ToolTrouble
from .content import text_of_result
from .fate import Fate, Trouble
from .session import NotOpened, Session, shown

if TYPE_CHECKING:
    from mcp_types import CallToolResult
    from mcp_types import Tool as ListedTool

log = structlog.get_logger("worker")

FIRST_DELAY_S, MOST_DELAY_S = 0.1, 2.0
"""Between attempts; the latter also a quarter of `connect_timeout_s`, so that a call that waits so
long meets several."""
UNREACHABLE, REFUSED, LOST = "mcp_unreachable", "mcp_refused", "mcp_lost"
"""Details of a `ToolFault`."""


class McpServer:
    """A server of the configuration."""

    def __init__(self, name: str, table: McpTable) -> None:
        self.name, self._table = name, table
        self.url = shown(table.url)
        """For people."""
        self._most_delay_s = min(MOST_DELAY_S, table.connect_timeout_s / 4)
        self._sessions: list[Session] = []
        """All that still run, those that are about to end included."""
        self._opening: asyncio.Task[NotOpened | None] | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._not_before = 0.0
        self._delay_s = FIRST_DELAY_S
        self._is_closed = False
        self._is_down = False
        self._problem: NotOpened | None = None
        """Why the last session did not come about."""
        self._told: dict[str, Any] | None = None
        """The last list that was told to be another than that of the start."""
        self.listed: list[ListedTool] = []
        """What it listed at the start; this is what prompts are rendered with to the end."""

    # --- life ------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Reach it, within `connect_timeout_s`, and list its tools.

        Raises:
            ConfigError: it cannot be reached, refuses the token, or is no MCP server.
        """
        # What it says there is said here, once and with its server.
        logging.getLogger(mcp.client.__name__).setLevel(logging.CRITICAL)
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self._token()
        self._ssl_context = await in_thread(ssl.create_default_context)
        limit = time.monotonic() + self._table.connect_timeout_s
        while True:
            problem = await self._open_within(limit - time.monotonic())
            if self.num_sessions:
                return
            if (problem is not None and problem.refused) or time.monotonic() >= limit:
                said = self._problem or f"no answer within {self._table.connect_timeout_s:g} s"
                raise ConfigError(
                    f"mcp.{self.name}: {self.url} cannot be used: {said}; "
                    "start the server, or check url and token_file"
                )

    async def aclose(self) -> None:
        """End every session, calls that run included, within a bound."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
        await asyncio.gather(*(session.aclose() for session in self._sessions))
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    @property
    def num_sessions(self) -> int:
        """Sessions that calls may be made on."""
        return sum(session.is_alive for session in self._sessions)

    # --- calls -----------------------------------------------------------------------------------
    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool and return its result as text.

        A server that is not there is waited for, `connect_timeout_s` at most.

        Raises:
            ToolFault: the server is not there, refuses, or was lost with the call.
            ToolTrouble: what the server answered is an error, or too large, or it did not answer in
                time; the model reads which.
        """
        now = time.monotonic()
        limit = now + timeout_s
        patience = min(limit, now + self._table.connect_timeout_s)
        delay_s = FIRST_DELAY_S
        while True:
            session = await self._session(patience)
            fate = Fate()
            work = functools.partial(session.call, tool, arguments, fate)
            try:
                with session.used():
                    return _text_of(await run_bounded(work, timeout_s=limit - time.monotonic()))
            except Overdue:
                if not fate.was_sent:
                    raise self._fault(UNREACHABLE, fate.said) from None
                said = f"{tool} did not answer within {timeout_s:g} s"
                raise ToolTrouble(said, ToolError.TIMEOUT) from None
            except ToolTrouble:
                raise
            except Exception as error:  # noqa: BLE001 - the library may raise anything
                self._judge(session, fate, error)
            # No tool ran: it may be asked again.
            if time.monotonic() + delay_s >= patience:
                raise self._fault(UNREACHABLE, fate.said)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._most_delay_s)

    def _judge(self, session: Session, fate: Fate, error: Exception) -> None:
        """Return where a call may be sent again; raise what became of it otherwise."""
        trouble, said = fate.trouble, fate.said or _words(error)
        if isinstance(error, LeakedCancel):  # the session was torn down around it
            said = "the session ended"
        if trouble is None and _is_of_library(error):
            trouble = Trouble.LOST if fate.was_sent else Trouble.NOT_RUN
        match trouble:
            case None:
                raise ToolTrouble(said) from None
            case Trouble.TOO_LARGE:
                raise ToolTrouble(said, ToolError.BAD_RESULT) from None
            case Trouble.LOST:
                raise self._fault(LOST, said) from None
            case Trouble.NOT_RUN | Trouble.REFUSED:
                session.retire()
                fate.said = said

    def _fault(self, detail: str, said: str) -> ToolFault:
        message = f"MCP server {self.name!r} ({self.url}): {said or 'it does not answer'}"
        return ToolFault(message, retryable=True, detail=detail)

    # --- sessions --------------------------------------------------------------------------------
    async def _session(self, limit: float) -> Session:
        """Return the session with the fewest calls; waits while there is none."""
        while not self._is_closed:
            alive = [session for session in self._sessions if session.is_alive]
            if alive:
                session = min(alive, key=lambda session: session.num_calls)
                if session.num_calls and len(alive) < self._table.connections:
                    self._begin()  # for the next call; this one does not wait for it
                return session
            problem = await self._open_within(limit - time.monotonic())
            if problem is not None and problem.refused:
                raise self._fault(REFUSED, str(problem))
            if time.monotonic() >= limit and not self.num_sessions:
                raise self._fault(UNREACHABLE, str(self._problem or ""))
        raise self._fault(UNREACHABLE, "this worker is stopping")

    def _begin(self) -> asyncio.Task[NotOpened | None]:
        """Have a session made, by the one task that does so."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name=f"mcp-open-{self.name}")
        return self._opening

    async def _open_within(self, timeout_s: float) -> NotOpened | None:
        """Wait for the next session; return why there is none, None where time is over."""
        opening = self._begin()
        done, _ = await asyncio.wait((opening,), timeout=max(timeout_s, 0.0))
        if not done or opening.cancelled():
            return None
        return opening.result()

    async def _open(self) -> NotOpened | None:
        await asyncio.sleep(self._not_before - time.monotonic())
        table = self._table
        assert self._ssl_context is not None
        try:
            session = Session(table.url, self._token(), table.connect_timeout_s, self._ssl_context)
            # Before it begins: it is closed with us whatever becomes of it.
            self._sessions = [*filter(_is_running, self._sessions), session]
            listed = await session.open()
        except (NotOpened, ConfigError) as error:
            self._problem = error if isinstance(error, NotOpened) else NotOpened(str(error))
            self._not_before = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
            self._delay_s = min(2 * self._delay_s, self._most_delay_s)
            self._say_down(self._problem)
            return self._problem
        self._delay_s, self._not_before, self._problem = FIRST_DELAY_S, 0.0, None
        self._say_up(listed)
        return None

    def _token(self) -> str | None:
        """Return the token as the file has it now: secrets are changed while a run goes on.

        Raises:
            ConfigError: the file cannot be read, or holds none.
        """
        path: Path | None = self._table.token_file
        if path is None:
            return None
        try:
            token = path.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"mcp.{self.name}.token_file {path}: {describe(error)}") from None
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"mcp.{self.name}.token_file {path} holds no token")
        return token

    # --- what is said ----------------------------------------------------------------------------
    def _say_down(self, problem: NotOpened) -> None:
        if self.listed and not self._is_down and not self.num_sessions:
            self._is_down = True
            log.warning("mcp_server_down", server=self.name, url=self.url, why=str(problem))

    def _say_up(self, listed: list[ListedTool]) -> None:
        if self._is_down:
            self._is_down = False
            log.info("mcp_server_back", server=self.name)
        if not self.listed:
            self.listed = listed
            return
        before, now = _schemas(self.listed), _schemas(listed)
        if now not in (before, self._told):
            log.warning(
                "mcp_tools_changed",
                server=self.name,
                gone=sorted(set(before) - set(now)),
                new=sorted(set(now) - set(before)),
                changed=sorted(n for n in set(now) & set(before) if now[n] != before[n]),
                message="prompts keep the tools of the start; start the worker again",
            )
        self._told = now


def _schemas(listed: list[ListedTool]) -> dict[str, Any]:
    return {tool.name: (tool.description, tool.input_schema) for tool in listed}


def _is_running(session: Session) -> bool:
    return session.is_running


def _text_of(result: CallToolResult) -> str:
    text = text_of_result(result)
    if result.is_error:
        raise ToolTrouble(text or "the tool failed and said nothing")
    return text


def _is_of_library(error: Exception) -> bool:
    """Return whether it says that no answer came, or none that makes sense.

    The library gives such errors codes of the protocol, and servers use -32000 for their own.
    """
    if not isinstance(error, MCPError):
        return isinstance(error, ValidationError | LeakedCancel)
    if error.code == CONNECTION_CLOSED:
        return error.message.startswith(("Connection closed", "SSE stream "))
    return error.code == PARSE_ERROR


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, MCPError) else describe(error)
