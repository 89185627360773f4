"""The whole stack: what `docker compose --profile sim --profile observability up` starts, here.

Owns the order of the start, the few values that differ from the compose file (`LOAD`, time made
shorter, no Grafana), and the end of everything. Never restarts a process by itself. Invariant: what
a test broke is known by name (`broken`), and `close` fails where a process that should run does not
or will not end.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import redis

from examples.demo.children import answers
from examples.devserver import die_with_parent
from rollstream.queue.blocking import BlockingQueue
from tests.ops.composed import SERVER, Machine, Network, load
from tests.ops.debian import tools

from . import shorter
from .monitor import Alertmanager, Prometheus, post
from .names import NameServer, resolving_by
from .trainer import CONNECTED, Pace

REPLICAS = {"sim": 2, "worker": 3}
NOT_HERE = {"grafana"}
"""Neither Debian nor PyPI has it; its dashboards' expressions are asked by the tests."""
READY = {"prometheus": "/-/ready", "alertmanager": "/-/ready", "redis_exporter": "/health"}
"""Where those answer whose images bring tools for their health checks that Debian has not."""
LOAD = {
    "ROLLSTREAM_PRODUCER__CAPACITY_GROUPS": "48",
    "ROLLSTREAM_WORKER__CONCURRENCY": "8",
    "ROLLSTREAM_WORKER__LEASE_S": "2",
    "ROLLSTREAM_AGGREGATOR__STOP_AFTER_DROPPED_BATCHES": "0",
    "ROLLSTREAM_TELEMETRY__RESCORE_FRACTION": "0.25",
    "ROLLSTREAM_EXPORTER__INTERVAL_S": "0.25",
}
"""What the processes are told beside the compose file's environment: a load for two cores, a lease
that expires within the patience of a test, and a rescore, without which nobody finds a lie."""
START_S, STOP_S, LOOK_S = 90.0, 60.0, 0.2
OPERATOR = "user operator on nopass ~* &* +@all\n"
"""Who changes the settings of a running server: no user of the compose file may."""


