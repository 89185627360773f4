"""Episodes under moving weights: begun anew, waited for, or taken up, and never half a step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.queue import calls
from rollstream.sample import Sample
from tests.integration.worker.moving import (
    POLICY,
    Moving,
    a_sim,
    audit,
    delivered,
    post,
    some_running,
    turns_of,
    update,
    versions_of,
)
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.integration.worker.processes import Sim
from worker.engines.sim.policy import Policy
from worker.environments import Environments, EnvSample, StepResult
from worker.environments.load import LoadedEnvironment
from worker.generate.environment import EpisodeRules, episodes

pytestmark = pytest.mark.slow
N, GROUPS, STEPS = 4, 4, 3
SAMPLES = N * GROUPS
Stage = tuple[Run, Environments, list["Counting"]]


class Counting:
    """Asks a number of questions; counts what happens to it."""

    def __init__(self, sample: EnvSample, made: list[Counting]) -> None:
        self.sample, self.steps, self.closes = sample, 0, 0
        made.append(self)

    async def reset(self, sample: EnvSample) -> None:
        if sample.state is not None:
            self.steps = sample.state

    async def step(self, message: dict[str, Any]) -> StepResult:
        self.steps += 1
        seven = self.steps * 7
        return StepResult(f"And {seven}+{seven}?", 0.25, self.steps == STEPS, {"step": self.steps})

    async def state(self) -> int:
        return self.steps

    async def close(self) -> None:
        self.closes += 1


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = a_sim(tmp_path_factory.mktemp("sim"), vocabulary, token_s=0.01)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy.load(str(vocabulary), {}, POLICY)


@pytest.fixture
async def stage(valkey_url: str, run_name: str) -> AsyncIterator[Stage]:
    environments = Environments(most=SAMPLES, timeout_s=30)
    made: list[Counting] = []
    async with a_run(valkey_url, run_name, lease_ms=4_000, max_attempts=1) as run:
        yield run, environments, made
    await environments.aclose()
    assert environments.num_open == 0


async def weights(run: Run, sim: Sim, version: int) -> None:
    """Begin at a version: the engine keeps its own from test to test."""
    body = {"new_version": str(version), "abort_all_requests": False}
    await post(sim.url, "/update_weight_version", body)
    await run.queue.call(calls.set_version(version))


async def played(
    stage: Stage,
    sim: Sim,
    qwen3: Any,
    policy: Policy,
    *,
    version: int,
    partial: bool,
    resumable: bool = False,
) -> list[Sample]:
    """Run all groups through two updates that stop calls; return what was delivered, audited."""
    run, environments, made = stage
    environment = LoadedEnvironment("test", lambda sample: Counting(sample, made), resumable)
    generate = episodes(environments, environment, EpisodeRules(7))
    await weights(run, sim, version)
    for g in range(GROUPS):
        asked = [{"role": "user", "content": f"What is {g + 11}+{g + 7}?"}]
        await run.enqueue(g, N, prompt=asked)
    worker = Moving(run, qwen3, url=sim.url, generate=generate, partial=partial)
    await worker.start()
    try:
        for number in (1, 2):
            await some_running([worker])
            await update(run, sim, version + number, "abort", [worker])
        await run.ready(GROUPS)
    finally:
        await worker.stop()
    samples = await delivered(run, {str(g): N for g in range(GROUPS)})
    audit(policy, qwen3, samples)
    assert worker.fidelity.counters.mismatches == dict.fromkeys(
        worker.fidelity.counters.mismatches, 0
    )
    assert worker.fidelity.counters.checked > 0
    assert await run.drops() == {}
    assert await run.counter("attempts") == 0
    await run.audit()
    await environments.aclose()
    assert [env.closes for env in made] == [1] * len(made)
    for sample in samples:
        notes = sample.metadata["env"]
        assert [info["step"] for info in notes["infos"]] == [1, 2, 3]
        assert (notes["turns"], notes["num_steps"], notes["done"]) == ([0, 1, 2], STEPS, True)
        assert sample.reward == STEPS * 0.25
        assert [turn[-1].end for turn in turns_of(sample)] == notes["ends"]
    return samples


async def test_episodes_that_an_update_stops_begin_anew_uncharged(
    stage: Stage, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    run, _, made = stage
    samples = await played(stage, sim, qwen3, policy, version=10, partial=False)
    assert all(len(versions) == 1 for versions in versions_of(samples))
    back = await run.counter("given_back")
    assert back > 0
    assert len(made) == SAMPLES + back


async def test_episodes_wait_for_an_update_and_go_on_where_they_are(
    stage: Stage, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    run, _, made = stage
    samples = await played(stage, sim, qwen3, policy, version=20, partial=True)
    assert len(made) == SAMPLES  # each sample had one environment from its beginning to its end
    assert await run.counter("given_back") == 0
    assert any(len(versions) > 1 for versions in versions_of(samples))


async def test_episodes_that_say_so_are_parked_and_taken_up(
    stage: Stage, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    run, _, made = stage
    samples = await played(stage, sim, qwen3, policy, version=30, partial=True, resumable=True)
    assert await run.counter("parked") > 0
    assert len(made) > SAMPLES
    taken_up = [env for env in made if env.sample.state is not None]
    assert taken_up
    assert any(len(versions) > 1 for versions in versions_of(samples))


async def test_an_episode_whose_worker_crashes_begins_anew_elsewhere(
    stage: Stage, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    run, environments, made = stage
    del policy
    environment = LoadedEnvironment("test", lambda sample: Counting(sample, made))
    generate = episodes(environments, environment, EpisodeRules(7))
    await weights(run, sim, 40)
    await run.enqueue(0, N, prompt=[{"role": "user", "content": "What is 1+2?"}])
    first = await Moving(run, qwen3, url=sim.url, generate=generate).start()
    await wait_until(lambda: sum(env.steps for env in made) >= N, what="steps")
    await first.stop()
    second = await Moving(run, qwen3, url=sim.url, generate=generate).start()
    await run.ready(1)
    await second.stop()
    samples = await delivered(run, {"0": N})
    assert all(sample.metadata["env"]["num_steps"] == STEPS for sample in samples)
    await environments.aclose()
    assert [env.closes for env in made] == [1] * len(made)
