"""Connections that find their server anew whenever they connect: mixins for redis-py's classes.

Owns what happens around one connect and one reply: where to, how long, and what a refusal means.
Never repeats a command (redis-py's `Retry` does, for outages only). Invariant: a server that is
not the one to ask is, to everybody above, one that is away: its connection is closed and the
error is a `ConnectionError`, so the next try goes where `Route` says.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn, Protocol

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from rollstream.queue.route import Address, Route, is_elsewhere

SENTINEL_TIMEOUT_S = 1.0
"""One sentinel's time to connect, and to answer; then the next is asked."""
MIN_REPLY_S = 0.5
"""However little time a caller has left: a server that is well answers within this."""


class Watch(Protocol):
    """Sentinels that know where a master is."""

    @property
    def shown(self) -> str:
        """For messages."""
        ...

    @property
    def sentinels(self) -> tuple[Address, ...]:
        """All of them."""
        ...

    @property
    def master(self) -> str:
        """The name they know it by."""
        ...

    def options(self) -> dict[str, Any]:
        """Options of a client of redis-py for a connection to one of them."""
        ...


class _Routed:
    """What both kinds of connection share.

    Attributes:
        route: of the queue that this connection belongs to.
        watch: who is asked for the address; None where the route knows it.
        probe: a key of the run, read once to hear who owns it.
        handshake_s: how long a server that took the connection may take for its first replies.
        name: what the server is told to call a synchronous connection; empty is nothing.
    """

    route: Route
    watch: Watch | None
    probe: str
    handshake_s: float
    name: str
    _shaking_hands = False
    _generation = -1
    _at: Address | None = None

    def _take_place(self: Any, found: Address | None) -> None:
        route = self.route
        if found is not None:
            route.found(found)
        # The generation first: an address that changes in between makes this connection an old one.
        self._generation, self._at = route.generation, route.address
        if self._at is not None:
            self.host, self.port = self._at

    def _is_old(self) -> bool:
        return self._generation != self.route.generation

    def _unreached(self: Any, error: OSError) -> NoReturn:
        self.route.unreachable(self._at)
        if isinstance(error, TimeoutError):  # unlike a reply, a connect may be tried again at once
            raise RedisConnectionError(f"{self._host_error()} does not take connections") from error
        raise error

    def _elsewhere(self, error: ResponseError) -> NoReturn:
        self.route.refused(error, self._at, self._generation)
        code = getattr(error, "status_code", None)
        said = f"{code} {error}" if code and not str(error).startswith(code) else str(error)
        raise RedisConnectionError(said) from error


