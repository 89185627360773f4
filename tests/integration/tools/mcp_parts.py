"""A real MCP server as a child process, and the worker's end of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.devserver import free_port
from rollstream.settings import McpTable
from worker.tools.mcp import McpServers, McpTool

ROOT = Path(__file__).resolve().parents[3]
READY_S = 60.0


class ToyServer:
    """A server of `mcp_server`, which can be killed and come back at the same address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.journal = folder / "journal"
        self.faults = folder / "faults"
        self.flags = list(flags)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.child = self._child()

    def _child(self) -> Child:
        command = [sys.executable, "-m", "tests.integration.tools.mcp_server"]
        command += ["--port", str(self.port), "--journal", str(self.journal)]
        command += ["--fault-file", str(self.faults), *self.flags]
        return Child(
            "mcp-server",
            command,
            folder=self.folder,
            environment=dict(os.environ),
            cwd=ROOT,
            ready_url=f"http://127.0.0.1:{self.port}/health",
        )

    def start(self, *flags: str) -> None:
        """Start it, again perhaps, and wait until it serves."""
        if flags:
            self.flags = list(flags)
            self.child = self._child()
        self.child.start()
        self.child.wait_ready(READY_S)

    def lines(self, line: str) -> int:
        """How often the journal says so."""
        return self.journal.read_text().splitlines().count(line) if self.journal.exists() else 0

    def breaks(self, fault: str) -> None:
        """Let calls get this fault; "" is none."""
        whole = self.faults.with_suffix(".new")
        whole.write_text(fault)
        whole.replace(self.faults)  # the server never reads half of it

    def broken(self, fault: str) -> int:
        """How often a call got it."""
        seen = self.faults.with_suffix(".seen")
        return seen.read_text().splitlines().count(fault) if seen.exists() else 0


@contextlib.contextmanager
def toy_server(folder: Path, *flags: str) -> Iterator[ToyServer]:
    """A server that serves, and is gone behind the block."""
    server = ToyServer(folder, *flags)
    try:
        server.start()
        yield server
    finally:
        server.child.kill()


@contextlib.asynccontextmanager
async def connected(
    server: ToyServer | str, tools: Sequence[str] = ("mcp:toys",), **table: Any
) -> AsyncIterator[McpServers]:
    """The worker's end, started; behind the block nothing of it is left."""
    url = server if isinstance(server, str) else server.url
    before, num_sockets = asyncio.all_tasks(), open_sockets()
    servers = McpServers({"toys": McpTable(url=url, **table)}, [tools])
    try:
        await servers.start()
        yield servers
    finally:
        await servers.aclose()
    await wait_until(lambda: asyncio.all_tasks() <= before)
    await wait_until(lambda: open_sockets() <= num_sockets)


def tools_of(servers: McpServers, name: str = "mcp:toys") -> dict[str, McpTool]:
    """By the names that the model uses."""
    return {tool.name: tool for tool in servers.tools(name)}


def open_sockets() -> int:
    """Sockets that this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


async def wait_until(true: Callable[[], object]) -> None:
    """Wait for what comes about without us."""
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit, "it did not come about"
        await asyncio.sleep(0.01)
