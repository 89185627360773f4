"""How both executors reach the server: URL, timeouts, retries, TLS, and what to send for a call.

Owns the settings of every connection to a run's Redis, the verifier's too. Never sends anything.
Invariant: redis-py repeats a command whose connection broke, so only scripts and reads that may be
repeated are sent. A reply that does not come in time is not asked for again here: whoever waits
knows for how long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError
from redis.retry import Retry

from rollstream.errors import ConfigError
from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import Command
from rollstream.queue.route import Address, Route
from rollstream.queue.routed import SENTINEL_TIMEOUT_S, AsyncRouted, BlockingRouted
from rollstream.queue.scripts import Script
from rollstream.queue.sending import PlainSends
from rollstream.urls import SentinelUrl, read_sentinel_url

RETRIES = 2
"""Repeats of one command or one connect; longer outages are the caller's to wait for."""
BACKOFF = ExponentialWithJitterBackoff(base=0.02, cap=0.5)
SOCKET_TIMEOUT_S = 10.0
"""A reply that takes longer is an error; above `MAX_BLOCK_S`, so no blocking read trips it."""
MAX_BLOCK_S = 5.0
MAX_WAKE_S = 0.5
"""Bound of one wait for a wake-up token: what a lost token costs."""
_PASSING = re.compile(r"(?:^|: -)(?:BUSY|MISCONF|NOREPLICAS|TRYAGAIN) ")
"""Refusals that are about the server and not about the command: somebody's slow script, a full
disk, a replica that is away, a slot on the move. redis-py has no class of its own for them, and
Redis 6.2 wraps what a script met (`Error running script …: -NOREPLICAS …`)."""
_FORBIDDEN = re.compile(r"ACL failure in script|executing the script can't (run|access)")
"""How a server says, inside a script, that the user may not do what a command does."""
_READ_BYTES = 1 << 16
"""Bodies are large; fewer, larger reads of the socket."""


@dataclass(frozen=True, slots=True)
class Sentinels:
    """The sentinels of a URL, and how one of them is connected to."""

    url: SentinelUrl
    tls: dict[str, Any] = field(default_factory=dict)

    @property
    def sentinels(self) -> tuple[Address, ...]:
        """All of them."""
        return self.url.sentinels

    @property
    def master(self) -> str:
        """The name they know the master by."""
        return self.url.master

    def options(self) -> dict[str, Any]:
        """Return the options of a client for one connection to one of them."""
        return {
            "username": self.url.username,
            "password": self.url.password,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "protocol": 2,
            **self.tls,
        }


class Reach:
    """One way to one run's server: every client that it makes shares the `Route`.

    Args:
        url: as `rollstream.urls` describes.
        probe: a key that the connections are for; empty asks for none (a list of runs).
        ca: file of the CA that signed the server's certificate, with TLS.
        connect_timeout_s: bound of connecting, all tries together.
        name: what the server calls synchronous connections (CLIENT LIST); empty is nothing.
    """

    def __init__(
        self,
        url: str,
        probe: str,
        *,
        ca: str | None = None,
        connect_timeout_s: float = 5.0,
        name: str = "",
    ) -> None:
        read = read_sentinel_url(url)
        self.url = url if read is None else read.server_url
        self._probe, self._connect_timeout_s, self._name = probe, connect_timeout_s, name
        self._options = connection_options(self.url, ca, connect_timeout_s)
        pool = redis.ConnectionPool.from_url(self.url, **self._options)
        given = pool.connection_kwargs
        self._watch: Sentinels | None = None
        seeds: list[Address] = []
        if read is not None:
            tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
            if self.url.startswith("rediss://"):
                tls["ssl"] = True
            self._watch = Sentinels(read, tls)
        elif "path" not in given:
            seeds = [(given.get("host", "localhost"), int(given.get("port", 6379)))]
        self.route = Route(seeds, settled=not probe)

    def blocking_client(self, **options: Any) -> redis.Redis:
        """Return a synchronous client; connects at its first call."""
        retry = Retry(BACKOFF, RETRIES, (RedisConnectionError,))
        client = redis.Redis.from_url(self.url, retry=retry, **(self._options | options))
        self._install(client.connection_pool, BlockingRouted)
        return client

    def asyncio_client(self, **options: Any) -> redis.asyncio.Redis:
        """Return an asyncio client; connects at its first call."""
        retry = AsyncRetry(BACKOFF, RETRIES, (RedisConnectionError,))
        client = redis.asyncio.Redis.from_url(self.url, retry=retry, **(self._options | options))
        self._install(client.connection_pool, PlainSends, AsyncRouted)
        return client

    def _install(self, pool: Any, *mixins: type) -> None:
        kind = pool.connection_class
        members = {
            "route": self.route,
            "watch": self._watch,
            "probe": self._probe,
            "handshake_s": self._connect_timeout_s,
            "name": self._name,
        }
        pool.connection_class = type(f"Rollstream{kind.__name__}", (*mixins, kind), members)


