"""Redis is sometimes away: the one rule by which the loops of an app outlive that.

Owns which errors mean "away", the wait between two tries and what is said about it. Never gives
up by itself: what must be done waits here or in Redis. Invariant: an outage is said once when it
begins and once when it ends, however many loops notice it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis import exceptions as redis_errors

T = TypeVar("T")

OUTAGE = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.OutOfMemoryError,
    redis_errors.MasterDownError,
    redis_errors.ClusterDownError,
    OSError,
)
"""Errors that pass by themselves: a restart, a failover, full memory. `ConnectionError` of redis
includes a server that loads its data; `OSError` includes `TimeoutError`."""
_NO_GROUP = "NOGROUP"
"""How a read of a stream begins to fail when Redis was emptied; the producer opens it anew."""

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0


class Link:
    """What this process knows about whether Redis answers."""

    def __init__(self, logger: str = "rollstream") -> None:
        self.down_since_mono_s: float | None = None
        self.outages = 0
        """How many began; whoever keeps what Redis said compares it with what it was then."""
        self._wait_s = FIRST_WAIT_S
        self._log = logging.getLogger(logger)

    @property
    def up(self) -> bool:
        """Whether the last try was answered."""
        return self.down_since_mono_s is None

    def failed(self, error: BaseException) -> float:
        """Note a failed try; return how long to wait before the next."""
        if self.down_since_mono_s is None:
            self.down_since_mono_s = time.monotonic()
            self.outages += 1
            self._log.warning("redis_away", extra={"error": f"{type(error).__name__}: {error}"})
        wait = self._wait_s * random.uniform(0.5, 1.0)
        self._wait_s = min(self._wait_s * 2, LONGEST_WAIT_S)
        return wait

    def worked(self) -> None:
        """Note an answer."""
        if self.down_since_mono_s is not None:
            away_s = round(time.monotonic() - self.down_since_mono_s, 3)
            self._log.info("redis_back", extra={"away_s": away_s})
            self.down_since_mono_s = None
            self._wait_s = FIRST_WAIT_S

    async def answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until Redis answers; every call may be repeated (the scripts say what then)."""
        while True:
            try:
                answer = await ask()
            except OUTAGE as error:
                await asyncio.sleep(self.failed(error))
            except redis_errors.ResponseError as error:
                if not str(error).startswith(_NO_GROUP):
                    raise
                await asyncio.sleep(LONGEST_WAIT_S)
            else:
                self.worked()
                return answer
