"""The wires between the processes and Redis: one port for each process, and each can be spoiled.

Owns a thread with an event loop, and every byte between a client and the server. Never changes a
byte that it lets through. Invariant: what is done to one process's link reaches no other process;
a server that is down looks like one (connections are closed at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16


class _Link:
    """The connections of one process."""

    def __init__(self) -> None:
        self.pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.replies_to_lose = 0
        self.tears = 0

    def cut(self) -> None:
        """Reset every connection."""
        for pair in list(self.pairs):
            for stream in pair:
                stream.transport.abort()


class Links:
    """Ports of 127.0.0.1 that lead to one server; a context manager.

    Attributes:
        ports: by name of the process.
    """

    def __init__(self, target_port: int, names: Sequence[str]) -> None:
        self.ports: dict[str, int] = {}
        self._target, self._names = target_port, names
        self._links: dict[str, _Link] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=[self._serve()], name="links", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the links were not open within 10 s")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    # --- what can be done to a link, from any thread -------------------------------------------
    def cut(self, name: str) -> None:
        """Reset every connection of a process."""
        self._do(self._links[name].cut)

    def tear(self, name: str) -> None:
        """Let through half of what a process sends next, then reset its connections."""
        link = self._links[name]
        self._do(lambda: setattr(link, "tears", 1))

    def lose(self, name: str, count: int) -> None:
        """Throw away the next `count` replies to a process, each with its connection."""
        link = self._links[name]
        self._do(lambda: setattr(link, "replies_to_lose", count))

    def stall(self, name: str) -> None:
        """Let nothing pass until `heal`."""
        self._do(self._links[name].flowing.clear)

    def heal(self, name: str) -> None:
        """Let everything pass again."""
        link = self._links[name]

        def heal() -> None:
            link.flowing.set()
            link.replies_to_lose = link.tears = 0

        self._do(heal)

    def _do(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    # --- the loop ------------------------------------------------------------------------------
    async def _serve(self) -> None:
        servers = []
        for name in self._names:
            link = self._links[name] = _Link()
            server = await asyncio.start_server(self._handler(link), "127.0.0.1", 0)
            servers.append(server)
            self.ports[name] = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handler(self, link: _Link) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._carry(link, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def _carry(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one connection until either side ends it."""
        try:
            behind, ahead = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, ahead)
        link.pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests(link, reader, ahead))
                both.create_task(self._replies(link, behind, writer))
        except* OSError:
            pass
        finally:
            link.pairs.discard(pair)
            for stream in pair:
                stream.transport.abort()
                with contextlib.suppress(OSError):
                    await stream.wait_closed()

    async def _requests(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            await link.flowing.wait()
            if link.tears:
                link.tears = 0
                sink.write(data[: len(data) // 2])
                await sink.drain()
                link.cut()
                return
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("the client closed")

    async def _replies(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            await link.flowing.wait()
            if link.replies_to_lose > 0:
                link.replies_to_lose -= 1
                raise ConnectionResetError("a reply was lost")
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("the server closed")
