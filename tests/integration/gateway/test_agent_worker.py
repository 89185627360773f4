"""Agents in real worker processes: the end of a worker, of an engine, and moving weights."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.queue import calls
from rollstream.sample import Sample
from tests.integration.worker.moving import (
    MAX_TOKENS,
    POLICY,
    a_sim,
    audit,
    delivered,
    turns_of,
    update,
    versions_of,
)
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.integration.worker.processes import Sim, WorkerProcess, workers
from worker.engines.sim.policy import Policy

GROUPS, N, TURNS = 2, 4, 3
Options = Callable[..., dict[str, str]]
# A worker starts in two seconds; where the machine does much else, in many more.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = a_sim(tmp_path_factory.mktemp("sim"), vocabulary)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy.load(str(vocabulary), {}, POLICY)


@pytest.fixture
def options(sim: Sim, vocabulary: Path, run_name: str) -> Options:
    def given(url: str, **changes: str) -> dict[str, str]:
        known = {
            "redis.url": url,
            "run.name": run_name,
            "model.tokenizer": str(vocabulary),
            "engine.urls": sim.url,
            "engine.probe_interval_s": "0.1",
            "worker.generate": "agent",
            "worker.agent": "tests.integration.gateway.loop_agent:run",
            "worker.drain_s": "0",
            "gateway.port": "0",
            "aggregator.filters": "no_aborted",
            "reward.kind": "none",
            "sampling.max_new_tokens": str(MAX_TOKENS),
        }
        return known | {key.replace("__", "."): value for key, value in changes.items()}

    return given


@pytest.fixture
async def run(valkey_url: str, run_name: str, sim: Sim) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, lease_ms=4_000) as opened:
        shown = await asyncio.to_thread(get, f"{sim.url}/model_info")
        await opened.queue.call(calls.set_version(int(shown["weight_version"])))
        yield opened


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


async def enqueue(run: Run, notes: Path | None = None) -> dict[str, int]:
    metadata = {"turns": TURNS} | ({"notes": str(notes)} if notes else {})
    for g in range(GROUPS):
        prompt = [{"role": "user", "content": f"What is {g + 11}+{g + 7}?"}]
        await run.enqueue(g, N, prompt=prompt, metadata=metadata)
    return {str(g): N for g in range(GROUPS)}


async def busy(sim: Sim, requests: int = GROUPS * N) -> None:
    """Wait until so many calls are at the engine."""

    async def enough() -> bool:
        shown = await asyncio.to_thread(get, f"{sim.url}/sim")
        return bool(shown["in_flight"] >= requests)

    await wait_until(enough, what=f"{requests} calls at the engine")


async def finished(run: Run, groups: dict[str, int], tell: Callable[[], str]) -> list[Sample]:
    async def enough() -> bool:
        return (await run.queue.depths())["ready"] >= GROUPS

    await wait_until(enough, what="all groups", tell=tell)
    samples = await delivered(run, groups)
    assert await run.drops() == {}
    await run.audit()
    return samples


def check(samples: list[Sample], policy: Policy, qwen3: Any) -> None:
    """Assert that every client saw each reply once, as it was sampled, and nothing broke."""
    audit(policy, qwen3, samples)
    for sample in samples:
        assert (sample.reward, sample.metadata["status"]) == (1.0, 200)
        stats, turns = sample.metadata["agent"], turns_of(sample)
        assert len(turns) == len(sample.metadata["replies"]) == stats["committed"] == TURNS
        assert stats["calls"] == len(sample.calls)
        assert (stats["dropped_tokens"], stats["failed"]) == (0, 0)
        for turn, content in zip(turns, sample.metadata["replies"], strict=True):
            text = qwen3.decode(sample.tokens[turn[0].start : turn[-1].end])
            # The end of the turn is no text; reasoning and content are told apart.
            assert content.strip() in text


def counters(worker: WorkerProcess) -> Counter[str]:
    status, text = worker.get("/metrics")
    assert status == 200
    found: Counter[str] = Counter()
    for name, value in re.findall(
        r"^(rollout_(?:token|gateway)_\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE
    ):
        found[name] += int(float(value))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
async def test_sigterm_in_mid_run_ends_every_agent_and_leaves_no_call(
    run: Run,
    options: Options,
    sim: Sim,
    policy: Policy,
    qwen3: Any,
    tmp_path: Path,
    partial: bool,
) -> None:
    notes = tmp_path / "notes"
    groups = await enqueue(run, notes)
    given = options(run.url, weights__partial=str(partial).lower())
    with workers(tmp_path, 1, given) as (one,):
        (ready,) = [event for event in one.events() if event["event"] == "gateway_ready"]
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
        health = await asyncio.to_thread(get, f"{ready['url']}/healthz")
        assert re.fullmatch("[0-9a-f]{32}", health["instance_id"])
        await busy(sim)
        one.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(one.process.wait, 45)

        assert code == 0, one.log.read_text()
        bad = [e for e in one.events() if e.get("level") in ("error", "warning")]
        assert [e for e in bad if e["event"].startswith(("gateway", "agent", "attempt"))] == []
    # Its agents were told, each once, and the engine has nothing of them left.
    said = [line.split() for line in notes.read_text().splitlines()]
    began = [url for what, url in said if what == "began"]
    assert sorted(url for what, url in said if what == "aborted") == sorted(began)
    assert len(began) == GROUPS * N
    assert (await asyncio.to_thread(get, f"{sim.url}/sim"))["in_flight"] == 0
    # Agents cannot be parked: what they hold beside the tokens is their own.
    assert (await run.counter("given_back"), await run.counter("parked")) == (GROUPS * N, 0)
    assert await run.counter("attempts") == await run.counter("crashes") == 0

    with workers(tmp_path, 1, options(run.url)) as (two,):
        samples = await finished(run, groups, two.log.read_text)
        check(samples, policy, qwen3)
        assert counters(two)["rollout_token_mismatch_total"] == 0


@pytest.mark.slow
async def test_an_engine_that_goes_away_in_mid_run_is_nobody_s_reward(
    run: Run, options: Options, policy: Policy, qwen3: Any, tmp_path: Path, vocabulary: Path
) -> None:
    own = a_sim(tmp_path, vocabulary)
    own.start()
    given = options(
        run.url, engine__urls=own.url, engine__max_retries="1", engine__retry_backoff_s="0.05"
    )
    try:
        with workers(tmp_path, 1, given) as (one,):
            groups = await enqueue(run)
            await busy(own)
            own.kill()

            async def given_back() -> bool:
                return await run.counter("given_back") >= 1

            await wait_until(given_back, tell=one.log.read_text)
            own.start()
            samples = await finished(run, groups, one.log.read_text)
    finally:
        own.kill()
    # Every agent of then returned the reward 0; none of them is there.
    check(samples, policy, qwen3)


@pytest.mark.slow
@pytest.mark.parametrize("partial", [True, False])
async def test_new_weights_in_mid_run_are_no_business_of_an_agent_s(
    run: Run,
    options: Options,
    sim: Sim,
    policy: Policy,
    qwen3: Any,
    tmp_path: Path,
    partial: bool,
) -> None:
    groups = await enqueue(run)
    given = options(run.url, weights__partial=str(partial).lower())
    with workers(tmp_path, 1, given) as (one,):
        (ready,) = [e for e in one.events() if e["event"] == "worker_ready"]
        info = await run.queue.info()
        assert info is not None
        named: Any = [SimpleNamespace(name=ready["incarnation"])]
        await busy(sim)
        await update(run, sim, info.version + 1, "abort", named)
        samples = await finished(run, groups, one.log.read_text)
        check(samples, policy, qwen3)
        # Figures are published once a second. Those of requests that were told 503, where samples
        # began anew, are among them, so the requests may all be there before the last session ends.
        figures: dict[str, float] = {}

        def published() -> bool:
            figures.update(counters(one))
            asked = figures["rollout_gateway_requests_total"] >= GROUPS * N * TURNS
            return asked and figures["rollout_gateway_sessions"] == 0

        await wait_until(published)
        assert figures["rollout_token_mismatch_total"] == 0

    assert await run.counter("attempts") == await run.counter("parked") == 0
    num_calls = [len(sample.calls) for sample in samples]
    if partial:
        # One reply to the client, several calls of the engine; nothing began anew.
        assert max(num_calls) > TURNS
        assert max(map(len, versions_of(samples))) == 2
        assert await run.counter("given_back") == 0
    else:
        assert await run.counter("given_back") > 0
        assert set(num_calls) == {TURNS}
        assert all(len(versions) == 1 for versions in versions_of(samples))
