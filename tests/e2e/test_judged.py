"""A whole run of real processes whose groups are scored and judged by the aggregator."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import RunFailed
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.stream import GroupStream
from tests.backstage import wait_until
from tests.integration.worker.processes import Sim, WorkerProcess, start
from tests.integration.worker.processes import workers as start_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
N, GROUPS = 4, 12
EXPECTED = [GROUPS * N, GROUPS * N, GROUPS * 6, GROUPS * 6]
"""Members and the sum of their ranks, in all groups and in those delivered."""


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary, 0.05)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def options(
    sim: Sim, vocabulary: Path, valkey_url: str, run_name: str, tmp_path: Path
) -> dict[str, str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(GROUPS)))
    return {
        "redis.url": valkey_url,
        "run.name": run_name,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "sampling.max_new_tokens": "16",
        "producer.source": f"jsonl:{rows}",
        "producer.n_samples_per_prompt": str(N),
        "reward.kind": "none",
    }


def producer(options: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    flags = [part for key, value in options.items() for part in (f"--{key}", value)]
    return start("producer", *flags, log=folder / "producer.log")


def totals(workers: list[WorkerProcess], name: str, **labels: str) -> float:
    """Return a counter's sum over workers."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for worker in workers:
        _, page = worker.get("/metrics")
        for shown, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
            total += float(value) if all(label in shown for label in wanted) else 0.0
    return total


def counts(workers: list[WorkerProcess]) -> list[float]:
    """Return members and their rewards' sum, each in all groups and in those delivered."""
    return [
        totals(workers, f"rollout_{name}_total", kind=kind)
        for name in ("rewards", "reward_gained")
        for kind in ("all", "delivered")
    ]


def test_a_group_reward_scores_a_whole_run_and_every_sample_reaches_the_trainer_with_it(
    options: dict[str, str], tmp_path: Path
) -> None:
    options |= {
        "reward.group": "tests.e2e.judges:ranked",
        "reward.key": "rank",
        "producer.stay": "false",
    }
    scored: dict[int, list[Any]] = {}
    with start_workers(tmp_path, 2, options) as running:
        producing = producer(options, tmp_path)
        assert producing.wait(60) == 0, (tmp_path / "producer.log").read_text()
        stream = GroupStream.connect(options["redis.url"], run=options["run.name"])
        with stream:
            for batch in stream.batches(groups=3, timeout_s=60):
                for group in batch:
                    scored[group.group_index] = [
                        (s.response_length, s.member, s.reward) for s in group.flat()
                    ]
                rows = batch.to_arrays()["reward"].reshape(-1, N)
                assert sorted(rows[0].tolist()) == [0.0, 1.0, 2.0, 3.0]
                if batch.number < GROUPS // 3:
                    batch.ack()
                    continue
                # Figures reach the page once a second.
                wait_until(lambda: counts(running) == EXPECTED)
                batch.ack()
    assert sorted(scored) == list(range(GROUPS))
    for samples in scored.values():
        ranks = [reward["rank"] for *_, reward in sorted(samples)]
        assert ranks == [0.0, 1.0, 2.0, 3.0]


def test_a_run_whose_groups_are_all_dropped_fails_in_every_process_with_the_reason(
    options: dict[str, str], tmp_path: Path
) -> None:
    options |= {
        "reward.group": "tests.e2e.judges:alike",
        "producer.epochs": "100",
        "producer.capacity_groups": "6",
        "weights.groups_per_step": "3",
        "aggregator.stop_after_dropped_batches": "4",
    }
    with start_workers(tmp_path, 2, options) as running:
        producing = producer(options, tmp_path)
        codes = [producing.wait(60), *(one.process.wait(60) for one in running)]
        logs = [tmp_path / "producer.log", *(one.log for one in running)]
        told = [log.read_text() for log in logs]
    with (
        GroupStream.connect(options["redis.url"], run=options["run.name"]) as stream,
        pytest.raises(RunFailed) as failed,
    ):
        next(stream.batches(groups=3, timeout_s=20))
    assert failed.value.reason.startswith(
        "12 groups in a row were dropped and none kept: zero_std 12; the last was group "
    )
    assert "reward_nonzero_std: std 0 of 4 rewards around 0.5" in failed.value.reason
    assert "aggregator.stop_after_dropped_batches" in failed.value.reason
    for code, text in zip(codes, told, strict=True):
        assert code != 0
        assert failed.value.reason in text
    with closing(BlockingQueue.connect(options["redis.url"], options["run.name"])) as queue:
        assert queue.counters()["dropped:zero_std"] >= 12
        assert queue.call(calls.audit(deep=True)).problems == []
