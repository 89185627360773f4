"""docker-compose.yml: sound by its schema, safe by its settings, and its very commands run.

There is no Docker here. So the file is held against the compose specification, and one test runs
every service's `command:` as a process, with the names and paths of the containers mapped to ports
and folders of this machine, until groups come out at the trainer's end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import rollstream
from rollstream import GroupStream
from rollstream.queue.blocking import BlockingQueue
from tests.ops import debian
from tests.ops.composed import FILE, ROOT, VARIABLE, Machine, load, problems

OURS = ("secrets", "producer", "worker", "verifier", "exporter", "sim")
WATCHING = ("prometheus", "grafana", "redis_exporter", "alertmanager")
PUBLISHED = {
    "prometheus": "${ROLLSTREAM_PROMETHEUS_LISTEN:-127.0.0.1:9090}:9090",
    "grafana": "${ROLLSTREAM_GRAFANA_LISTEN:-127.0.0.1:3000}:3000",
}
ASKS_WITH = {
    # What of the image asks. prom/* have busybox and their own tools, grafana and the -alpine image
    # of redis_exporter have Alpine's busybox, Valkey's has its client, ours has Python.
    "redis": "valkey-cli",
    "producer": "python",
    "worker": "python",
    "verifier": "python",
    "exporter": "python",
    "sim": "python",
    "prometheus": "promtool",
    "alertmanager": "amtool",
    "grafana": "wget",
    "redis_exporter": "wget",
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load()


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def test_compose_file_follows_the_specification() -> None:
    assert problems(FILE.read_text()) == []


def test_compose_has_the_services_and_their_profiles(services: Mapping[str, Any]) -> None:
    assert set(services) == {*OURS, *WATCHING, "redis"}
    behind = {name: s["profiles"] for name, s in services.items() if "profiles" in s}
    assert behind == {"sim": ["sim"]} | {key: ["observability"] for key in WATCHING}


def test_nobody_waits_for_a_service_that_a_profile_leaves_out(services: Mapping[str, Any]) -> None:
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert "profiles" not in services[other], f"{name} waits for {other}"


def test_every_variable_of_the_compose_file_has_a_default() -> None:
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    assert re.sub(VARIABLE, "", text).count("${") == 0


def test_workers_scale_because_nothing_of_a_service_can_collide(
    services: Mapping[str, Any],
) -> None:
    for name, service in services.items():
        assert "container_name" not in service, name
        assert "hostname" not in service, name
        assert ("ports" in service) == (name in PUBLISHED), name


def test_ports_are_published_on_this_machine_alone_unless_told_otherwise() -> None:
    services = yaml.safe_load(FILE.read_text())["services"]
    assert {name: services[name]["ports"] for name in PUBLISHED} == {
        name: [port] for name, port in PUBLISHED.items()
    }


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
    others = {service["image"] for name, service in services.items() if name not in OURS}
    for image in {*others, *bases}:
        assert re.search(r":v?\d+\.\d+\.\d+(-[\w.-]+)?(@sha256:[0-9a-f]{64})?$", image), image
    assert "--require-hashes" in dockerfile


def test_every_service_that_stays_is_asked_for_its_health_with_what_its_image_has(
    services: Mapping[str, Any],
) -> None:
    asked = {}
    for name, service in services.items():
        if "healthcheck" in service:
            kind, *words = service["healthcheck"]["test"]
            asked[name] = words[0].split()[0]
            assert kind == ("CMD-SHELL" if name == "redis" else "CMD"), name
            assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])
    assert asked == ASKS_WITH
    assert set(services) - set(asked) == {"secrets"}  # which ends


def test_health_of_who_has_no_server_is_the_age_of_the_file_that_it_renews(
    services: Mapping[str, Any], tmp_path: Path, vocabulary: Path
) -> None:
    machine = Machine(services, tmp_path, vocabulary)
    for service in ("producer", "verifier"):
        place = Path(machine.environment(service)["ROLLSTREAM_TELEMETRY__HEARTBEAT_FILE"])
        assert not machine.healthy(service)
        place.touch()
        assert machine.healthy(service)
        old = time.time() - 40
        os.utime(place, (old, old))
        assert not machine.healthy(service)


def test_worker_has_more_time_to_stop_than_it_takes_to_drain(services: Mapping[str, Any]) -> None:
    import tomllib

    drain_s = tomllib.loads((ROOT / "ops/rollstream.toml").read_text())["worker"]["drain_s"]
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_only_who_needs_the_server_reaches_it(
    compose: dict[str, Any], services: Mapping[str, Any]
) -> None:
    on = networks(services)
    assert compose["networks"]["store"]["internal"] is True
    assert on["store"] == {"redis", "producer", "worker", "verifier", "exporter", "redis_exporter"}
    text = FILE.read_text() + (ROOT / "ops/redis.conf").read_text()
    assert "requirepass" not in text
    assert not re.search(r"redis://[^\s]*:[^\s]*@", text)


def test_prometheus_reaches_who_is_measured_and_never_the_server(
    compose: dict[str, Any], services: Mapping[str, Any]
) -> None:
    on = networks(services)
    assert compose["networks"]["metrics"]["internal"] is True
    assert on["metrics"] == {"worker", "exporter", "redis_exporter", "prometheus"}
    assert on["people"] == {"prometheus", "alertmanager", "grafana"}
    # A port that is published needs a network that is not internal.
    assert not (compose["networks"]["people"] or {}).get("internal")
    assert set(PUBLISHED) <= on["people"]


def networks(services: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return name of the network → services in it."""
    found: dict[str, set[str]] = {}
    for name, service in services.items():
        for network in service.get("networks", []):
            found.setdefault(network, set()).add(name)
    return found


