"""The pool on simulated engines, in both protocols: what log-probs are, and pauses of all modes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstream.errors import ConfigError
from tests.engine_pool import a_pool, wait_until
from tests.vocabulary_once import tokenizer_of
from worker.engines.fleet.pool import EnginePool
from worker.engines.sim.faults import FaultConfig
from worker.engines.sim.http import port_of, serve
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import Dialect, LogProbsMode, SimEngine
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

PAUSES = {"sglang": "/pause_generation", "vllm": "/pause"}
RESUMES = {"sglang": "/continue_generation", "vllm": "/resume"}
CALLS = {"sglang": "/generate", "vllm": "/inference/v1/generate"}
PROMPT = RequestIds([b"3838,374,220,16,10,22,30"], 7)


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


class Sim:
    """A simulated engine and a pool on it."""

    def __init__(self, engine: SimEngine, url: str, kind: str, pool: EnginePool) -> None:
        self.engine, self.url, self.kind, self.pool = engine, url, kind, pool

    async def ask(self, seed: int, version: int = 0, **changes: Any) -> Completion:
        sampling = Sampling(**({"max_new_tokens": 64, "seed": seed} | changes))
        return await self.pool.generate(PROMPT, sampling, routing_key=f"g{seed}", version=version)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        async with httpx.AsyncClient() as client:
            answer = await client.post(self.url + path, json=body or {})
        assert answer.status_code == 200, answer.text

    async def pause(self, mode: str) -> None:
        path = PAUSES[self.kind] + (f"?mode={mode}" if self.kind == "vllm" else "")
        await self.post(path, {"mode": mode})

    async def resume(self, version: str) -> None:
        await self.post(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )
        await self.post(RESUMES[self.kind])

    @property
    def num_calls(self) -> int:
        refused = self.engine.counts["refused"]  # a look of vLLM's asks whether the path is there
        return self.engine.paths[CALLS[self.kind]] - refused

    def state(self) -> str:
        return self.pool.states()[0].state.value


@contextlib.asynccontextmanager
async def a_sim(
    policy: Policy,
    kind: str,
    mode: LogProbsMode = LogProbsMode.AUTO,
    *,
    latency_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[Sim]:
    faults = FaultConfig(latency_median_s=latency_s, latency_sigma=0.0, token_s=0.0)
    engine = SimEngine(
        policy, faults=faults, weight_version="3", dialect=Dialect(logprobs_mode=mode)
    )
    server = await serve(engine.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port_of(server)}"
    options = {"probe_interval_s": 0.1} | options
    try:
        async with a_pool(url, kind=kind, **options) as pool:
            yield Sim(engine, url, kind, pool)
    finally:
        server.close()


# --- what log-probs are --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "mode", "found"),
    [
        ("sglang", LogProbsMode.AUTO, "temperature"),
        ("sglang", LogProbsMode.RAW, "raw"),
        ("vllm", LogProbsMode.AUTO, "raw"),
        ("vllm", LogProbsMode.PROCESSED, "processed"),
    ],
)
async def test_mode_is_found_and_recorded_in_both_protocols(
    policy: Policy, kind: str, mode: LogProbsMode, found: str
) -> None:
    async with a_sim(policy, kind, mode, check_logprobs=True) as sim:
        assert await sim.pool.probe()
        assert (await sim.ask(1)).logprob_mode == found


async def test_vllm_as_it_starts_by_default_is_refused_where_temperatures_are_not_one(
    policy: Policy,
) -> None:
    async with a_sim(policy, "vllm", check_logprobs=True, scaled=True) as sim:
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            await sim.pool.probe()
        assert sim.state() == "refused"


# --- case 76, in both protocols ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "mode"), [("sglang", "in_place"), ("sglang", "retract"), ("vllm", "keep")]
)
async def test_case_76_calls_in_flight_and_waiting_outlive_a_pause(
    policy: Policy, kind: str, mode: str
) -> None:
    async with a_sim(policy, kind, latency_s=0.3, request_timeout_s=0.8) as sim:
        assert await sim.pool.probe()
        sim.pool.set_version(3, {})
        flying = [asyncio.create_task(sim.ask(i, 3)) for i in range(8)]
        await wait_until(lambda: sim.num_calls == 8)
        await sim.pause(mode)
        await wait_until(lambda: sim.state() == "paused")
        waiting = [asyncio.create_task(sim.ask(i, 3)) for i in range(8, 16)]
        await asyncio.sleep(1.0)
        assert (sim.num_calls, sim.pool.healthy(), sim.pool.alive()) == (8, False, True)
        await sim.resume("4")
        sim.pool.set_version(4, {})
        got = await asyncio.gather(*flying, *waiting)
    assert {c.finish for c in got} <= {Finish.STOP, Finish.LENGTH}
    assert sim.num_calls == 16
    assert sim.pool.counters.retries == 0
    assert {version for c in got[8:] for version, _, _ in c.versions} == {4}
    assert {version for c in got[:8] for version, _, _ in c.versions} <= {3, 4}
    assert {c.dispatched_version for c in got[8:]} == {4}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_pause_that_aborts_brings_calls_back_and_new_ones_wait_for_its_end(
    policy: Policy, kind: str
) -> None:
    async with a_sim(policy, kind, latency_s=1.5, max_retries=0) as sim:
        flying = [asyncio.create_task(sim.ask(i)) for i in range(4)]
        await wait_until(lambda: len(sim.engine.core.flights) == 4)
        await sim.pause("abort")
        assert {c.finish for c in await asyncio.gather(*flying)} == {Finish.ABORT}
        waiting = [asyncio.create_task(sim.ask(i, max_new_tokens=1)) for i in range(4)]
        await wait_until(lambda: sim.state() == "paused")
        sim.engine.core.faults = FaultConfig(latency_median_s=0.0, token_s=0.0)
        await sim.resume("4")
        assert all(len(c.ids) == 1 for c in await asyncio.gather(*waiting))
        counters = sim.pool.counters
    assert (counters.retries, counters.ejections) == (0, 0)
    assert counters.engines[0].requests["unavailable"] == 0


# --- abort of all, in both protocols -------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_abort_of_all_stops_calls_at_the_engine_and_keeps_their_tokens(
    policy: Policy, kind: str
) -> None:
    async with a_sim(policy, kind, latency_s=5.0) as sim:
        tasks = [asyncio.create_task(sim.ask(i)) for i in range(40)]
        await wait_until(lambda: len(sim.engine.core.flights) == 40)
        await asyncio.sleep(0.3)
        assert sim.pool.abort_all() == 40
        got = await asyncio.gather(*tasks)
    assert {c.finish for c in got} == {Finish.ABORT}
    assert not sim.engine.core.flights
    for seed, completion in enumerate(got):
        asked = Sampling(max_new_tokens=64, seed=seed).to_dict()
        prompt = [3838, 374, 220, 16, 10, 22, 30]
        assert policy.mismatch(prompt, asked, completion.ids, completion.log_probs) is None
