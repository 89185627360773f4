"""docker-compose.yml: sound by its schema, safe by its settings, and its very commands run.

There is no Docker here. So the file is held against the compose specification, and one test runs
every service's `command:` as a process, with the names and paths of the containers mapped to ports
and folders of this machine, until groups come out at the trainer's end.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from rollstream import GroupStream
from rollstream.queue.blocking import BlockingQueue
from tests.ops.composed import FILE, ROOT, VARIABLE, Machine, load

OURS = ("secrets", "producer", "worker", "verifier", "sim")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load()


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def test_compose_file_follows_the_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(FILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_has_the_services_and_only_the_stand_in_is_behind_a_profile(
    services: Mapping[str, Any],
) -> None:
    assert set(services) == {*OURS, "redis"}
    assert {name for name, s in services.items() if "profiles" in s} == {"sim"}


def test_every_variable_of_the_compose_file_has_a_default() -> None:
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    assert re.sub(VARIABLE, "", text).count("${") == 0


def test_workers_scale_because_nothing_of_a_service_can_collide(
    services: Mapping[str, Any],
) -> None:
    for name, service in services.items():
        assert "container_name" not in service, name
        assert "ports" not in service, name
        assert "hostname" not in service, name


def test_every_service_is_without_privileges_and_bounded(services: Mapping[str, Any]) -> None:
    for name, service in services.items():
        uid = service["user"].partition(":")[0]
        assert int(uid) > 0, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert {"cpus", "memory"} <= set(service["deploy"]["resources"]["limits"]), name
        assert "privileged" not in service, name
        assert "restart" in service, name


def test_images_are_pinned(services: Mapping[str, Any]) -> None:
    dockerfile = (ROOT / "ops" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)
    for image in {services["redis"]["image"], *bases}:
        assert re.search(r":\d+\.\d+\.\d+", image), image
    assert "--require-hashes" in dockerfile


def test_health_is_asked_without_curl(services: Mapping[str, Any]) -> None:
    for name in ("redis", "worker", "sim"):
        test = " ".join(services[name]["healthcheck"]["test"])
        assert "curl" not in test
        assert "wget" not in test


def test_worker_has_more_time_to_stop_than_it_takes_to_drain(services: Mapping[str, Any]) -> None:
    import tomllib

    drain_s = tomllib.loads((ROOT / "ops/rollstream.toml").read_text())["worker"]["drain_s"]
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_only_who_needs_the_server_reaches_it(
    compose: dict[str, Any], services: Mapping[str, Any]
) -> None:
    assert compose["networks"]["store"]["internal"] is True
    on_store = {n for n, s in services.items() if "store" in s.get("networks", [])}
    assert on_store == {"redis", "producer", "worker", "verifier"}
    text = FILE.read_text() + (ROOT / "ops/redis.conf").read_text()
    assert "requirepass" not in text
    assert "redis://" not in text


def test_server_keeps_what_it_was_told() -> None:
    lines = (ROOT / "ops" / "redis.conf").read_text().splitlines()
    options = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    assert options["appendonly"] == "yes"
    assert options["appendfsync"] == "everysec"
    assert options["auto-aof-rewrite-min-size"] == "1gb"
    assert options["maxmemory-policy"] == "noeviction"


def test_image_copies_only_what_exists_and_is_not_ignored() -> None:
    dockerfile = (ROOT / "ops" / "Dockerfile").read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in kept or source.split("/")[0] in kept, source


# --- the very commands ---------------------------------------------------------------------------
@pytest.fixture
def machine(services: Mapping[str, Any], tmp_path: Path, vocabulary: Path) -> Iterator[Machine]:
    started = Machine(services, tmp_path, vocabulary)
    yield started
    started.stop()


def until(claim: str, holds: Any, timeout_s: float = 30.0) -> None:
    limit = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < limit, f"not within {timeout_s:.0f} s: {claim}"
        time.sleep(0.1)


def only_pings(machine: Machine) -> bool:
    """Whether the health check's user may ping and no more, and nobody without a name."""
    host, port = machine.address("redis").split(":")
    with redis.Redis(host, int(port), username="health", password="any") as health:
        try:
            health.ping()
        except redis.ConnectionError:
            return False
        with pytest.raises(redis.exceptions.NoPermissionError):
            health.get("rs:{demo}:m")
    with redis.Redis(host, int(port)) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    return True


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_very_commands_of_the_compose_file_bring_groups_to_a_trainer(machine: Machine) -> None:
    for _ in range(2):  # a second start keeps the password
        machine.start("secrets")
        assert machine.ended("secrets-1", 20) == 0, machine.log("secrets-1")
    machine.start("redis")
    until("the server answers its health check and nobody else", lambda: only_pings(machine))
    machine.start("sim")
    until("the simulated engine is healthy", lambda: machine.healthy("sim"))
    for service, replicas in (("producer", 1), ("verifier", 1), ("worker", 2)):
        for number in range(1, replicas + 1):
            machine.start(service, number)
    until("a worker is healthy", lambda: machine.healthy("worker"))
    with GroupStream.connect(machine.url, run="demo", connect_timeout_s=30) as stream:
        batches = stream.batches(groups=4, timeout_s=40)
        for _ in range(3):
            batch = next(batches)
            assert len(batch.groups) == 4
            batch.ack()
    queue = BlockingQueue.connect(machine.url, "demo")
    assert queue.counters()["acked"] == 12
    assert queue.presence()["workers"] == 2
    queue.close()
    for command in ("audit", "stats", "runs"):
        looked = machine.look("worker", command)
        assert looked.returncode == 0, looked.stdout + looked.stderr
        assert "demo" in looked.stdout
    for name in ("worker-1", "worker-2", "verifier-1", "producer-1", "sim-1", "redis-1"):
        assert machine.processes[name].poll() is None, machine.log(name)
        machine.processes[name].send_signal(signal.SIGTERM)
        assert machine.ended(name, 30) == 0, machine.log(name)
