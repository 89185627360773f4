"""A TCP proxy that counts what every round trip of one client costs.

Owns a thread per direction of each connection. Invariant: bytes pass unchanged; a round trip
begins with the first byte that a client sends after a reply.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_READ = 1 << 18


@dataclass(slots=True)
class Trip:
    """One round trip: what was asked (its first bytes) and how much came back."""

    asked: bytes
    reply_bytes: int = 0

    def asks_for(self, word: bytes) -> int:
        """Return how often a word stands in what was asked."""
        return self.asked.count(word)


class Meter:
    """Listens on a free port and forwards to `target_port`.

    Attributes:
        trips: of all connections, in the order in which they began.
    """

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self.trips: list[Trip] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def of(self, word: bytes) -> list[Trip]:
        """Return the round trips that ask for something."""
        return [trip for trip in self.trips if word in trip.asked]

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]  # our own
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                mine: list[Trip] = []
                self._spawn(self._ask, client, server, mine)
                self._spawn(self._answer, server, client, mine)

    def _ask(self, client: socket.socket, server: socket.socket, mine: list[Trip]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_READ):
                if mine and not mine[-1].reply_bytes:
                    mine[-1].asked += data
                else:
                    mine.append(Trip(data))
                    self.trips.append(mine[-1])
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket, mine: list[Trip]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_READ):
                if mine:
                    mine[-1].reply_bytes += len(data)
                client.sendall(data)
