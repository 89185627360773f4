"""What a worker and the exporter really say of themselves passes Prometheus's own checks.

Both as processes beside a server and the simulated engine, asked over HTTP once groups came through
and one was dropped.
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.devserver import free_port
from rollstream.queue import calls
from rollstream.wire import encode_prompt
from tests.backstage import Backstage
from tests.builders import a_prompt
from tests.integration.worker.processes import Sim, start, wait_for_url, workers
from tests.ops.debian import tools
from worker.telemetry import catalog
from worker.telemetry.catalog import CATALOG

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "What is 3+4?"}]
GROUPS, N = 3, 2
FOLDED = re.compile(r"^(\S+) +(\d+) +[\d.]+%\s*$", re.MULTILINE)


def checked(exposition: str) -> subprocess.CompletedProcess[str]:
    """Return what promtool says of an exposition."""
    return subprocess.run(
        [tools().promtool, "check", "metrics", "--extended"],
        input=exposition, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def until(url: str, shows: Callable[[str], bool]) -> str:
    """Return a scrape that shows what it is to show."""
    limit = time.monotonic() + 60
    while not shows(text := get(url)):
        assert time.monotonic() < limit, text
        time.sleep(0.1)
    return text


def figure(text: str, name: str) -> float:
    """Return the sum of a metric's series."""
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.fixture(scope="module")
def scrapes(
    valkey_url: str, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """What a worker and the exporter say behind some groups."""
    folder, name = tmp_path_factory.mktemp("metrics"), "t-metrics"
    sim = Sim(folder, vocabulary, latency_s=0.02)
    port, log = free_port(), folder / "exporter.log"
    options = {
        "redis.url": valkey_url,
        "run.name": name,
        "model.tokenizer": str(vocabulary),
        "engine.urls": sim.url,
        "worker.drain_s": "0",
        "aggregator.filters": "no_aborted",
        "sampling.max_new_tokens": "64",
        "env.maths.source": "jsonl:none",
        "env.code.source": "jsonl:none",
        "env.search.source": "jsonl:none",
    }
    exporter = None
    try:
        sim.start()
        with Backstage(valkey_url, name) as run, workers(folder, 1, options) as (worker,):
            run.open()
            exporter = start(
                "worker.exporter", "--redis.url", valkey_url, "--run.name", name,
                "--exporter.host", "127.0.0.1", "--exporter.port", str(port), log=log,
            )  # fmt: skip
            wait_for_url(f"http://127.0.0.1:{port}/readyz", exporter, log)
            for group in range(GROUPS + 1):
                env = "maths" if group < GROUPS else "nobody's"
                record = encode_prompt(a_prompt(group, N, prompt=USER, env=env))
                assert run.queue.call(calls.enqueue(group, N, record, env=env)) == "new"
            found = {
                "worker": until(
                    f"http://127.0.0.1:{worker.port}/metrics",
                    lambda text: figure(text, "rollout_judged_groups_total") == GROUPS + 1,
                ),
                "exporter": until(
                    f"http://127.0.0.1:{port}/metrics",
                    lambda text: figure(text, "rollout_groups_total") == 1,
                ),
            }
            yield found
    finally:
        if exporter is not None:
            exporter.kill()
            exporter.wait()
        sim.kill()


@pytest.mark.parametrize("process", ["worker", "exporter"])
def test_promtool_finds_nothing_wrong_with_what_a_process_says(
    scrapes: dict[str, str], process: str
) -> None:
    done = checked(scrapes[process])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    counted = {name: int(series) for name, series in FOLDED.findall(done.stdout)}
    total = counted.pop("Total")
    assert set(counted) == {spec.name for spec in CATALOG if spec.process == process}
    if process == "worker":
        assert total <= catalog.MAX_SERIES
        envs = catalog.env_labels(["maths", "code", "search"], catalog.WORKER_ENV_LABELS)
        assert total == sum(spec.num_series(envs) for spec in catalog.WORKER)


def test_promtool_would_find_what_is_wrong() -> None:
    for exposition in (
        "# HELP rollout_things Things\n# TYPE rollout_things counter\nrollout_things 1\n",
        "# TYPE rollout_things gauge\nrollout_things 1\n",
        "# HELP rollout_a_ms A\n# TYPE rollout_a_ms gauge\nrollout_a_ms 1\n",
    ):
        assert checked(exposition).returncode != 0, exposition


def test_what_came_through_is_counted_in_its_place(scrapes: dict[str, str]) -> None:
    worker, exporter = scrapes["worker"], scrapes["exporter"]
    assert figure(worker, "rollout_turns_total") == GROUPS * N
    assert 'rollout_judged_groups_total{env="maths",outcome="ready"} 3.0' in worker
    assert 'rollout_samples_total{env="other",reason="env_error",status="failed"} 2.0' in worker
    assert 'rollout_span_duration_seconds_count{span="generate"} 6.0' in worker
    assert figure(exporter, "rollout_groups_enqueued_total") == GROUPS + 1
    assert figure(exporter, "rollout_redis_up") == 1
