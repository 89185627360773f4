"""The engine that all runs share, a stage per test, and the run that nothing was broken in."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.sinks.stage import Stage, whole_run
from tests.integration.worker.processes import Sim


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary, latency_s=0.1)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def set_stage(
    valkey_url: str, sim: Sim, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Stage]]:
    stages: list[Stage] = []

    def make() -> Stage:
        folder = tmp_path_factory.mktemp("stage")
        run = f"sinks-{uuid.uuid4().hex[:12]}"
        stages.append(Stage(valkey_url, run, sim.url, vocabulary, folder))
        return stages[-1]

    yield make
    for one in stages:
        one.end()


@pytest.fixture
def stage(set_stage: Callable[[], Stage]) -> Iterator[Stage]:
    one = set_stage()
    yield one
    one.end()


@pytest.fixture(scope="module")
def unbroken(set_stage: Callable[[], Stage]) -> dict[int, list[str]]:
    """What a trainer gets where every sink is fine."""
    stage = set_stage()
    with (
        (stage.folder / "log").open("wb") as log,
        whole_run(stage, lambda _: {"stderr": log}) as (found, worker, _),
    ):
        assert stage.stop(worker) == 0
    stage.end()
    return found
