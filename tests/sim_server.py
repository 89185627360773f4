"""The simulated engine on the test's own loop, with a clock that the test turns.

Owns the server and a plain client of it. Nothing lands by itself unless `latency_s` is 0: a test
moves `now_s`, or aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from worker.engines.sim.faults import FaultConfig
from worker.engines.sim.http import port_of, serve
from worker.engines.sim.numbers import ReplayConfig
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import Dialect, SimEngine

GENERATE = {"sglang": "/generate", "vllm": "/inference/v1/generate"}


async def eventually(true: Callable[[], bool]) -> None:
    """Wait until something of this loop is so."""
    async with asyncio.timeout(45):
        while not true():
            await asyncio.sleep(0.002)


class SimServer:
    """A running engine, and a client."""

    def __init__(self, engine: SimEngine, client: httpx.AsyncClient, url: str) -> None:
        self.engine, self.client, self.url = engine, client, url
        self.now_s = 0.0
        engine.core.clock = lambda: self.now_s

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body or {}, headers=headers)

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def ask(
        self,
        kind: str,
        prompt: list[int],
        *,
        seed: int = 1,
        num: int = 4096,
        rid: str = "",
        **sampling: Any,
    ) -> httpx.Response:
        """Ask for tokens in either protocol."""
        if kind == "vllm":
            body: dict[str, Any] = {
                "token_ids": prompt,
                "sampling_params": {"max_tokens": num, "seed": seed, "logprobs": 1, **sampling},
                **({"request_id": rid} if rid else {}),
            }
        else:
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": num, "sampling_seed": seed, **sampling},
                "return_logprob": True,
                "return_routed_experts": True,
                **({"rid": rid} if rid else {}),
            }
        return await self.post(GENERATE[kind], body)

    async def flying(self, num: int) -> None:
        await eventually(lambda: len(self.engine.core.flights) == num)


@contextlib.asynccontextmanager
async def sim_server(
    policy: Policy,
    *,
    latency_s: float = 0.0,
    context_tokens: int = 32768,
    version: str = "default",
    layers: int = 0,
    keepalive_s: float = 0.0,
    faults: dict[str, float] | None = None,
    **dialect: Any,
) -> AsyncIterator[SimServer]:
    """Yield a server; `latency_s` is what every reply takes of the test's clock."""
    engine = SimEngine(
        policy,
        faults=FaultConfig(
            latency_median_s=latency_s, latency_sigma=0.0, token_s=0.0, others=faults or {}
        ),
        context_tokens=context_tokens,
        weight_version=version,
        replay=ReplayConfig(layers),
        dialect=Dialect(**dialect),
    )
    server = await serve(engine.handle, "127.0.0.1", 0, keepalive_s=keepalive_s)
    url = f"http://127.0.0.1:{port_of(server)}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
            yield SimServer(engine, client, url)
    finally:
        server.close()