def each_master(client: redis.Redis) -> Iterator[redis.Redis]:
    """Yield a client of every master that holds keys: of a cluster all, else `client` itself.

    Commands without a key (SCAN, INFO) are about one server only.
    """
    try:
        slots: Any = client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]  # redis-py
    except ResponseError:  # no cluster, or we may not ask
        yield client
        return
    pool = client.connection_pool
    kind = next(c for c in pool.connection_class.__mro__ if c.__module__ == "redis.connection")
    for host, port in sorted({(row[2][0].decode(), int(row[2][1])) for row in slots}):
        own = pool.connection_kwargs | ({"host": host} if host else {}) | {"port": port}
        with redis.Redis.from_pool(redis.ConnectionPool(connection_class=kind, **own)) as one:
            yield one


def refuse_cluster(client: redis.Redis, key: str) -> None:
    """Refuse a cluster as the place of RQ's jobs: their keys lie in several slots.

    Raises:
        ConfigError: it is one.
    """
    try:
        about: Any = client.info("cluster")
    except ResponseError:  # we may not ask
        return
    if about.get("cluster_enabled"):
        raise ConfigError(
            f"{key} is a cluster, which RQ cannot use for the jobs of isolated rewards: set rq.url "
            "to a server that is none (a small one of its own is enough)"
        )


def connection_options(url: str, ca: str | None, connect_timeout_s: float) -> dict[str, Any]:
    """Return the options that both clients of redis-py share."""
    options: dict[str, Any] = {
        # RESP 2: with RESP 3 redis-py does not look for a leftover reply on a pooled connection.
        "protocol": 2,
        "socket_connect_timeout": connect_timeout_s / (RETRIES + 1),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_read_size": _READ_BYTES,
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
    if ca is not None and url.startswith("rediss://"):
        options["ssl_ca_certs"] = ca
    return options


def evalsha(script: Script, prefix: str, call: ScriptCall[Any]) -> Command:
    """Return the command of one call."""
    return ("EVALSHA", script.sha, 1, prefix, *call.args)


def unknown_scripts(replies: Sequence[Any]) -> list[int]:
    """Return which replies say that the server does not know the script (it restarted)."""
    return [j for j, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def raise_first(replies: Iterable[Any]) -> None:
    """Raise the first error of a round trip, once all replies were read.

    A server that refuses for a reason of its own is away like one that cannot be reached: it is
    waited for, and what was refused is asked for again.
    """
    for reply in replies:
        if isinstance(reply, NoScriptError):  # it was loaded a moment ago
            raise RedisConnectionError("the server forgot a script between two calls") from reply
        if isinstance(reply, ResponseError) and _PASSING.search(str(reply)):
            raise RedisConnectionError(str(reply)) from reply
        if isinstance(reply, ResponseError) and _FORBIDDEN.search(str(reply)):
            raise NoPermissionError(str(reply)) from reply
        if isinstance(reply, Exception):
            raise reply


def block_ms(block_s: float) -> int:
    """Return a bounded wait in whole milliseconds; 0 is no wait."""
    return int(max(0.0, min(block_s, MAX_BLOCK_S)) * 1000)


def wake_s(timeout_s: float) -> float:
    """Return a bounded wait for a wake-up token (0 would be for ever)."""
    return round(max(0.01, min(timeout_s, MAX_WAKE_S)), 3)
