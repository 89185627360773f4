"""A worker whose model calls an MCP server that is gone for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.cast import to_toml
from examples.demo.children import Child, stop_all
from examples.demo.options import ROOT
from examples.devserver import DevServer, free_port
from examples.mcp_tools import mcp_server, tables
from rollstream import GroupStream
from rollstream.sample import Sample
from tests.backstage import wait_until

pytestmark = pytest.mark.slow

GROUPS, N = 20, 2
READY_S = 60.0
SOURCE = f"reasoning_gym:gsm_symbolic?size={GROUPS}&seed=1"


def test_no_group_is_lost_to_an_mcp_server_that_is_gone_for_a_while(
    tmp_path: Path, vocabulary: Path
) -> None:
    log = tmp_path / "worker.log"
    samples: list[Sample] = []
    with (
        DevServer() as redis,
        _stack(redis.url, tmp_path, vocabulary) as children,
    ):
        children["mcp-server"].kill()
        children["producer"].start()
        wait_until(lambda: "mcp_server_down" in log.read_text())
        children["mcp-server"].start()
        with GroupStream.connect(redis.url, run="mcp", connect_timeout_s=READY_S) as stream:
            for batch in stream.batches(groups=1, timeout_s=READY_S):
                (group,) = batch.groups
                assert not group.missing, group.missing
                samples += (sample for sample in group.samples if isinstance(sample, Sample))
                batch.ack()
                if batch.number == GROUPS:
                    break
    assert len(samples) == GROUPS * N
    assert "mcp_server_back" in log.read_text()
    errors = [sample.metadata.get("tool_errors", {}) for sample in samples]
    # The outage is nobody's text: no model read of it, and none was rewarded for it.
    assert {label for error in errors for label in error} <= {"malformed", "raised"}
    assert sum(sample.metadata.get("tool_calls_ok", 0) for sample in samples) > 0


@contextlib.contextmanager
def _stack(redis_url: str, folder: Path, vocabulary: Path) -> Iterator[dict[str, Child]]:
    """Start everything but the producer and the trainer; yields all processes by name."""
    engine, server, metrics = free_port(), free_port(), free_port()
    mine = tables(f"http://127.0.0.1:{server}/mcp", SOURCE)
    mine["producer"] |= {"n_samples_per_prompt": N, "progress": False}
    mine |= {
        "run": {"name": "mcp"},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(vocabulary)},
        "engine": {"kind": "sim", "urls": [f"http://127.0.0.1:{engine}"]},
        "aggregator": {"filters": [], "min_samples": 1},
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": metrics},
    }
    config = folder / "rollstream.toml"
    config.write_text(to_toml(mine))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def child(name: str, *command: str, ready_url: str | None = None) -> Child:
        whole = [sys.executable, "-m", *command]
        return Child(
            name, whole, folder=folder, environment=environment, cwd=ROOT, ready_url=ready_url
        )

    sim = child(
        "sim", "worker.engines.sim", "--port", str(engine), "--tokenizer", str(vocabulary),
        "--answers", SOURCE, ready_url=f"http://127.0.0.1:{engine}/model_info",
    )  # fmt: skip
    ready_url = f"http://127.0.0.1:{metrics}/readyz"
    worker = child("worker", "worker", "--config", str(config), ready_url=ready_url)
    producer = child("producer", "producer", "--config", str(config))
    children = [mcp_server(server, folder), sim, worker, producer]
    try:
        for one in children[:-1]:
            one.start()
            one.wait_ready(READY_S)
        yield {one.name: one for one in children}
    finally:
        stop_all(children[::-1])
