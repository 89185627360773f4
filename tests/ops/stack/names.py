"""Names as a network of containers has them: a real DNS server, and processes that ask it.

Owns the server (A records of the names that it is given, over UDP) and the mount namespace in which
a process finds it in its /etc/resolv.conf. Never touches the machine's own resolver. Invariant: a
name has at any moment exactly the addresses that it was last given.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

PORT = 53
"""The only one that a resolv.conf can mean."""
_HEADER = struct.Struct(">HHHHHH")
_A, _IN, _TTL_S = 1, 1, 0
_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583
"""Flags: an answer with authority, and recursion as wished; the same with "no such name"."""
_OTHER_RESOLVER = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


class NameServer:
    """Answers for the names of a network, from a thread of its own.

    Attributes:
        asked: how often each name was asked for.
    """

    def __init__(self, host: str) -> None:
        """Listen.

        Raises:
            PermissionError: ports below 1024 are not ours here.
        """
        self.host = host
        self.asked: dict[str, int] = {}
        self._addresses: dict[str, list[str]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, PORT))
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._thread.start()

    def give(self, name: str, addresses: Sequence[str]) -> None:
        """Have a name mean these addresses from here on; with none there is no such name."""
        self._addresses[name] = list(addresses)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):  # wakes the thread
            self._socket.shutdown(socket.SHUT_RDWR)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (self.host, PORT))
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(4096)
            except OSError:
                return
            if not question:
                return
            with contextlib.suppress(OSError, ValueError, struct.error, IndexError):
                self._socket.sendto(self.answer(question), sender)

    def answer(self, question: bytes) -> bytes:
        """Return the answer to one DNS message with one question."""
        number, _, _, *_ = _HEADER.unpack_from(question)
        name, end = _name(question, _HEADER.size)
        kind, _ = struct.unpack_from(">HH", question, end)
        self.asked[name] = self.asked.get(name, 0) + 1
        known = self._addresses.get(name)
        found = known if known and kind == _A else []
        flags = _ANSWER if known else _NO_SUCH_NAME
        header = _HEADER.pack(number, flags, 1, len(found), 0, 0)
        pointer = 0xC000 | _HEADER.size
        records = [
            struct.pack(">HHHIH", pointer, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
            for address in found
        ]
        return b"".join([header, question[_HEADER.size : end + 4], *records])


def _name(message: bytes, start: int) -> tuple[str, int]:
    """Return the name that begins at `start`, and where it ends."""
    labels = []
    while size := message[start]:
        labels.append(message[start + 1 : start + 1 + size].decode("ascii").lower())
        start += 1 + size
    return ".".join(labels), start + 1


@functools.cache
def _namespace() -> tuple[str, ...] | None:
    """Return the command that gives a process mounts of its own; None where nothing does."""
    if shutil.which("unshare") is None:
        return None
    ways = [("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")]
    for way in ways if os.geteuid() == 0 else ways[1:]:
        tried = [*way, "sh", "-c", _OTHER_RESOLVER, "/dev/null", "true"]
        done = subprocess.run(tried, capture_output=True, check=False, timeout=30)
        if done.returncode == 0:
            return way
    return None


def resolving_by(server: NameServer, folder: Path, command: Sequence[str]) -> list[str] | None:
    """Return a command that runs the same with `server` as its resolver; None where it cannot."""
    way = _namespace()
    if way is None:
        return None
    file = folder / "resolv.conf"
    file.write_text(f"nameserver {server.host}\noptions ndots:0\n")
    return [*way, "sh", "-c", _OTHER_RESOLVER, str(file), *command]
