"""A TCP proxy that misbehaves on demand, between a client and a real server.

Owns a thread with an event loop of its own, so that synchronous clients can be tested too.
Invariant: bytes pass unchanged until `lose_replies` says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `target_port`.

    Attributes:
        lose_replies: how many of the next replies are thrown away, with their connection.
        lost: how many were.
        num_connections: how many there have been.
    """

    def __init__(self, target_port: int, tls: ssl.SSLContext | None = None) -> None:
        self.lose_replies = self.lost = self.num_connections = 0
        self._is_cut = False
        self.port = 0
        self._target, self._tls = target_port, tls
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(45)
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

    def cut(self) -> None:
        """Close every connection, and each new one at once, until `mend`."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._abort_streams)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def _abort_streams(self) -> None:
        for stream in list(self._streams):
            stream.transport.abort()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        self._abort_streams()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        if self._is_cut:
            self._tasks.discard(task)
            writer.transport.abort()
            return
        behind, ahead = await asyncio.open_connection("127.0.0.1", self._target)
        self._streams |= {ahead, writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, ahead, is_reply=False))
                group.create_task(self._pump(behind, writer, is_reply=True))
        except* (ConnectionError, ssl.SSLError):
            pass
        finally:
            self._tasks.discard(task)
            for stream in (ahead, writer):
                self._streams.discard(stream)
                stream.close()
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    await stream.wait_closed()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        while data := await source.read(1 << 16):
            if is_reply and self.lose_replies > 0:
                self.lose_replies -= 1
                self.lost += 1
                raise ConnectionResetError("thrown away")
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("closed")
