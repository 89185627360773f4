"""Pools for tests: quick bounds, and which engine a routing key is sent to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.scripted_engine import Step, a_reply
from worker.engines.fleet.entrance import NEVER, PoolCall
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.http import Exchange
from worker.sampling import Sampling
from worker.types import Completion, RequestIds

PROMPT = RequestIds([b"3838,374,220,16", b"10,22,30"], 7)
QUICK = RetryPolicy(
    max_retries=3,
    backoff_s=0.01,
    backoff_max_s=0.02,
    request_timeout_s=5.0,
    connect_timeout_s=2.0,
    abort_wait_s=1.0,
    probe_interval_s=0.02,
    discover_interval_s=0.02,
)
LOOKS = ("/model_info", "/ready")


@contextlib.asynccontextmanager
async def a_pool(*urls: str, **changes: Any) -> AsyncIterator[EnginePool]:
    """Yield a pool with `QUICK` bounds; names of `RetryPolicy` change those, others are its own."""
    bounds = {name: getattr(QUICK, name) for name in QUICK.__slots__}
    bounds |= {name: changes.pop(name) for name in list(changes) if name in bounds}
    pool = EnginePool(urls, max_token_id=151668, policy=RetryPolicy(**bounds), **changes)
    try:
        yield pool
    finally:
        await pool.aclose()


async def ask(
    pool: EnginePool,
    key: str = "g1",
    *,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    version: int = 3,
    **options: Any,
) -> Completion:
    """Make one call."""
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=5)
    return await pool.generate(PROMPT, sampling, routing_key=key, version=version, **options)


async def wait_until(true: Callable[[], bool]) -> None:
    """Wait for something to become true, on the loop that makes it so."""
    async with asyncio.timeout(15):
        while not true():
            await asyncio.sleep(0.005)


def one_token(mode: str, then: Step) -> Step:
    """Return a step that answers questions about log-probs as an engine of this mode.

    Requests for one token with `top_k` are such questions; others get `then`.
    """

    def answers(exchange: Exchange) -> None:
        sampling = json.loads(exchange.body)["sampling_params"]
        if sampling["max_new_tokens"] == 1 and "top_k" in sampling:
            log_prob = -1.0 if mode == "raw" else -1.0 / sampling["temperature"]
            exchange.answer(200, a_reply([7], log_probs=[log_prob]))
        elif callable(then):
            then(exchange)
        else:
            exchange.answer(*(then if isinstance(then, tuple) else (200, then)))

    return answers


def chosen(pool: EnginePool, key: str) -> str | None:
    """Return the URL of the engine that would get a call of this key now."""
    member = pool._entrance.choose(PoolCall(key, Sampling(), NEVER, 0))
    return None if member is None else member.client.url


def key_of(pool: EnginePool, url: str, prefix: str = "g") -> str:
    """Return a routing key whose engine is `url`."""
    for i in range(1000):
        if chosen(pool, f"{prefix}{i}") == url:
            return f"{prefix}{i}"
    raise AssertionError(f"no key lives at {url}")
