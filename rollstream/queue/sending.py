"""How asyncio connections write a command: one copy, no task of its own, cancellable.

Owns one replacement of a method of redis-py. Never reads. Invariant: a cancellation is never lost
(Python 3.11's `asyncio.wait_for`, through which redis-py writes, swallows one that arrives when the
write is done, and the cancelled task goes on), and a connection whose write did not end is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis import exceptions

SMALL_BYTES = 1 << 16


class PlainSends:
    """Writes for a connection class of redis-py."""

    is_connected: bool
    socket_timeout: float | None
    _writer: asyncio.StreamWriter

    async def send_packed_command(
        self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Write one packed command, or many."""
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health and self.health_check_interval:
            await self.check_health()
        if isinstance(command, str):
            command = command.encode()
        parts = [command] if isinstance(command, bytes) else list(command)
        try:
            # `writelines` would copy everything into one more buffer.
            for part in _joined(parts):
                self._writer.write(part)
            async with asyncio.timeout(self.socket_timeout):
                await self._writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return one command as it goes over the wire, in one buffer."""
        name, *rest = args
        words = name.split() if isinstance(name, str) and " " in name else [name]
        return [_packed((*words, *rest))]

    def pack_commands(self, commands: Iterable[tuple[Any, ...]]) -> list[bytes]:
        """Return many commands, each in one buffer."""
        return [part for command in commands for part in self.pack_command(*command)]


def _packed(args: tuple[Any, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        if isinstance(arg, bytes):
            raw = arg
        elif isinstance(arg, str):
            raw = arg.encode()
        elif isinstance(arg, int | float) and not isinstance(arg, bool):
            raw = repr(arg).encode()
        else:
            raise exceptions.DataError(f"{type(arg).__name__} cannot be sent to Redis")
        # A large argument is copied once only: into the joined buffer.
        parts += (b"$%d\r\n" % len(raw), raw, b"\r\n")
    return b"".join(parts)


def _joined(parts: list[bytes]) -> Iterable[bytes]:
    """Join neighbours that are small: a system call for each costs more than their copy."""
    small: list[bytes] = []
    for part in parts:
        if len(part) < SMALL_BYTES:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield b"".join(small)
