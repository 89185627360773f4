"""How asyncio connections write a command: without a task of its own, and cancellable.

Owns one replacement of a method of redis-py. Never reads. Invariant: a cancellation is never lost
(Python 3.11's `asyncio.wait_for`, through which redis-py writes, swallows one that arrives when the
write is done, and the cancelled task goes on), and a connection whose write did not end is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import redis.asyncio
from redis import exceptions


class _Sends:
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
        try:
            if isinstance(command, bytes):
                self._writer.write(command)
            else:
                self._writer.writelines(command)
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


def with_plain_sends(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Return `client`, whose connections from now on write as this module says."""
    kind = client.connection_pool.connection_class
    sending = type(f"Rollstream{kind.__name__}", (_Sends, kind), {})
    client.connection_pool.connection_class = sending
    return client
