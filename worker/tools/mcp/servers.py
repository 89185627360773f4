"""The MCP servers that the environments' tools name.

Owns which servers are started, and the reading of `mcp:NAME` and `mcp:NAME/TOOL`. Never calls a
tool. Invariants: a server that no environment names is never reached; whatever is wrong with one is
a `ConfigError` before anything is leased.
"""

from __future__ import annotations

import asyncio
import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError

from ...bounded import in_thread
from .tool import McpTool

if TYPE_CHECKING:
    from mcp_types import Tool as ListedTool

    from rollstream.settings import McpTable

    from .server import McpServer

MCP = "mcp:"
"""What a name in `tools` begins with."""


class McpServers:
    """Those that are named in `tools`."""

    def __init__(self, tables: Mapping[str, McpTable], tools: Iterable[Sequence[str]]) -> None:
        """Prepare; nothing is reached yet.

        Args:
            tables: of the configuration, by name.
            tools: of each environment; of other entries than `mcp:…` only the names are read.

        Raises:
            ConfigError: a name that no table has, or that is none.
        """
        self._tables = tables
        self._servers: dict[str, McpServer] = {}
        self._entries = [tuple(names) for names in tools]
        mine = {name for names in self._entries for name in names if name.startswith(MCP)}
        self._wanted = sorted({self._parse(name)[0] for name in mine})
        self._ambiguous: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    async def start(self) -> None:
        """Reach every server that is named, side by side, and list its tools.

        Raises:
            ConfigError: one cannot be reached within its `connect_timeout_s`, or refuses.
        """
        if not self._wanted:
            return
        server = await in_thread(_import_server)  # half a second that the loop need not stand
        self._servers = {name: server(name, self._tables[name]) for name in self._wanted}
        starts = [asyncio.create_task(server.start()) for server in self._servers.values()]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        for names in self._entries:
            self._ambiguous |= self._collisions(names)

    def tools(self, name: str) -> list[McpTool]:
        """Return the tools that an entry of `tools` names, in the server's order.

        One whose name another tool of an environment has too is called `SERVER_TOOL`.

        Raises:
            ConfigError: the server has none, or none of that name, or one cannot be described.
        """
        server_name, tool = self._parse(name)
        server = self._servers[server_name]
        if not (found := self._listed(server_name, tool)):
            known = [listed.name for listed in server.listed]
            raise ConfigError(
                f"tool {name!r}: MCP server {server_name!r} has no {tool!r}"
                f"{_nearest(tool, known)}; it has: {', '.join(known) or 'no tools'}"
                if tool
                else f"tool {name!r}: MCP server {server_name!r} has no tools"
            )
        made = [McpTool(server, t.name, t.description or "", t.input_schema) for t in found]
        pairs = zip(found, made, strict=True)
        return [
            tool.with_server_name() if (server_name, t.name) in self._ambiguous else tool
            for t, tool in pairs
        ]

    async def aclose(self) -> None:
        """End every session, within a bound."""
        await asyncio.gather(*(server.aclose() for server in self._servers.values()))

    def _listed(self, server: str, tool: str) -> list[ListedTool]:
        return [listed for listed in self._servers[server].listed if tool in ("", listed.name)]

    def _collisions(self, names: Sequence[str]) -> set[tuple[str, str]]:
        """Return the servers' tools, as (server, tool), whose name is not theirs alone here."""
        owners: defaultdict[str, set[str]] = defaultdict(set)
        mine = []
        for name in names:
            if not name.startswith(MCP):
                owners[name.rpartition(":")[2]].add(name)  # a function's own name
                continue
            server, tool = self._parse(name)
            for listed in self._listed(server, tool):
                owners[listed.name].add(MCP + server)
                mine.append((server, listed.name))
        return {(server, tool) for server, tool in mine if len(owners[tool]) > 1}

    def _parse(self, name: str) -> tuple[str, str]:
        server, slash, tool = name.removeprefix(MCP).partition("/")
        if server not in self._tables:
            raise ConfigError(
                f"tool {name!r}: there is no MCP server {server!r}"
                f"{_nearest(server, list(self._tables))}; a server is a table [mcp.NAME] with url"
            )
        if slash and not tool:
            raise ConfigError(f"tool {name!r} names no tool; write mcp:NAME or mcp:NAME/TOOL")
        if not self._tables[server].url:
            raise ConfigError(f"mcp.{server}.url is not given")
        return server, tool


def _import_server() -> type[McpServer]:
    from .server import McpServer

    return McpServer


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
