"""The services of docker-compose.yml as processes of this machine, their commands to the letter.

Owns the mapping from containers to processes. Every replica has a loopback address of its own, as
it has one in a network of containers; names, mounted paths and ports become local ones, in
commands, environments, health checks and mounted configuration alike. Never a second list of what
a service is started with. Invariant: whatever it starts, it ends.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for

from examples.devserver import die_with_parent, server_binary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
SERVER = "redis"
ENTRYPOINTS = {
    "prometheus": "prometheus",
    "alertmanager": "alertmanager",
    "redis_exporter": "redis_exporter",
}
"""What the images of others start; `command:` is its arguments."""
_PORTS = {
    "redis": 6379,
    "engine": 30000,
    "worker": 9400,
    "exporter": 9401,
    "redis_exporter": 9121,
    "prometheus": 9090,
    "alertmanager": 9093,
}
"""Where each service listens in its container, by the name that others call it."""
_ALIASES = {"engine": "sim"}
_TEXTS = {".yml", ".yaml", ".conf", ".toml", ".json"}


def resolve(value: Any) -> Any:
    """Fill in `${NAME:-default}` as compose does where no variable is set."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: found[2], value)
    if isinstance(value, list):
        return [resolve(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve(item) for key, item in value.items()}
    return value


def load() -> dict[str, Any]:
    """Return the compose file with the defaults of its variables; a copy of your own."""
    return copy.deepcopy(_loaded())


@functools.cache
def _loaded() -> dict[str, Any]:
    loaded: dict[str, Any] = resolve(yaml.safe_load(FILE.read_text()))
    return loaded


def problems(text: str) -> list[str]:
    """Return what the compose specification has against a file."""
    schema = get_builtin_schema("vendor.compose-spec")
    found = validator_for(schema)(schema).iter_errors(yaml.safe_load(text))
    return [f"{error.json_path}: {error.message}" for error in found]


class Network:
    """Addresses of replicas: 127.X.Y.N, of this object alone.

    Ports are free ones, the same for every replica of a service, because a name that resolves to
    several addresses has one port; with `keep_ports` those of the compose file, for whoever has a
    network namespace of its own.
    """

    def __init__(self, *, keep_ports: bool = False) -> None:
        seed = os.urandom(2)
        self._net = f"127.{64 + seed[0] % 128}.{seed[1]}"
        self._numbers: dict[tuple[str, int], int] = {}
        self._ports: dict[int, int] = {}
        self._keep = keep_ports

    def host(self, service: str, number: int = 1) -> str:
        """Return the address of one replica."""
        place = self._numbers.setdefault((service, number), len(self._numbers) + 1)
        return f"{self._net}.{place}"

    def port(self, there: int) -> int:
        """Return the local port for one of a container."""
        if self._keep:
            return there
        if there not in self._ports:
            with socket.socket() as probe:
                probe.bind((self.host("", 0), 0))
                self._ports[there] = probe.getsockname()[1]
        return self._ports[there]


class Machine:
    """Runs services of the compose file as processes."""

    def __init__(
        self,
        services: Mapping[str, Any],
        folder: Path,
        vocabulary: Path,
        *,
        programs: Mapping[str, str] | None = None,
        network: Network | None = None,
    ) -> None:
        """Prepare `folder`; `programs` are the paths of servers that PyPI does not have."""
        self.services, self.folder = services, folder
        self.network = network or Network()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._programs = {"python": sys.executable, "valkey-server": server_binary()}
        self._programs |= programs or {}
        self._vocabulary = vocabulary
        (folder / "ops").symlink_to(ROOT / "ops")
        shutil.copy(ROOT / "ops" / "rollstream.toml", folder)

    # --- from there to here ----------------------------------------------------------------------
    def address(self, name: str, number: int = 1) -> str:
        """Return `host:port` of a replica, by the name that others call it."""
        host = self.network.host(_ALIASES.get(name, name), number)
        return f"{host}:{self.network.port(_PORTS[name])}"

    def here(self, text: str, service: str, number: int = 1) -> str:
        """Return text of one replica with addresses and paths of this machine."""
        for name, port in _PORTS.items():
            local = self.network.port(port)
            text = re.sub(rf"\b{name}:{port}\b", self.address(name), text)
            own = self.network.host(service, number)
            text = re.sub(rf"\b(?:127\.0\.0\.1|localhost):{port}\b", f"{own}:{local}", text)
            text = re.sub(rf"(=|^):{port}\b", rf"\g<1>{own}:{local}", text)
            text = text.replace(f"--port={port}", f"--port={local}")
        text = text.replace("--host=0.0.0.0", f"--host={self.network.host(service, number)}")
        places = self._places(service, number)
        # In one pass: a place here may well contain the name of another one there.
        paths = "|".join(re.escape(there) for there in sorted(places, key=len, reverse=True))
        return re.sub(rf"(?<![\w.])({paths})(?![\w.-])", lambda found: places[found[1]], text)

    def _places(self, service: str, number: int) -> dict[str, str]:
        """Return path in the container → place here, for whatever it mounts."""
        found = {"/models/qwen3/tokenizer.json": self._vocabulary}
        for volume in self.services[service].get("volumes", []):
            source, there = volume.split(":")[:2]
            if source.startswith("."):
                found[there] = self._copied(service, number, ROOT / source)
            else:
                found[there] = self.folder / "volumes" / source
                found[there].mkdir(parents=True, exist_ok=True)
        for memory in self.services[service].get("tmpfs", []):
            there = memory.split(":")[0]
            found[there] = self.folder / there.strip("/") / f"{service}-{number}"
            found[there].mkdir(parents=True, exist_ok=True)
        return {there: str(place) for there, place in found.items()}

    def _copied(self, service: str, number: int, source: Path) -> Path:
        return self.folder / "mounted" / f"{service}-{number}" / source.relative_to(ROOT)

    def mount(self, service: str, number: int = 1) -> None:
        """Copy what it mounts of this repository, with addresses and paths of this machine."""
        for volume in self.services[service].get("volumes", []):
            source = volume.split(":")[0]
            if not source.startswith("."):
                continue
            files = [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*")
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    self._copy(service, number, file)

    def _copy(self, service: str, number: int, file: Path) -> None:
        place = self._copied(service, number, file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix not in _TEXTS:
            shutil.copy(file, place)
            return
        text = self.here(file.read_text(), service, number)
        if file.name == "redis.conf":
            host, port = self.address(SERVER).split(":")
            text = text.replace("bind * -::*", f"bind {host}")
            text = text.replace("port 6379", f"port {port}")
        place.write_text(text)

    def environment(self, service: str, number: int = 1) -> dict[str, str]:
        """Return what `environment:` of a service is here, with the address that it listens on."""
        given = self.services[service].get("environment", {})
        ours = {key: self.here(value, service, number) for key, value in given.items()}
        if "ROLLSTREAM_RUN__NAME" in ours:
            host = self.network.host(service, number)
            ours["ROLLSTREAM_TELEMETRY__METRICS_HOST"] = host
            ours["ROLLSTREAM_TELEMETRY__METRICS_PORT"] = str(self.network.port(9400))
            ours["ROLLSTREAM_EXPORTER__HOST"] = host
            ours["ROLLSTREAM_EXPORTER__PORT"] = str(self.network.port(9401))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
        return clean | ours | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def words(self, service: str, words: Sequence[str], number: int = 1) -> list[str]:
        """Return a command of one replica as it is here."""
        local = [self.here(word, service, number) for word in words]
        local[0] = self._programs.get(words[0], local[0])
        return local

    def command(self, service: str, number: int = 1) -> list[str]:
        """Return the very command of a service."""
        given = self.services[service].get("command", [])
        words = [ENTRYPOINTS[service], *given] if service in ENTRYPOINTS else given
        if service == "secrets":  # the server's name and port are words of their own
            host, port = self.address(SERVER).split(":")
            words = [{SERVER: host, "6379": port}.get(word, word) for word in words]
        return self.words(service, words, number)

    # --- processes -------------------------------------------------------------------------------
    def start(self, service: str, number: int = 1, **environment: str) -> None:
        """Start one replica; its log is a file of its own."""
        self.mount(service, number)
        with (self.folder / f"{service}-{number}.log").open("ab") as log:
            self.processes[f"{service}-{number}"] = subprocess.Popen(
                self.command(service, number),
                cwd=self.folder,
                env=self.environment(service, number) | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def log(self, name: str) -> str:
        """Return the end of the log of `service-number`."""
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def running(self, name: str) -> bool:
        """Whether `service-number` has not ended."""
        return self.processes[name].poll() is None

    def ended(self, name: str, timeout_s: float) -> int:
        """Wait for the end of `service-number`; its exit code."""
        return self.processes[name].wait(timeout_s)

    def healthy(self, service: str, number: int = 1) -> bool:
        """Whether the very health check of a service passes."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD", f"{service}: a check in a shell cannot be run here"
        done = subprocess.run(
            self.words(service, words, number),
            cwd=self.folder,
            env=self.environment(service, number),
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def look(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run what `docker compose exec SERVICE rollstream COMMAND` runs."""
        return subprocess.run(
            [sys.executable, "-m", "rollstream.cli", *command],
            cwd=self.folder,
            env=self.environment(service),
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self) -> None:
        """End what runs, at once."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        """The URL that clients of the run read."""
        return (self.folder / "volumes" / "secrets" / "redis_url").read_text().strip()
