"""Threads that user functions hold for ever, noticed before there is none left.

Owns what is said of them, and when a process has had enough. Never stops a thread: nobody can.
Invariant: a process that user functions used up says so once and ends in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ..bounded import AGENT_THREADS, ENV_THREADS, THREADS
from ..telemetry.metrics import Metrics

LOOK_INTERVAL_S = 1.0
_POOLS = (THREADS, AGENT_THREADS, ENV_THREADS)
log = structlog.get_logger("worker")


async def watch_threads(give_up: Callable[[str], None]) -> None:
    """Look again and again; `give_up` is told why this process cannot go on."""
    said = 0
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        hung = _num_hung()
        if hung >= 2 * said + 1:
            said = hung
            functions = [name for pool in _POOLS for name in pool.hung_functions()]
            log.warning(
                "user_functions_hang",
                threads=hung,
                limit=THREADS.limit,
                functions=functions[:8],
                message="they did not return in time, and a thread cannot be stopped",
            )
        said = min(said, hung)
        if any(pool.num_hung >= pool.most_hung for pool in _POOLS):
            give_up(f"all {hung} threads are held by functions that do not return")


def publish_threads(metrics: Metrics) -> None:
    """Set the figures of threads."""
    metrics.user_threads.set(sum(pool.num_running for pool in _POOLS))
    metrics.user_threads_hung.set(_num_hung())


def _num_hung() -> int:
    return sum(pool.num_hung for pool in _POOLS)
