"""`rollstream doctor` and the warnings at start, on servers that are wrong in one way each."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer, free_port
from rollstream.cli.__main__ import main
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import rows_file
from tests.integration.worker.processes import start

from .servers import told


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROLLSTREAM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def fit() -> Iterator[DevServer]:
    with DevServer(aof=True) as server:
        yield server


@pytest.fixture(scope="module")
def unfit() -> Iterator[DevServer]:
    with DevServer("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


def examine(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Return exit code and JSON of doctor."""
    code = main(["doctor", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def problems(said: Any) -> list[str]:
    return [f["check"] for f in said["findings"] if f["level"] == "problem"]


def test_a_fit_server_is_well_and_its_figures_are_shown(
    fit: DevServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = examine(capsys, "--redis", fit.url)
    assert (code, said["ok"], problems(said)) == (0, True, [])
    facts = said["facts"]
    assert facts["server"].startswith(("Valkey", "Redis"))
    assert (facts["append_only"], facts["append_fsync"]) == ("on", "everysec")
    assert (facts["role"], facts["policy"]) == ("master", "noeviction")
    assert facts["round_trip_ms"] > 0
    assert main(["doctor", "--redis", fit.url]) == 0
    assert "all is well" in capsys.readouterr().out


def test_wrong_settings_of_a_server_are_problems_with_what_to_do(
    unfit: DevServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = examine(capsys, "--redis", unfit.url)
    assert (code, said["ok"]) == (1, False)
    assert problems(said) == ["eviction", "persistence"]
    assert main(["doctor", "--redis", unfit.url]) == 1
    out = capsys.readouterr().out
    assert "problem: maxmemory-policy is allkeys-lru\n  why: " in out
    assert "CONFIG SET maxmemory-policy noeviction" in out
    assert "2 to be mended" in out


def test_a_replica_and_a_server_that_is_away_are_problems(
    fit: DevServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with DevServer(aof=True) as replica:
        with told(replica.port) as client:
            client.replicaof("127.0.0.1", fit.port)
        code, said = examine(capsys, "--redis", replica.url)
        assert (code, problems(said)) == (1, ["role"])
    code, said = examine(capsys, "--redis", replica.url, "--timeout-s", "1")
    assert (code, problems(said)) == (1, ["reach"])


def test_a_managed_server_that_forbids_config_is_judged_by_info(
    unfit: DevServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with told(unfit.port) as client:
        client.acl_setuser("managed", enabled=True, passwords=["+p"], keys="*",
                           commands=["+@all", "-config"])  # fmt: skip
    code, said = examine(capsys, "--redis", f"redis://managed:p@127.0.0.1:{unfit.port}")
    assert code == 1
    assert [f["check"] for f in said["findings"]] == ["eviction", "persistence", "config"]
    assert said["facts"]["append_fsync"] == "unknown"


def test_runs_of_another_version_and_damaged_ones_are_named(
    fit: DevServer, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(fit.url, run_name) as good, Backstage(fit.url, f"{run_name}-b") as bad:
        good.open()
        bad.open()
        bad.queue.client.hset(f"{bad.queue.prefix}m", "schema", 99)
        code, said = examine(capsys, "--redis", fit.url)
        assert (code, problems(said)) == (1, ["schema"])
        assert "layout 99, this one has 1" in said["findings"][0]["what"]
        assert said["facts"]["runs"][run_name] == "running"
        bad.queue.client.hset(f"{bad.queue.prefix}m", mapping={"schema": 1, "epoch": "x"})
        code, said = examine(capsys, "--redis", fit.url)
        assert (code, problems(said)) == (1, ["schema"])
        assert "cannot be read" in said["findings"][0]["what"]
        for one in (good, bad):
            one.queue.client.delete(*one.keys())


def test_a_run_is_audited_and_the_roles_it_lacks_are_named(
    fit: DevServer, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(fit.url, run_name) as run:
        run.open().enqueue(0, 1)
        run.queue.call(calls.present("producer", "p", leaving=True))
        code, said = examine(capsys, "--redis", fit.url, "--run", run_name)
        assert (code, problems(said)) == (1, ["roles", "roles"])
        assert "no producer is alive" in said["findings"][0]["what"]
        assert "no worker is alive" in said["findings"][1]["what"]
        assert (said["facts"]["run"]["enqueued"], said["facts"]["run"]["live"]) == (2, 2)

        run.queue.call(calls.present("producer", "p"))
        run.complete(run.lease())
        run.queue.call(calls.present("aggregator", "a"))
        assert examine(capsys, "--redis", fit.url, "--run", run_name)[0] == 0

        run.queue.client.delete(f"{run.queue.prefix}gs")
        code, said = examine(capsys, "--redis", fit.url, "--run", run_name)
        assert code == 1
        assert "audit" in problems(said)


def test_engines_and_the_server_of_jobs_are_asked_with_a_configuration(
    fit: DevServer, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    file = tmp_path / "rollstream.toml"
    file.write_text(
        f'[redis]\nurl = "{fit.url}"\n[run]\nname = "{run_name}"\n[engine]\nurls = ["{gone}"]\n'
        f'[reward]\nkind = "math_verify"\n[rq]\nurl = "redis://127.0.0.1:{free_port()}"\n'
    )
    code, said = examine(capsys, "--config", str(file))
    assert (code, problems(said)) == (1, ["engine", "rq"])
    assert gone in said["findings"][1]["what"]
    assert main(["doctor", "--config", str(tmp_path / "none.toml")]) == 2


@pytest.mark.slow
def test_producer_worker_and_trainer_warn_at_start_and_go_on(
    unfit: DevServer, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = [tmp_path / "producer.log", tmp_path / "worker.log"]
    rows = rows_file(tmp_path, 1)
    common = ("--redis.url", unfit.url, "--run.name", run_name)
    producer = start("producer", *common, "--producer.source", f"jsonl:{rows}",
                     "--producer.stay", "false", log=logs[0])  # fmt: skip
    worker = start("worker", *common, "--worker.role", "aggregator", "--telemetry.metrics_port",
                   "0", log=logs[1])  # fmt: skip
    try:
        assert producer.wait(45) == 0
        with caplog.at_level(logging.WARNING, logger="rollstream.stream"):
            GroupStream.connect(unfit.url, run=run_name, connect_timeout_s=5).close()
        wait_until(lambda: "worker_ready" in logs[1].read_text(), 15)
        worker.terminate()
        assert worker.wait(45) == 0
    finally:
        worker.kill()
        producer.kill()
    for log in logs:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line[0] == "{"]
        warned = [line for line in lines if line["event"] == "redis_unfit"]
        assert [line["check"] for line in warned] == ["eviction", "persistence"], log
        assert all(line["what"] and line["why"] and line["action"] for line in warned)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "maxmemory-policy is allkeys-lru" in text]) == 1
