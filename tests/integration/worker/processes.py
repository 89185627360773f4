"""Real worker processes and the real simulated engine, for tests of the whole worker."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.devserver import die_with_parent, free_port

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")} | {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
}


def start(*command: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m …`; it dies with this process, and what it says goes to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            (sys.executable, "-m", *command),
            stdout=out,
            stderr=out,
            env=ENVIRONMENT,
            cwd=ROOT,
            preexec_fn=die_with_parent,
        )


def wait_for_url(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `url` answers 200.

    Raises:
        AssertionError: the process ended, or did not answer in time.
    """
    limit = time.monotonic() + 45
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.02)
    raise AssertionError(f"{url} did not answer: {log.read_text()}")


class Sim:
    """The simulated engine on a port of its own, which it keeps through a restart."""

    def __init__(
        self, folder: Path, vocabulary: Path, latency_s: float = 0.25, options: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._vocabulary, self._log = vocabulary, folder / "sim.log"
        self._latency_s, self._options = latency_s, tuple(options)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = start(
            "worker.engines.sim",
            *("--port", str(self.port), "--tokenizer", str(self._vocabulary)),
            *("--latency-median-s", str(self._latency_s), "--latency-sigma", "0.3"),
            *self._options,
            log=self._log,
        )
        wait_for_url(f"{self.url}/model_info", self.process, self._log)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class WorkerProcess:
    """One `python -m worker`."""

    def __init__(self, folder: Path, number: int, options: dict[str, str]) -> None:
        self.port = free_port()
        self.log = folder / f"worker-{number}.log"
        given = options | {
            "telemetry.metrics_port": str(self.port),
            "telemetry.metrics_host": "127.0.0.1",
        }
        flags = [part for key, value in given.items() for part in (f"--{key}", value)]
        self.process = start("worker", *flags, log=self.log)

    def wait_ready(self) -> None:
        """Wait until `/readyz` says so."""
        wait_for_url(f"http://127.0.0.1:{self.port}/readyz", self.process, self.log)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of one of its pages."""
        request = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def events(self) -> list[dict[str, Any]]:
        """Return what it logged."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def workers(
    folder: Path, count: int, options: dict[str, str], *, ready: bool = True
) -> Iterator[list[WorkerProcess]]:
    """Run worker processes, and kill what is left of them."""
    running = [WorkerProcess(folder, number, options) for number in range(count)]
    try:
        if ready:
            for one in running:
                one.wait_ready()
        yield running
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
