"""Environments in whole worker processes: killed, stopped, broken, and on a real OpenEnv server."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.moving import delivered
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.integration.worker.processes import Sim, workers

from .test_openenv import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
N, STEPS = 2, 2
USER = [{"role": "user", "content": "What is 1+7?"}]
SOURCE = """
import asyncio
from pathlib import Path

FOLDER = Path({folder!r})

def note(event, sample):
    with (FOLDER / "events").open("a") as out:
        out.write(f"{{event}} {{sample.member}}\\n")

class Game:
    def __init__(self, sample):
        self.sample, self.steps = sample, 0
        note("made", sample)

    async def reset(self, sample):
        return None

    async def step(self, message):
        self.steps += 1
        note("step", self.sample)
        if (FOLDER / "break").exists() and self.sample.member == 1:
            raise RuntimeError("the game is broken")
        while not (FOLDER / "go").exists():
            await asyncio.sleep(0.02)
        return f"And {{self.steps}}+2?", 0.5, self.steps == {steps}, {{"steps": self.steps}}

    async def close(self):
        note("close", self.sample)
"""


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary, latency_s=0.05)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, lease_ms=1_000) as opened:
        yield opened


@pytest.fixture
def options(sim: Sim, vocabulary: Path, run: Run, run_name: str, tmp_path: Path) -> dict[str, str]:
    game = tmp_path / "game.py"
    game.write_text(SOURCE.format(folder=str(tmp_path), steps=STEPS))
    return {
        "redis.url": run.url,
        "run.name": run_name,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "engine.probe_interval_s": "0.1",
        "worker.generate": "env",
        "worker.environment": f"{game}:Game",
        "worker.drain_s": "0",
        "worker.retry_delay_s": "0.01",
        "reward.kind": "none",
        "aggregator.filters": "",
        "aggregator.min_samples": "1",
    }


def events(folder: Path) -> Counter[str]:
    path = folder / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter(line.split()[0] for line in lines)


def seen(folder: Path, event: str, count: int) -> Callable[[], bool]:
    return lambda: events(folder)[event] >= count


async def rewards(run: Run) -> list[Any]:
    samples = await delivered(run, {"0": N})
    for sample in samples:
        assert sample.metadata["env"]["rewards"] == [0.5] * STEPS
        assert sample.generate_function_path is not None
    return [sample.reward for sample in samples]


async def test_an_episode_whose_worker_is_killed_begins_anew_in_another(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    await run.enqueue(0, N, prompt=USER)
    with workers(tmp_path, 1, options) as (first,):
        await wait_until(seen(tmp_path, "step", N), what="steps")
        first.process.kill()
        first.process.wait()
    (tmp_path / "go").touch()
    with workers(tmp_path, 1, options):
        await run.ready(1)
    assert await rewards(run) == [1.0] * N
    assert await run.counter("crashes") == N
    assert events(tmp_path) == {"made": 2 * N, "step": N + N * STEPS, "close": N}
    await run.audit()


async def test_a_worker_that_is_stopped_closes_its_environments_and_charges_nobody(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    await run.enqueue(0, N, prompt=USER)
    with workers(tmp_path, 1, options) as (one,):
        await wait_until(seen(tmp_path, "step", N), what="steps")
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(one.process.wait, 45) == 0, one.log.read_text()
    assert events(tmp_path) == {"made": N, "step": N, "close": N}
    assert await run.counter("given_back") == N
    assert await run.counter("attempts") == 0
    await run.audit()


async def test_a_member_whose_environment_breaks_is_env_error_behind_its_tries_and_no_reward(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    for name in ("break", "go"):
        (tmp_path / name).touch()
    await run.enqueue(0, N, prompt=USER)
    with workers(tmp_path, 1, options):
        await run.ready(1)
    stored = await run.group(0, N)
    assert "RuntimeError: the game is broken" in str(stored.errors[1])
    assert stored.bodies[1] is None
    tries = 3  # of budgets()
    assert events(tmp_path) == {"made": 1 + tries, "step": STEPS + tries, "close": 1 + tries}


async def test_a_worker_plays_on_a_real_openenv_server(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    server = Server(tmp_path)
    server.begin()
    try:
        options["worker.environment"] = f"openenv:{server.url}?observation=text"
        options["worker.max_turns"] = "2"
        await run.enqueue(0, N, prompt=USER)
        with workers(tmp_path, 1, options):
            await run.ready(1)
        for sample in await delivered(run, {"0": N}):
            notes = sample.metadata["env"]
            assert notes["reset"][0]["content"].startswith("Guess. The seed is")
            # The stand-in for a model writes sentences: none is a valid guess.
            assert notes["infos"] == [{"invalid": True}] * 2
            assert sample.generate_function_path == options["worker.environment"]
    finally:
        server.kill()
