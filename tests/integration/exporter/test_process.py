"""The exporter as a process of its own: outages of its server, SIGTERM, both ways to start it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.devserver import DevServer, die_with_parent
from rollstream.queue import calls
from tests.backstage import Backstage, wait_until

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer("--appendfsync", "always", aof=True) as server:
        yield server


class Process:
    """A running exporter.

    Attributes:
        log: where its lines go.
        port: where it serves.
    """

    def __init__(self, *command: str, url: str, run: str, folder: Path) -> None:
        self.log = folder / "exporter.log"
        argv = ("--redis.url", url, "--run.name", run, "--exporter.host", "127.0.0.1",
                "--exporter.port", "0", "--exporter.interval_s", "0.1")  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, *argv],
                cwd=ROOT, stdout=out, stderr=out, preexec_fn=die_with_parent,
            )  # fmt: skip
        self.port: int = wait_until(lambda: self.event("exporter_serves"))["port"]

    def event(self, name: str) -> dict[str, int]:
        """Return the first log line of an event; empty before it."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return next((line for line in lines if line["event"] == name), {})

    def count(self, name: str) -> int:
        """Return how many lines of an event there are."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return sum(line["event"] == name for line in lines)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self) -> int:
        """Send SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.mark.parametrize(
    "command", [("-m", "worker.exporter"), ("-m", "rollstream.cli", "exporter")]
)
def test_an_exporter_outlives_a_server_that_is_killed_and_ends_with_0(
    server: DevServer, run_name: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    with Backstage(server.url, run_name).open() as run:
        run.finish(0, 1, env="default")
        run.queue.call(calls.connect("trainer", 1))
        run.queue.call(calls.ack("trainer", ["0"]))
    exporter = Process(*command, url=server.url, run=run_name, folder=tmp_path)
    try:
        acked = 'rollout_groups_total{env="default",outcome="acked",reason=""} 1.0'
        wait_until(lambda: acked in exporter.get("/metrics")[1])
        server.kill()
        wait_until(lambda: exporter.get("/readyz")[0] == 503)
        assert exporter.get("/healthz")[0] == 200
        text = exporter.get("/metrics")[1]
        assert "rollout_redis_up 0.0" in text
        assert acked in text
        server.start()
        wait_until(lambda: exporter.get("/readyz")[0] == 200)
        text = exporter.get("/metrics")[1]
        assert "rollout_redis_up 1.0" in text
        assert acked in text
        assert (exporter.count("redis_away"), exporter.count("redis_back")) == (1, 1)
    finally:
        code = exporter.end()
    assert code == 0
    assert exporter.event("stopping")


def test_an_exporter_starts_and_ends_without_any_server(run_name: str, tmp_path: Path) -> None:
    nowhere = "redis://127.0.0.1:1"
    exporter = Process("-m", "worker.exporter", url=nowhere, run=run_name, folder=tmp_path)
    try:
        wait_until(lambda: exporter.event("redis_away"))
        assert exporter.get("/healthz")[0] == 200
        assert exporter.get("/readyz")[0] == 503
        assert "rollout_redis_up 0.0" in exporter.get("/metrics")[1]
    finally:
        code = exporter.end()
    assert code == 0