def test_who_watches_has_no_key_to_the_run(services: Mapping[str, Any]) -> None:
    for name, service in services.items():
        sources = {volume.split(":")[0] for volume in service.get("volumes", [])}
        if name in WATCHING:
            assert "secrets" not in sources, name
        elif name != "secrets":
            assert "observability" not in sources, name
    for volume in ("secrets", "observability"):
        writers = [
            name
            for name, service in services.items()
            for mounted in service.get("volumes", [])
            if mounted.startswith(f"{volume}:") and not mounted.endswith(":ro")
        ]
        assert writers == ["secrets"]


def test_nobody_without_a_password_looks_at_grafana_unless_told_otherwise(
    services: Mapping[str, Any],
) -> None:
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/observability/grafana_password"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment


def test_grafana_finds_what_its_provisioning_and_its_home_name(
    services: Mapping[str, Any], tmp_path: Path, vocabulary: Path
) -> None:
    machine = Machine(services, tmp_path, vocabulary)
    machine.mount("grafana")
    home = machine.environment("grafana")["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(Path(home).read_text())["uid"] == "rollstream-overview"
    (folder,) = (ROOT / "ops/grafana/provisioning/dashboards").glob("*.yml")
    (provider,) = yaml.safe_load(folder.read_text())["providers"]
    assert machine.here(provider["options"]["path"], "grafana") == str(Path(home).parent)
    (source,) = (ROOT / "ops/grafana/provisioning/datasources").glob("*.yml")
    (prometheus,) = yaml.safe_load(source.read_text())["datasources"]
    assert prometheus["url"] == "http://prometheus:9090"
    assert set(services["grafana"]["networks"]) & set(services["prometheus"]["networks"])


def test_prometheus_finds_its_targets_by_names_that_it_shares_a_network_with(
    services: Mapping[str, Any],
) -> None:
    config = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    (alertmanager,) = config["alerting"]["alertmanagers"]
    found = [target for s in alertmanager["static_configs"] for target in s["targets"]]
    for job in config["scrape_configs"]:
        found += [target for s in job.get("static_configs", []) for target in s["targets"]]
        for dns in job.get("dns_sd_configs", []):
            assert (dns["names"], dns["type"], dns["port"]) == (["worker"], "A", 9400)
            found += ["worker:9400"]
    found.remove("localhost:9090")
    assert len(found) == 4
    for target in found:
        name = target.split(":")[0]
        assert set(services[name]["networks"]) & set(services["prometheus"]["networks"]), target


def test_every_volume_and_network_is_declared_and_every_mounted_file_exists(
    compose: dict[str, Any], services: Mapping[str, Any]
) -> None:
    assert set(networks(services)) == set(compose["networks"])
    named = set()
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                place = ROOT / source
                assert place.is_file() or any(place.rglob("*.*")), f"{name}: {source}"
            else:
                named.add(source)
    assert named == set(compose["volumes"])


def test_every_command_is_a_module_a_program_or_a_file_that_exists(
    services: Mapping[str, Any],
) -> None:
    for name in OURS:
        python, *words = services[name]["command"]
        assert python == "python"
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]) is not None, words[1]
        else:
            assert (ROOT / words[0]).is_file(), words[0]


