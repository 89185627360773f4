"""Asks a gateway for its health, again and again, as a process of its own: `asker.py PORT`.

Owns the patience of an operator: one second a question. Never shares a loop or an interpreter with
what it asks, so whatever holds those is seen. It writes a word for each question: `ok`, `late`, or
what was answered in place of it; it ends with one more question once its input ends.

Invariant: a second is twenty waits of 50 ms each, so one in which the whole machine stood still
counts for one of them.
"""

from __future__ import annotations

import select
import socket
import sys
import time

TICKS, TICK_S = 20, 0.05
PAUSE_S = 0.005
"""Between an answer and the next question."""
QUESTION = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


class Asker:
    """One connection at a time; where it made room for another one, a new one is opened."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._held: socket.socket | None = None
        self._left = 0

    def ask(self) -> str:
        """Return the word for one question."""
        self._left = TICKS
        while self._left > 0:
            try:
                if self._held is None:
                    self._held = socket.create_connection(self._address, TICKS * TICK_S)
                self._held.sendall(QUESTION)
                if (answer := self._answer(self._held)) is not None:
                    return answer
            except OSError:
                self._left -= 1
                time.sleep(TICK_S)
            self._drop()
        return "late"

    def _answer(self, held: socket.socket) -> str | None:
        """Return what was answered, None where the connection ended or there was no time left."""
        got = b""
        while self._left > 0:
            if not select.select([held], [], [], TICK_S)[0]:
                self._left -= 1
                continue
            if not (piece := held.recv(1 << 16)):
                raise ConnectionError
            got += piece
            head, _, body = got.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if length and len(body) >= int(length):
                is_ok = head.startswith(b"HTTP/1.1 200 ") and b'"status":"ok"' in body
                return "ok" if is_ok else ascii(got)
        return None

    def _drop(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def main() -> None:
    """Ask until the input ends, and once more."""
    asker, goes_on = Asker(int(sys.argv[1])), True
    while goes_on:
        goes_on = not select.select([sys.stdin], [], [], PAUSE_S)[0]
        sys.stdout.write(f"{asker.ask()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
