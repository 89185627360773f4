"""One session with an MCP server, alive in a task of its own.

Owns the making and the end of one session. Never decides whether a call is repeated: `server` does.
Invariant: everything that the library opens for a session is entered and left in the one task
`_live`, whoever asks for its end and however; `aclose` returns within its bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx2
import structlog
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, Implementation

import rollstream
from rollstream.urls import shown_url

from ...functions import describe
from .fate import FATE, Fate, Trouble
from .wire import Wire

if TYPE_CHECKING:
    from mcp_types import CallToolResult
    from mcp_types import Tool as ListedTool

log = structlog.get_logger("worker")

MAX_PAGES = 100
CLOSE_S = 3.0
"""How long a session may take to say goodbye, and again to be torn down."""


def shown(url: str) -> str:
    """Return a URL without its secrets: hosted servers take keys as user and in the query."""
    return shown_url(url).partition("?")[0]


class NotOpened(Exception):
    """No session came about."""

    def __init__(self, said: str, *, refused: bool = False) -> None:
        super().__init__(said)
        self.refused = refused
        """The server wants another token: trying again does not help."""


class Session:
    """A session; `num_calls` callers wait for theirs on it, side by side."""

    def __init__(
        self, url: str, token: str | None, connect_timeout_s: float, ssl_context: ssl.SSLContext
    ) -> None:
        self._url, self._shown_url, self._token = url, shown(url), token
        self._connect_timeout_s, self._ssl_context = connect_timeout_s, ssl_context
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[list[ListedTool]] | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_calls = 0
        self.is_retired = False
        """It gets no new calls, and ends with its last one."""

    @property
    def is_alive(self) -> bool:
        """Whether calls may be made on it."""
        return self._client is not None and not self.is_retired

    @property
    def is_running(self) -> bool:
        """Whether anything of it is still there."""
        return self._task is not None and not self._task.done()

    async def open(self) -> list[ListedTool]:
        """Begin, and return the tools that the server lists.

        Raises:
            NotOpened: the server cannot be reached, is no MCP server, or refuses.
        """
        fate = Fate()
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(fate), name="mcp-session")
        try:
            await asyncio.wait(
                (self._opened, self._task),
                timeout=self._connect_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._opened.done():
                return self._opened.result()
        finally:
            if not self._opened.done() or self._opened.cancelled():
                self._task.cancel()
        if not self._task.done():
            fate.said = fate.said or f"no answer within {self._connect_timeout_s:g} s"
            await self.aclose()
        raise NotOpened(fate.said or "it ended at once", refused=fate.trouble is Trouble.REFUSED)

    async def call(self, name: str, arguments: Mapping[str, Any], fate: Fate) -> CallToolResult:
        """Call a tool, in a task of its own; what the network makes of it is noted in `fate`.

        Raises:
            MCPError: the server's answer is an error, or `fate` says what happened.
            Exception: the answer is no result, or not what the tool's own schema says.
        """
        if self._client is None:  # it broke since it was chosen
            raise MCPError(CONNECTION_CLOSED, "Connection closed")
        FATE.set(fate)  # in the context of this call's own task
        return await self._client.call_tool(name, dict(arguments))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Count a call while its caller waits for it, from the moment it chose this session."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            self._end_if_idle()

    def retire(self) -> None:
        """Give it no new calls; it ends behind those that run."""
        self.is_retired = True
        self._end_if_idle()

    async def aclose(self) -> None:
        """End it now; calls that run fail."""
        self.is_retired = True
        self._closing.set()
        if self._task is None:
            return
        for _ in range(2):
            done, _ = await asyncio.wait((self._task,), timeout=CLOSE_S)
            if done:
                return
            self._task.cancel()
        log.warning("mcp_session_left_behind", url=self._shown_url)

    def _end_if_idle(self) -> None:
        if self.is_retired and not self.num_calls:
            self._closing.set()

    async def _live(self, fate: Fate) -> None:
        """Hold everything of the session; ends when told to, or when the session breaks."""
        assert self._opened is not None
        FATE.set(fate)
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        wire = Wire(self._connect_timeout_s, self._ssl_context)
        try:
            async with (
                httpx2.AsyncClient(transport=wire, headers=headers, trust_env=False) as http,
                Client(
                    # What an answer may hold, the wire bounds for both kinds of it.
                    streamable_http_client(self._url, http_client=http, max_sse_event_size=None),
                    client_info=Implementation(name="rollstream", version=rollstream.__version__),
                    cache=None,
                ) as client,
            ):
                listed = await _list_tools(client)
                self._client = client
                if not self._opened.done():
                    self._opened.set_result(listed)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - runs the session: the library may raise anything
            said = describe(_first(error))
            fate.said = fate.said or said
            if self._client is not None:
                log.warning("mcp_session_broke", url=self._shown_url, error=said)
        finally:
            self._client = None
            self.is_retired = True


async def _list_tools(client: Client) -> list[ListedTool]:
    tools: list[ListedTool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ValueError(f"the list of its tools has more than {MAX_PAGES} pages")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
