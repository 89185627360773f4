"""Case 76: an engine is paused longer than a request may take, and gets new weights meanwhile.

Owns one worker process and one engine process per protocol; the trainer, which tells the run of
none of it, is played by hand. Held against the policy, which knows every token and which weights
sampled it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.queue import calls
from tests.contract.sim_process import KINDS, SimProcess
from tests.integration.worker.moving import POLICY, audit, delivered
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.integration.worker.processes import Sim, WorkerProcess, workers
from worker.engines.sim.policy import Policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
GROUPS, N, AT_ONCE = 8, 2, 8
REQUEST_TIMEOUT_S = 1.5
REPLY_S = 0.8
CONTROL = {
    "sglang": (("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})),
    "vllm": (("/pause?mode=keep", {}), ("/resume", {})),
}
GENERATE = {"sglang": "/generate", "vllm": "/inference/v1/generate"}
ABORTS = {"sglang": "/abort_request", "vllm": "/inference/v1/abort_requests"}


@pytest.fixture
def sim(tmp_path: Path, vocabulary: Path) -> Iterator[Sim]:
    """An engine of version 1, whose log-probs tell which weights sampled a token."""
    options = ["--token-s=0", "--versioned-log-probs", "--weight-version=1"]
    for name, value in POLICY.to_dict().items():
        options.append(f"--{name.replace('_', '-')}={value}")
    engine = Sim(tmp_path, vocabulary, latency_s=REPLY_S, options=options)
    engine.start()
    yield engine
    engine.kill()


def options_of(run: Run, sim: Sim, vocabulary: Path, kind: str) -> dict[str, str]:
    """Return what the worker is told."""
    return {
        "redis.url": run.url,
        "run.name": run.queue.run,
        "model.tokenizer": str(vocabulary),
        "model.renderer": "qwen3",
        "engine.kind": kind,
        "engine.urls": sim.url,
        "engine.request_timeout_s": str(REQUEST_TIMEOUT_S),
        "engine.probe_interval_s": "0.1",
        "engine.max_in_flight": str(AT_ONCE),
        "run.seed": "7",
        "sampling.max_new_tokens": "256",
        "worker.concurrency": str(2 * AT_ONCE),
        "reward.kind": "none",
        "aggregator.filters": "no_aborted",
    }


def figure(worker: WorkerProcess, name: str) -> float:
    """Return one figure of the worker's metrics page; 0 where it has none yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", worker.get("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("kind", KINDS)
async def test_case_76_a_pause_longer_than_a_request_may_take_costs_nothing_but_its_time(
    valkey_url: str,
    run_name: str,
    sim: Sim,
    vocabulary: Path,
    tmp_path: Path,
    qwen3: Any,
    kind: str,
) -> None:
    engine = SimProcess(sim.url)
    pause, go_on = CONTROL[kind]
    async with a_run(valkey_url, run_name) as run:
        await run.queue.call(calls.set_version(1))
        with workers(tmp_path, 1, options_of(run, sim, vocabulary, kind)) as (worker,):
            asked = engine.get()["paths"][GENERATE[kind]]  # at its start, what its log-probs are
            for group_index in range(GROUPS):
                await run.enqueue(
                    group_index, N, prompt=[{"role": "user", "content": "12 and 30?"}]
                )
            await wait_until(lambda: engine.get()["in_flight"] == AT_ONCE, what="calls in flight")
            # Half way: what they have by then is of the weights before the pause.
            await asyncio.sleep(REPLY_S / 2)
            await asyncio.to_thread(engine.ask, *pause)
            paused = 'rollout_engines{state="paused"}'
            await wait_until(lambda: figure(worker, paused) == 1, what="a pause that is seen")
            before = engine.get()["paths"][GENERATE[kind]]
            # Twice as long as any request may take: the pause is not the request's time.
            await asyncio.sleep(2 * REQUEST_TIMEOUT_S)
            assert worker.get("/readyz")[0] == 200, "paused is not dead"
            assert figure(worker, 'rollout_engine_up{engine="0"}') == 1
            held = engine.get()
            assert held["in_flight"] == AT_ONCE, "nobody gave up what it had begun"
            assert held["paths"][GENERATE[kind]] == before, "what waits is held back"
            body = {"new_version": "2", "abort_all_requests": False}
            await asyncio.to_thread(engine.ask, "/update_weight_version", body)
            await asyncio.to_thread(engine.ask, *go_on)
            await run.queue.call(calls.set_version(2))
            await run.ready(GROUPS)
            stopped = 'rollout_engine_requests_total{engine="0",outcome="stop"}'
            await wait_until(lambda: figure(worker, stopped) == GROUPS * N, what="all counted")
            outcomes = worker.get("/metrics")[1]
            said, counters = engine.get(), await run.queue.counters()
        samples = await delivered(run, {str(g): N for g in range(GROUPS)})
        await run.audit()
    num_calls = sum(len(sample.calls) for sample in samples)
    assert said["paths"][GENERATE[kind]] - asked == num_calls == GROUPS * N, (
        "no retry, no duplicate"
    )
    assert said["paths"].get(ABORTS[kind], 0) == said["counts"].get("aborted", 0) == 0
    assert not [name for name in counters if name.startswith(("attempts", "member_failed"))]
    assert "given_back" not in counters
    found = re.findall(r'rollout_engine_requests_total\{.*outcome="(\w+)"\} ([1-9]\S*)', outcomes)
    assert found == [("stop", f"{num_calls}.0")], json.dumps(found)
    # Before and behind it: a call that was in flight is of both (of one alone, where it had nothing
    # yet, or all that it was to have), and what had waited is of the new one.
    versions = [{v for call in s.calls for v, a, b in call.versions if a < b} for s in samples]
    assert {1, 2} in versions
    assert versions.count({2}) >= GROUPS * N - AT_ONCE
    assert all(one and one <= {1, 2} for one in versions)
    audit(Policy.load(str(vocabulary), {}, POLICY), qwen3, samples)
