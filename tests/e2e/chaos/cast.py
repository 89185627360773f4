"""Everybody who takes part in a chaos run, what each is told, and the one configuration file.

Owns commands and configuration. Never starts or hurts anybody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child
from examples.devserver import free_port
from tests.e2e.chaos.actors import ProcessActor, TrainerActor
from tests.e2e.chaos.faults import CALM
from tests.e2e.chaos.options import (
    CAPACITY,
    LEASE_S,
    MAX_SENTENCES,
    NUM_AGGREGATORS,
    NUM_ENGINES,
    NUM_WORKERS,
    ROOT,
    SAMPLES_A_GROUP,
    VOCABULARY,
    Options,
)

RUN = "chaos"
MAX_STALENESS = 6
CLIENTS = (
    *("producer", "verifier", "trainer"),
    *(f"worker-{i + 1}" for i in range(NUM_WORKERS)),
    *(f"aggregator-{i + 1}" for i in range(NUM_AGGREGATORS)),
)
"""Who talks to Redis, each over a link of its own."""
ENGINE_FAULTS = {
    "503": 0.02,
    "reset": 0.02,
    "slow": 0.01,
    "length": 0.01,
    "abort": 0.015,
    "abort-code": 0.015,
    "nan": 0.01,
    "no-end": 0.01,
    "version-change": 0.03,
}
"""Shares of the engines' requests that go wrong."""


@dataclass(frozen=True)
class Cast:
    """The processes by role, and the engines' addresses."""

    engines: list[ProcessActor]
    producer: ProcessActor
    verifier: ProcessActor
    workers: list[ProcessActor]
    aggregators: list[ProcessActor]
    trainer: TrainerActor
    auditor: Child
    """Not under chaos: it is a witness."""

    @property
    def everyone(self) -> list[ProcessActor]:
        """In the order in which they are stopped: who leases first, what they need last."""
        mine = [*self.workers, *self.aggregators, self.producer, self.verifier]
        return [self.trainer, *mine, *self.engines]


def assemble(options: Options, folder: Path, ports: Mapping[str, int]) -> Cast:
    """Write the configuration and return the processes, none of them started.

    Args:
        options: of the command line.
        folder: for everything that is written.
        ports: of each client's link to Redis.
    """
    engine_ports = [free_port() for _ in range(NUM_ENGINES)]
    engines = [f"http://127.0.0.1:{port}" for port in engine_ports]
    rows, config = folder / "rows.jsonl", folder / "rollstream.toml"
    config.write_text(to_toml(tables(options, rows, engines)))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment = clean | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
        CALM: str(folder / "calm"),
    }

    def child(name: str, *command: str, ready_url: str | None = None) -> Child:
        return Child(
            name,
            [sys.executable, "-m", *command],
            folder=folder,
            environment=environment,
            cwd=ROOT,
            ready_url=ready_url,
        )

    def client(
        name: str, role: str, module: str, *arguments: str, ready: bytes = b""
    ) -> ProcessActor:
        where = ("--config", str(config), "--redis.url", f"redis://127.0.0.1:{ports[name]}")
        return ProcessActor(name, role, child(name, module, *where, *arguments), ready)

    def worker(name: str, role: str, kind: str) -> ProcessActor:
        own = ("--worker.role", kind, "--telemetry.metrics_port", "0")
        return client(name, role, "worker", *own, ready=b'"worker_ready"')

    def trainer(life: int) -> Child:
        url = f"redis://127.0.0.1:{ports['trainer']}"
        told = ("--url", url, "--run", RUN, "--folder", str(folder), "--life", str(life))
        named = [part for engine in engines for part in ("--engine", engine)]
        return child(f"trainer-{life}", "tests.e2e.chaos.trainer", *told, *named)

    def engine(number: int, port: int) -> ProcessActor:
        name, ready_url = f"engine-{number + 1}", f"{engines[number]}/model_info"
        command = engine_command(options, number, port, rows)
        return ProcessActor(name, "engine", child(name, *command, ready_url=ready_url))

    names = {kind: [n for n in CLIENTS if n.startswith(kind)] for kind in ("worker", "aggregator")}
    return Cast(
        engines=[engine(i, port) for i, port in enumerate(engine_ports)],
        producer=client("producer", "producer", "producer"),
        verifier=client("verifier", "verifier", "worker.isolation.verifier"),
        # One worker of all judges too: both ways of deployment in one run.
        workers=[
            worker(name, "worker", "all" if name == "worker-1" else "rollout")
            for name in names["worker"]
        ],
        aggregators=[worker(name, "aggregator", "aggregator") for name in names["aggregator"]],
        trainer=TrainerActor(trainer),
        auditor=child("auditor", "tests.e2e.chaos.auditing", str(folder), str(VOCABULARY),
                      f"jsonl:{rows}"),
    )  # fmt: skip


def engine_command(options: Options, number: int, port: int, rows: Path) -> tuple[str, ...]:
    """Return module and arguments of one stand-in for a model."""
    faults = [part for kind, rate in ENGINE_FAULTS.items() for part in (f"--fault-{kind}", rate)]
    return (
        "worker.engines.sim",
        *("--port", str(port), "--tokenizer", str(VOCABULARY), "--answers", f"jsonl:{rows}"),
        *(
            "--seed",
            str(options.seed * NUM_ENGINES + number),
            "--max-sentences",
            str(MAX_SENTENCES),
        ),
        *("--latency-median-s", "0.06"),
        *map(str, faults),
    )


def tables(options: Options, rows: Path, engines: list[str]) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process of the run."""
    return {
        "run": {"name": RUN, "seed": options.seed},
        "model": {"tokenizer": str(VOCABULARY)},
        "engine": {
            "urls": engines,
            "request_timeout_s": 2.0,
            "connect_timeout_s": 1.0,
            "retry_backoff_s": 0.05,
            "retry_backoff_max_s": 0.5,
            "abort_wait_s": 0.3,
            "probe_interval_s": 0.3,
        },
        "producer": {
            "source": f"jsonl:{rows}",
            "n_samples_per_prompt": SAMPLES_A_GROUP,
            "capacity_groups": CAPACITY,
        },
        "worker": {
            "concurrency": 16,
            "generate": "tests.e2e.chaos.faults:generate",
            "tools": ["calculator"],
            "max_turns": 4,
            "lease_s": LEASE_S,
            "sample_timeout_s": 3.0,
            "retry_delay_s": 0.1,
            "max_body_bytes": 300_000,
            "drain_s": 3.0,
        },
        "aggregator": {
            "filters": ["reward_nonzero_std"],
            "min_samples": SAMPLES_A_GROUP - 1,
            "group_timeout_s": 30.0,
        },
        "weights": {"max_staleness": MAX_STALENESS},
        "reward": {"kind": "math", "isolated_share": 0.1, "timeout_s": 2.0},
        "telemetry": {"metrics_host": "127.0.0.1"},
    }
