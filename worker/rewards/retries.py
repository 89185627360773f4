"""Asking again for a verdict that could not be had.

Owns the budget and the waits between. Never generates anything, and never asks again what would
end the same. Invariant: the fault that leaves here is not tried again by anybody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from rollstream.errors import RewardFault

from .details import Later

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
MAX_WAIT_S = 60.0
"""Before one more try, whatever the back-off or a server says."""
log = structlog.get_logger("worker")


async def asked_again(
    ask: Callable[[int], Awaitable[T]],
    *,
    max_retries: int,
    backoff_s: float,
    sleep: Sleep = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> T:
    """Return what `ask` returns, of the first try that has something to return.

    The caller's own deadline (the sample's) bounds all of it by cancelling.

    Args:
        ask: called with the number of the try, from 0.
        max_retries: tries beyond the first.
        backoff_s: wait before the second; doubles.
        sleep: waits.
        jitter: a number in [0, 1): a wait is half to one and a half times what it would be.

    Raises:
        RewardFault: not retryable; the last one's detail.
    """
    attempt = 0
    while True:
        try:
            return await ask(attempt)
        except RewardFault as fault:
            if not fault.retryable or attempt >= max_retries:
                raise _for_good(fault, attempt + 1) from fault
            wait_s = backoff_s * 2.0 ** min(attempt, 16) * (0.5 + jitter())
            if isinstance(fault, Later):
                wait_s = max(wait_s, fault.after_s)
            log.debug("reward_asked_again", detail=fault.detail, attempt=attempt + 1,
                     error=fault.message[:500])  # fmt: skip
        await sleep(min(wait_s, MAX_WAIT_S))
        attempt += 1


def _for_good(fault: RewardFault, num_tries: int) -> RewardFault:
    times = f" (asked {num_tries} times)" if num_tries > 1 else ""
    return RewardFault(f"{fault.message}{times}", retryable=False, detail=fault.detail)