class BlockingRouted(_Routed):
    """For a synchronous connection."""

    def connect(self: Any) -> None:
        """Connect where it is not, or where it is connected to a server of before."""
        if self._is_old() and self.is_connected:
            self.disconnect()
        super().connect()  # type: ignore[misc]  # of the connection class beside this one

    def connect_check_health(
        self: Any, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Connect once: whoever sends a command repeats that, connect included."""
        super().connect_check_health(check_health, retry_socket_connect=False)  # type: ignore[misc]

    def _connect(self: Any) -> Any:
        if self.watch is None:
            self._take_place(None)
        else:
            self._take_place(ask_sentinels(self.watch, self.route))
        try:
            return super()._connect()  # type: ignore[misc]
        except OSError as error:
            self._unreached(error)

    def on_connect_check_health(self: Any, check_health: bool = True) -> None:
        """Shake hands, and hear where the run's keys are."""
        self._shaking_hands = True
        try:
            super().on_connect_check_health(check_health)  # type: ignore[misc]
            if not self.route.settled:
                self._asked("HGET", self.probe, "schema")
                self.route.settled = True
            if self.route.wants_nodes and (slots := self._asked("CLUSTER", "SLOTS")):
                self.route.learned(slots)
            if self.name:
                self.route.is_named = self._asked("CLIENT", "SETNAME", self.name) == b"OK"
        finally:
            self._shaking_hands = False

    def _asked(self: Any, *command: str) -> Any:
        """Return an answer, nothing where it is refused: the first command will say why."""
        self.send_command(*command, check_health=False)
        try:
            return self.read_response() or ()
        except ResponseError:
            return ()

    def read_response(self: Any, *args: Any, **how: Any) -> Any:
        """Read one reply, within the caller's time."""
        limit = getattr(self.route.limit, "mono_s", None)
        if "timeout" not in how and (limit is not None or self._shaking_hands):
            bounds = [] if self.socket_timeout is None else [self.socket_timeout]
            if limit is not None:
                bounds.append(max(MIN_REPLY_S, limit - time.monotonic()))
            if self._shaking_hands:
                bounds.append(self.handshake_s)
            how["timeout"] = min(bounds)
        try:
            return super().read_response(*args, **how)  # type: ignore[misc]
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            self.disconnect()
            self._elsewhere(error)


class AsyncRouted(_Routed):
    """For an asyncio connection."""

    async def connect(self: Any) -> None:
        """Connect where it is not, or where it is connected to a server of before."""
        if self._is_old() and self.is_connected:
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[misc]

    async def connect_check_health(
        self: Any, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Connect once: whoever sends a command repeats that, connect included."""
        await super().connect_check_health(check_health, retry_socket_connect=False)  # type: ignore[misc]

    async def _connect(self: Any) -> None:
        if self.watch is None:
            self._take_place(None)
        else:
            self._take_place(await ask_sentinels_async(self.watch, self.route))
        try:
            await super()._connect()  # type: ignore[misc]
        except OSError as error:
            self._unreached(error)

    async def on_connect_check_health(self: Any, check_health: bool = True) -> None:
        """Shake hands, and hear where the run's keys are."""
        try:
            async with asyncio.timeout(self.handshake_s):
                await super().on_connect_check_health(check_health)  # type: ignore[misc]
                if not self.route.settled:
                    await self._asked("HGET", self.probe, "schema")
                    self.route.settled = True
                if self.route.wants_nodes and (slots := await self._asked("CLUSTER", "SLOTS")):
                    self.route.learned(slots)
        except TimeoutError:
            raise RedisTimeoutError(f"{self._host_error()} does not shake hands") from None

    async def _asked(self: Any, *command: str) -> Any:
        await self.send_command(*command, check_health=False)
        try:
            return await self.read_response() or ()
        except ResponseError:
            return ()

    async def read_response(self: Any, *args: Any, **how: Any) -> Any:
        """Read one reply."""
        try:
            return await super().read_response(*args, **how)  # type: ignore[misc]
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            await self.disconnect(nowait=True)
            self._elsewhere(error)


# --- Sentinel ------------------------------------------------------------------------------------
def ask_sentinels(watch: Watch, route: Route) -> Address:
    """Return where the master is, as the first sentinel that answers says.

    Raises:
        redis.exceptions.ConnectionError: none can be reached, or none knows that master.
    """
    trouble: list[str] = []
    for sentinel in _in_turn(watch, route):
        host, port = sentinel
        client = redis.Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **watch.options())
        try:
            found = client.execute_command(*_question(watch))  # type: ignore[no-untyped-call]  # redis-py
        except (RedisError, OSError) as error:
            trouble.append(f"{host}:{port}: {error}")
        else:
            if found:
                return _heard(found, sentinel, route)
            trouble.append(f"{host}:{port} knows no such master")
        finally:
            client.close()
    raise RedisConnectionError(_nobody(watch, trouble))


async def ask_sentinels_async(watch: Watch, route: Route) -> Address:
    """Return where the master is, as `ask_sentinels` does."""
    trouble: list[str] = []
    for sentinel in _in_turn(watch, route):
        host, port = sentinel
        client = redis.asyncio.Redis(
            host=host, port=port, retry=AsyncRetry(NoBackoff(), 0), **watch.options()
        )
        try:
            found = await client.execute_command(*_question(watch))  # type: ignore[no-untyped-call]  # redis-py
        except (RedisError, OSError) as error:
            trouble.append(f"{host}:{port}: {error}")
        else:
            if found:
                return _heard(found, sentinel, route)
            trouble.append(f"{host}:{port} knows no such master")
        finally:
            await client.aclose()
    raise RedisConnectionError(_nobody(watch, trouble))


def _in_turn(watch: Watch, route: Route) -> list[Address]:
    """Return the sentinels, the one that answered last before the others."""
    return sorted(watch.sentinels, key=lambda sentinel: sentinel != route.sentinel)


def _question(watch: Watch) -> tuple[str, str]:
    return ("SENTINEL GET-MASTER-ADDR-BY-NAME", watch.master)


def _heard(found: Any, sentinel: Address, route: Route) -> Address:
    route.sentinel = sentinel
    host, port = found
    return (host.decode() if isinstance(host, bytes) else str(host), int(port))


def _nobody(watch: Watch, trouble: list[str]) -> str:
    return f"no sentinel says where master {watch.master!r} is ({'; '.join(trouble)})"
