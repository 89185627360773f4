"""What the tests of real workers share: the simulated engine, the options, an opened run.

Imported by `test_poison.py` and `test_workers.py`; the engine only says that it is there, because
the generate functions of `poisons.py` ask none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.parts import Run, a_run
from tests.integration.worker.processes import Sim

N = 4
LEASE_S = 1.0


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    """The engine that workers find at their start."""
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    """A run with leases of a second."""
    async with a_run(valkey_url, run_name, lease_ms=int(1000 * LEASE_S)) as opened:
        yield opened


@pytest.fixture
def options(sim: Sim, vocabulary: Path, run: Run) -> dict[str, str]:
    """What every worker of a test is told."""
    return {
        "redis.url": run.url,
        "run.name": run.queue.run,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "worker.generate": "tests.e2e.poisons:generate",
        "worker.concurrency": "8",
        "worker.drain_s": "0",
        "worker.retry_delay_s": "0.05",
        "worker.stall_limit_s": "1.5",
        "reward.kind": "tests.e2e.poisons:reward",
        "aggregator.filters": "no_aborted",
    }


async def enqueue(run: Run, group_index: int, **metadata: Any) -> None:
    """Enqueue one group whose row says `metadata`."""
    await run.enqueue(group_index, N, metadata=metadata)