class Stack(Machine):
    """Every service as a process; `up` starts them, `close` ends them.

    Attributes:
        names: the DNS server by which Prometheus finds workers; None where this machine lets no
            process have a resolver of its own. Targets are written into its configuration then.
        broken: processes that a fault has ended or frozen, by name.
    """

    def __init__(self, folder: Path, vocabulary: Path) -> None:
        found = tools()
        programs = {
            name: str(getattr(found, name))
            for name in ("prometheus", "promtool", "amtool", "redis_exporter")
        }
        services = {name: one for name, one in load()["services"].items() if name not in NOT_HERE}
        programs["alertmanager"] = shorter.with_templates(found.alertmanager, folder)
        super().__init__(services, folder, vocabulary, programs=programs, network=Network())
        self.broken: set[str] = set()
        self.pace_file = folder / "pace.json"
        self.names = self._name_server()
        self.name_workers(REPLICAS["worker"])
        self.prometheus = Prometheus(self.address("prometheus"))
        self.alertmanager = Alertmanager(self.address("alertmanager"))

    def _name_server(self) -> NameServer | None:
        """Return a DNS server, where a process can be made to ask it."""
        try:
            server = NameServer(self.network.host("dns"))
        except PermissionError:
            return None
        if resolving_by(server, self.folder, ["true"]) is None:
            server.close()
            return None
        return server

    def name_workers(self, count: int) -> None:
        """Have the name of the workers mean the first so many of them."""
        if self.names is not None:
            hosts = [self.network.host("worker", number) for number in self.numbers("worker")]
            self.names.give("worker", hosts[:count])

    @staticmethod
    def numbers(service: str) -> range:
        """Return the numbers of a service's replicas."""
        return range(1, REPLICAS.get(service, 1) + 1)

    # --- what differs from the compose file ------------------------------------------------------
    def environment(self, service: str, number: int = 1) -> dict[str, str]:
        """Return the compose file's, and over it `LOAD` and both engines, as a user gives them."""
        given = super().environment(service, number)
        if "ROLLSTREAM_RUN__NAME" not in self.services[service].get("environment", {}):
            return given
        engines = ",".join(self.engine_urls())
        return given | LOAD | {"ROLLSTREAM_ENGINE__URLS": engines}

    def engine_urls(self) -> list[str]:
        """Return where the simulated engines are."""
        return [f"http://{self.address('engine', number)}" for number in self.numbers("sim")]

    def mount(self, service: str, number: int = 1) -> None:
        """Copy what it mounts, with time made shorter in what Prometheus and its like read."""
        super().mount(service, number)
        copies = (self.folder / "mounted" / f"{service}-{number}").rglob("*.y*ml")
        if service == "prometheus":
            for file in copies:
                shorter.prometheus(file, self.network.port, self._written_down())
        elif service == "alertmanager":
            for file in copies:
                shorter.alertmanager(file)
        elif service == SERVER:
            with (self.folder / "volumes" / "secrets" / "redis.acl").open("a") as users:
                users.write(OPERATOR)

    def _written_down(self) -> dict[str, list[str]]:
        """Return the targets of names that nobody can resolve here; none where DNS is asked."""
        if self.names is not None:
            return {}
        return {"worker": [self.address("worker", number) for number in self.numbers("worker")]}

    def command(self, service: str, number: int = 1) -> list[str]:
        """Return the very command; Prometheus asks the DNS server of this network."""
        words = super().command(service, number)
        if service == "prometheus" and self.names is not None:
            return resolving_by(self.names, self.folder, words) or words
        return words

    # --- start -----------------------------------------------------------------------------------
    def up(self) -> None:
        """Start everything in the order that `depends_on` asks for, then wait until it is well."""
        waiting = list(self.services)
        started: set[str] = set()
        while waiting:
            ready = [name for name in waiting if set(self.needs(name)) <= started]
            assert ready, f"services that wait for one another: {waiting}"
            for service in ready:
                for needed, condition in self.needs(service).items():
                    self._await(needed, condition)
                for number in self.numbers(service):
                    self.start(service, number)
            started |= set(ready)
            waiting = [name for name in waiting if name not in started]
        for service in self.services:
            self._await(service, "service_healthy")
        self.start_trainer()

    def needs(self, service: str) -> dict[str, str]:
        """Return what a service waits for, and for what of it."""
        given = self.services[service].get("depends_on", {})
        if isinstance(given, list):
            return dict.fromkeys(given, "service_started")
        return {name: one["condition"] for name, one in given.items() if name not in NOT_HERE}

    def _await(self, service: str, condition: str) -> None:
        if condition == "service_completed_successfully":
            assert self.ended(f"{service}-1", START_S) == 0, self.logs()
        elif condition == "service_healthy":
            for number in self.numbers(service):
                self.wait(lambda n=number: self.is_well(service, n), f"{service} is healthy")

    def is_well(self, service: str, number: int = 1) -> bool:
        """Whether it runs and its health check passes; the server's is asked without a shell."""
        if service == "secrets":
            return True
        if not self.running(f"{service}-{number}"):
            raise AssertionError(f"{service}-{number} ended\n{self.logs()}")
        if service == "redis":
            with self.operator() as server:
                try:
                    return bool(server.ping())
                except redis.RedisError:
                    return False
        if service in READY:
            return answers(f"http://{self.address(service)}{READY[service]}")
        return "healthcheck" not in self.services[service] or self.healthy(service, number)

    def start_trainer(self) -> None:
        """Start a trainer with what docs/deploy.md gives one."""
        Pace().write(self.pace_file)
        given = self.environment("worker")
        with (self.folder / "trainer-1.log").open("ab") as log:
            self.processes["trainer-1"] = subprocess.Popen(
                [sys.executable, "-m", "tests.ops.stack.trainer", str(self.pace_file)],
                cwd=self.folder,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self.wait(lambda: CONNECTED in self.log("trainer-1"), "the trainer is connected")

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.environment("worker")["ROLLSTREAM_RUN__NAME"]

    # --- faults ----------------------------------------------------------------------------------
    def pace(self, pace: Pace) -> None:
        """Have the trainer go at another pace."""
        pace.write(self.pace_file)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to `service-number`."""
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, and it stays down until `again`."""
        self.broken.add(name)
        self.processes[name].kill()
        self.processes[name].wait()

    def again(self, *names: str) -> None:
        """Start what was killed, and wait until it is well."""
        places = [
            (service, int(number)) for service, _, number in (n.rpartition("-") for n in names)
        ]
        for place in places:
            self.start(*place)
        self.broken -= set(names)
        for place in places:
            self.wait(lambda p=place: self.is_well(*p), f"{place} is healthy again")

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.broken.add(name)
        self.signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.signal(name, signal.SIGCONT)
        self.broken.discard(name)

    def engines(self, shares: Mapping[str, float]) -> None:
        """Have these shares of requests go wrong at every engine, and nothing else."""
        for url in self.engine_urls():
            post(f"{url}/sim/faults", shares)

    def restart_engines(self) -> None:
        """Have every engine lose what it works on."""
        for url in self.engine_urls():
            post(f"{url}/sim/restart", {})

    def operator(self) -> redis.Redis:
        """Return a client of the server that may change its settings."""
        host, port = self.address("redis").split(":")
        return redis.Redis(host, int(port), username="operator", password="any")

    def num_ready(self) -> int:
        """Return how many groups wait for the trainer."""
        queue = BlockingQueue.connect(self.url, self.run)
        try:
            return queue.depths()["ready"]
        finally:
            queue.close()

    # --- looking ---------------------------------------------------------------------------------
    def wait(self, holds: Any, claim: str, timeout_s: float = START_S) -> Any:
        """Wait until something holds, and return it.

        Raises:
            AssertionError: it does not; with the end of every process's log.
        """
        limit = time.monotonic() + timeout_s
        while not (value := holds()):
            if time.monotonic() > limit:
                raise AssertionError(f"not within {timeout_s:.0f} s: {claim}\n{self.logs()}")
            time.sleep(LOOK_S)
        return value

    def logs(self, chars: int = 1200) -> str:
        """Return the end of every process's log."""
        return "\n".join(
            f"--- {name} ({'runs' if self.running(name) else self.processes[name].returncode})\n"
            f"{self.log(name)[-chars:]}"
            for name in self.processes
        )

    # --- end -------------------------------------------------------------------------------------
    def close(self) -> None:
        """Ask everything to stop, in order; what does not run or does not end is a failure."""
        try:
            gone = [n for n in self.processes if n != "secrets-1" and not self.running(n)]
            codes = self._ask_to_stop()
            text = self.logs()
        finally:
            self.stop()
        with contextlib.suppress(AssertionError):
            self.wait(lambda: not list(self.left_running()), "all have ended", STOP_S)
        left = list(self.left_running())
        assert not left, f"still running: {left}"
        assert not gone, f"ended by themselves: {gone}\n{text}"
        assert not self.broken, f"faults that nobody mended: {self.broken}"
        assert set(codes.values()) == {0}, f"exit codes {codes}\n{text}"

    def stop(self) -> None:
        """End what runs, at once."""
        super().stop()
        if self.names is not None:
            self.names.close()
            self.names = None

    def left_running(self) -> Iterator[tuple[int, str]]:
        """Yield (pid, command) of every process that runs in the folder, whoever started it."""
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (place / "cwd").readlink().is_relative_to(self.folder):
                    yield int(place.name), (place / "cmdline").read_bytes().decode(errors="replace")

    def _ask_to_stop(self) -> dict[str, int]:
        """Return the exit codes of all; whoever needs others ends before them."""
        codes: dict[str, int] = {}
        server = f"{SERVER}-1"
        needed = [name for name in self.processes if name.startswith(("sim-", "verifier-"))]
        trainer = "trainer-1"
        others = [name for name in self.processes if name not in (trainer, server, *needed)]
        for wave in ([trainer], others, needed, [server]):
            for name in wave:
                if name in self.broken:
                    self.signal(name, signal.SIGCONT)
                self.processes[name].terminate()
            codes |= {name: self._ended_or_killed(name) for name in wave}
        return codes

    def _ended_or_killed(self, name: str) -> int:
        try:
            code = self.ended(name, STOP_S)
        except subprocess.TimeoutExpired:
            self.processes[name].kill()
            return self.processes[name].wait()
        # Those of others may simply die of the signal.
        return 0 if code == -signal.SIGTERM and name.rpartition("-")[0] in READY else code
