"""docker-compose.yml: sound by its schema, safe by its settings, and its very commands run.

There is no Docker here. So the file is held against the compose specification, and one test runs
every service's `command:` as a process, with the names and paths of the containers mapped to ports
and folders of this machine, until groups come out at the trainer's end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from examples.devserver import die_with_parent, free_port, server_binary
from rollstream import GroupStream
from rollstream.queue.blocking import BlockingQueue

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
OURS = ("secrets", "producer", "worker", "verifier", "sim")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def resolve(value: Any) -> Any:
    """Fill in `${NAME:-default}` as compose does where no variable is set."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: found[2], value)
    if isinstance(value, list):
        return [resolve(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve(item) for key, item in value.items()}
    return value


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = resolve(yaml.safe_load(FILE.read_text()))
    return loaded


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
    assert re.sub(_VARIABLE, "", text).count("${") == 0


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
class Machine:
    """Runs services of the compose file as processes: names and paths become local ones."""

    def __init__(self, services: Mapping[str, Any], folder: Path, vocabulary: Path) -> None:
        self.services, self.folder = services, folder
        self.redis_port, self.engine_port, self.metrics_port = (free_port() for _ in range(3))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "data").mkdir()
        (folder / "ops").symlink_to(ROOT / "ops")
        shutil.copy(ROOT / "ops" / "rollstream.toml", folder)
        self.places = {
            "/etc/rollstream/redis.conf": str(folder / "redis.conf"),
            "/run/rollstream": str(folder / "secrets"),
            "/models/qwen3/tokenizer.json": str(vocabulary),
            "http://engine:30000": f"http://127.0.0.1:{self.engine_port}",
            "127.0.0.1:30000": f"127.0.0.1:{self.engine_port}",
            "127.0.0.1:9400": f"127.0.0.1:{self.metrics_port}",
            "--port=30000": f"--port={self.engine_port}",
            "--host=0.0.0.0": "--host=127.0.0.1",
        }
        text = self.here((ROOT / "ops" / "redis.conf").read_text())
        text = text.replace("port 6379", f"port {self.redis_port}").replace("dir /data", "dir data")
        (folder / "redis.conf").write_text(text.replace("bind * -::*", "bind 127.0.0.1"))

    def here(self, text: str) -> str:
        for there, place in self.places.items():
            text = text.replace(there, place)
        return text

    def environment(self, service: str) -> dict[str, str]:
        given = self.services[service].get("environment", {})
        ours = {key: self.here(value) for key, value in given.items()}
        # Container-internal ports and the number of replicas are the only things that differ.
        ours |= {"ROLLSTREAM_TELEMETRY__METRICS_HOST": "127.0.0.1"} if given else {}
        ours |= {"ROLLSTREAM_TELEMETRY__METRICS_PORT": str(self.metrics_port)} if given else {}
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
        return clean | ours | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def command(self, words: list[str]) -> list[str]:
        programs = {"python": sys.executable, "valkey-server": server_binary()}
        return [programs.get(words[0], words[0]), *(self.here(word) for word in words[1:])]

    def start(self, service: str, number: int = 1) -> None:
        words = self.command(self.services[service]["command"])
        if service == "secrets":
            words = [*words[:-2], "127.0.0.1", str(self.redis_port)]
        with (self.folder / f"{service}-{number}.log").open("wb") as log:
            self.processes[f"{service}-{number}"] = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment(service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def ended(self, name: str, timeout_s: float) -> int:
        return self.processes[name].wait(timeout_s)

    def healthy(self, service: str) -> bool:
        kind, *words = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(self.command(words), env=os.environ, capture_output=True, check=False)
        return done.returncode == 0

    def look(self, service: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run what `docker compose exec SERVICE rollstream COMMAND` runs."""
        return subprocess.run(
            [sys.executable, "-m", "rollstream.cli", command],
            cwd=self.folder,
            env=self.environment(service),
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        return (self.folder / "secrets" / "redis_url").read_text().strip()


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
    port = machine.redis_port
    with redis.Redis(port=port, username="health", password="any") as health:
        try:
            health.ping()
        except redis.ConnectionError:
            return False
        with pytest.raises(redis.exceptions.NoPermissionError):
            health.get("rs:{demo}:m")
    with redis.Redis(port=port) as nobody, pytest.raises(redis.AuthenticationError):
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