def test_a_second_start_keeps_every_password_and_an_older_one_gets_what_it_lacks(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(ROOT / "ops/make_secrets.py"), str(tmp_path / "a"), "redis"]
    with_watchers = [*command, "6379", str(tmp_path / "b")]
    subprocess.run([*command, "6379"], check=True, capture_output=True)
    url = (tmp_path / "a" / "redis_url").read_text()
    assert "user metrics" not in (tmp_path / "a" / "redis.acl").read_text()
    subprocess.run(with_watchers, check=True, capture_output=True)
    made = contents(tmp_path)
    assert made["redis_url"] == url
    users = made["redis.acl"].splitlines()
    assert [line.split()[1] for line in users] == ["default", "rollstream", "health", "metrics"]
    (password,) = set(json.loads(made["redis_exporter.json"]).values())
    assert f">{password} " in users[-1]
    assert len(made["grafana_password"]) >= 20
    done = subprocess.run(with_watchers, check=True, capture_output=True, text=True)
    assert contents(tmp_path) == made
    assert "kept" in done.stdout
    assert not any(word in done.stdout for word in (password, made["grafana_password"]))
    shutil.rmtree(tmp_path / "a")  # the volume of the server was removed, the other one stayed
    subprocess.run(with_watchers, check=True, capture_output=True)
    again = contents(tmp_path)
    assert f">{password} " in again["redis.acl"].splitlines()[-1]
    assert again["redis_url"] != url
    assert again["grafana_password"] == made["grafana_password"]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*/*")}


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


def test_image_says_what_it_is_and_keeps_nothing_that_installs(services: Mapping[str, Any]) -> None:
    dockerfile = (ROOT / "ops" / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)
    last = stages[-1]
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]+)"', last))
    assert labels["version"] == rollstream.__version__
    assert services["worker"]["image"] == f"rollstream:{rollstream.__version__}"
    assert labels["base.name"] == f"docker.io/library/{last.split()[0]}"
    assert labels["licenses"] == "Apache-2.0"
    assert "venv --without-pip /opt/venv" in stages[-2]
    assert not re.search(r"pip|apt-get|curl", re.sub(r"#.*", "", last))
    assert re.search(r"^USER 10001:10001$", last, flags=re.MULTILINE)


def test_image_has_a_folder_of_its_user_for_every_volume_that_it_writes(
    services: Mapping[str, Any],
) -> None:
    made = re.search(
        r"install -d -o rollstream .* 0755 (.*)", (ROOT / "ops/Dockerfile").read_text()
    )
    assert made is not None
    written = [volume.split(":")[1] for volume in services["secrets"]["volumes"]]
    assert set(written) <= set(made[1].split())


# --- the very commands ---------------------------------------------------------------------------
@pytest.fixture
def machine(services: Mapping[str, Any], tmp_path: Path, vocabulary: Path) -> Iterator[Machine]:
    started = Machine(services, tmp_path, vocabulary)
    yield started
    started.stop()


def until(claim: str, holds: Any, timeout_s: float = 60.0) -> None:
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
        for forbidden in (("GET", "rs:{demo}:m"), ("INFO",), ("ACL", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                health.execute_command(*forbidden)
    with redis.Redis(host, int(port)) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_very_commands_of_the_compose_file_bring_groups_to_a_trainer(machine: Machine) -> None:
    for _ in range(2):  # a second start keeps the password
        machine.start("secrets")
        assert machine.ended("secrets-1", 60) == 0, machine.log("secrets-1")
    machine.start("redis")
    until("the server answers its health check and nobody else", lambda: only_pings(machine))
    machine.start("sim")
    until("the simulated engine is healthy", lambda: machine.healthy("sim"))
    replicas = [("producer", 1), ("verifier", 1), ("worker", 1), ("worker", 2), ("exporter", 1)]
    for service, number in replicas:
        assert not machine.healthy(service, number)
        machine.start(service, number)
    for service, number in replicas:
        until(f"{service} {number} is healthy", functools.partial(machine.healthy, service, number))
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
    until(
        "the exporter has counted them", lambda: 'outcome="acked"' in scraped(machine, "exporter")
    )
    assert "rollout_queue_depth" in scraped(machine, "exporter")
    assert "rollout_samples_total" in scraped(machine, "worker")
    stop(machine, *(f"{service}-{number}" for service, number in replicas))
    stop(machine, "sim-1", "redis-1")


def scraped(machine: Machine, service: str) -> str:
    url = f"http://{machine.address(service)}/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
    return text


def stop(machine: Machine, *names: str) -> None:
    """Ask processes to stop, as compose does; they end by themselves, having done their work."""
    for name in names:
        assert machine.running(name), machine.log(name)
        machine.processes[name].send_signal(signal.SIGTERM)
    for name in names:
        assert machine.ended(name, 60) == 0, machine.log(name)


@pytest.mark.slow
def test_who_watches_the_server_reads_its_figures_and_nothing_else(
    services: Mapping[str, Any], tmp_path: Path, vocabulary: Path
) -> None:
    programs = {"redis_exporter": str(debian.tools().redis_exporter)}
    machine = Machine(services, tmp_path, vocabulary, programs=programs)
    try:
        machine.start("secrets")
        assert machine.ended("secrets-1", 60) == 0, machine.log("secrets-1")
        machine.start("redis")
        until("the server answers", lambda: only_pings(machine))
        machine.start("redis_exporter")
        until("the server's figures are there", lambda: "redis_up 1" in or_nothing(machine))
        figures = scraped(machine, "redis_exporter")
        for name in (
            "redis_memory_used_bytes",
            "redis_memory_max_bytes",
            "redis_evicted_keys_total",
        ):
            assert f"\n{name} " in figures
        file = tmp_path / "volumes" / "observability" / "redis_exporter.json"
        (password,) = set(json.loads(file.read_text()).values())
        host, port = machine.address("redis").split(":")
        with redis.Redis(host, int(port), username="metrics", password=password) as metrics:
            assert metrics.ping()
            forbidden = (
                ("GET", "rs:{demo}:m"),
                ("KEYS", "*"),
                ("SLOWLOG", "GET"),
                ("CONFIG", "GET", "*"),
            )
            for command in forbidden:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    metrics.execute_command(*command)
    finally:
        machine.stop()


def or_nothing(machine: Machine) -> str:
    with contextlib.suppress(OSError):
        return scraped(machine, "redis_exporter")
    return ""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_producer_and_verifier_are_healthy_while_the_server_is_away(machine: Machine) -> None:
    machine.start("secrets")
    assert machine.ended("secrets-1", 60) == 0, machine.log("secrets-1")
    machine.start("redis")
    until("the server answers", lambda: only_pings(machine))
    for service in ("producer", "verifier"):
        machine.start(service)
    for service in ("producer", "verifier"):
        until(f"{service} is healthy", functools.partial(machine.healthy, service))
    machine.processes["redis-1"].kill()
    machine.ended("redis-1", 60)
    for service in ("producer", "verifier"):
        # By hand: what renews the file now does so without a server.
        place = Path(machine.environment(service)["ROLLSTREAM_TELEMETRY__HEARTBEAT_FILE"])
        os.utime(place, (1.0, 1.0))
        until(f"{service} renews it", lambda place=place: place.stat().st_mtime > 1.0)
        assert machine.running(f"{service}-1"), machine.log(f"{service}-1")
