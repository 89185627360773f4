"""What the exporter asks of Redis: the run, whether its trainer is connected, the verifiers.

Owns its connections and how often each is asked. Never publishes. Invariant: one look at a run is
one round trip, and at most one more in `CLIENTS_EVERY_S`, whatever the run's size; verifiers are
asked in two, on a connection of their own.

A trainer says of itself that it is there and when it goes. One that was killed says nothing more,
but the server no longer has its connection; that is seen where this user may list them
(`CLIENT LIST`) and the trainer may name its own (`CLIENT SETNAME`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import NoPermissionError, ResponseError

from rollstream.queue.answers import Measured
from rollstream.queue.connection import Reach
from rollstream.queue.overview import Overview
from rollstream.queue.queue import Queue
from rollstream.settings import Settings

from ..isolation.messages import QUEUE

CLIENTS_EVERY_S = 5.0
"""A server with thousands of connections sends some hundred KB for a list of them."""
MAX_VERIFIERS = 1000
_PRESENT = ("waiting", "here")
log = structlog.get_logger("exporter")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run."""

    run: Overview
    trainer_connected: bool


@dataclass(frozen=True, slots=True)
class Verifiers:
    """What RQ knows of the queue of isolated jobs."""

    alive: int
    waiting: int


class Reader:
    """Reads one run; safe for one task at a time."""

    def __init__(self, queue: Queue, jobs: Any) -> None:
        """Use `connect`.

        Args:
            queue: the run.
            jobs: an asyncio client of the Redis that has RQ's jobs.
        """
        self._queue, self._jobs = queue, jobs
        self._names: bytes | None = b""
        """The server's list of connections, as read last; None where we may not ask."""
        self._asked_mono_s = float("-inf")
        self._asked_for = ""

    @classmethod
    def connect(cls, settings: Settings) -> Reader:
        """Return a reader of the configured run; connects at its first look.

        Raises:
            ConfigError: the URL of Redis cannot be read.
        """
        url, redis = settings.redis_url(), settings.redis
        ca = None if redis.ca is None else str(redis.ca)
        queue = Queue.connect(
            url, settings.run.name, ca=ca, connect_timeout_s=redis.connect_timeout_s
        )
        rq_url = settings.rq.url.get_secret_value() if settings.rq.url is not None else url
        jobs = Reach(rq_url, "", ca=ca, connect_timeout_s=redis.connect_timeout_s)
        return cls(queue, jobs.asyncio_client())

    async def aclose(self) -> None:
        """Close every connection."""
        await self._queue.aclose()
        await self._jobs.aclose()

    async def look(self) -> Look | None:
        """Look at the run; None where there is none.

        Raises:
            RunMismatch: another version wrote it.
            redis.exceptions.RedisError: the server cannot be reached, or refuses.
        """
        run = await self._queue.overview()
        if run is None:
            return None
        return Look(run, await self._is_connected(run.measured))

    async def _is_connected(self, said: Measured) -> bool:
        if said.trainer not in _PRESENT:
            return False
        if said.trainer == "waiting" or not said.connection:
            return True
        now = time.monotonic()
        if now - self._asked_mono_s >= CLIENTS_EVERY_S or said.connection != self._asked_for:
            self._asked_mono_s, self._asked_for = now, said.connection
            self._names = await self._list_clients()
        return self._names is None or b" name=%s " % said.connection.encode() in self._names

    async def _list_clients(self) -> bytes | None:
        (reply,) = await self._queue.ask([("CLIENT LIST",)])
        if isinstance(reply, NoPermissionError):
            if self._names is not None:
                log.info("clients_not_listed", error=str(reply))
            return None
        if isinstance(reply, Exception):
            raise reply
        return bytes(reply)

    async def verifiers(self) -> Verifiers:
        """Ask RQ; nothing where it may not be asked.

        Raises:
            redis.exceptions.RedisError: its server cannot be reached.
        """
        try:
            async with self._jobs.pipeline(transaction=False) as pipeline:
                pipeline.llen(f"rq:queue:{QUEUE}")
                pipeline.smembers(f"rq:workers:{QUEUE}")
                waiting, known = await pipeline.execute()
            names = sorted(known)[:MAX_VERIFIERS]
            # What a verifier that was killed left in the set has a key of its own that expires.
            alive = await self._jobs.exists(*names) if names else 0
        except ResponseError:  # no right to, or a cluster, which RQ cannot use
            return Verifiers(0, 0)
        return Verifiers(int(alive), int(waiting))
