"""Who takes part in the demo: every process, what it is told, and when it counts as ready.

Owns the commands and the one configuration file that all of them read. Never decides when a
process is started or killed. Invariant: what the demo configures stands in that file, so it can be
read, changed and used again by hand.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.demo.options import NUM_WORKERS, ROOT, SAMPLES_A_GROUP, Options
from examples.devserver import free_port

FAULTS = {
    "503": 0.01,
    "reset": 0.005,
    "slow": 0.005,
    "length": 0.01,
    "abort": 0.01,
    "abort-code": 0.005,
    "nan": 0.002,
    "no-end": 0.01,
    "version-change": 0.05,
}
"""Shares of the stand-in's requests that go wrong; non-canonical splits are its policy's."""
ISOLATED_SHARE = 0.05
"""Of the samples, scored by math-verify in a process of its own."""
CAPACITY = 48
"""Groups that may be live at once."""


@dataclass(frozen=True)
class Cast:
    """The demo's processes; `sim` is None where the engine is somebody else's."""

    sim: Child | None
    producer: Child
    verifier: Child
    workers: list[Child]
    engines: tuple[str, ...]

    @property
    def everyone(self) -> list[Child]:
        """In the order in which they are stopped: who leases first, what they need last."""
        others = [self.producer, self.verifier]
        return [*self.workers, *others, *([self.sim] if self.sim else [])]


def assemble(options: Options, *, redis_url: str, run: str, folder: Path) -> Cast:
    """Write the configuration and return the processes, none of them started."""
    sim_port = free_port()
    engines = options.urls or (f"http://127.0.0.1:{sim_port}",)
    config = folder / "rollstream.toml"
    config.write_text(to_toml(tables(options, redis_url, run, engines, folder)))
    # What the shell says about a run must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def child(name: str, module: str, *arguments: str, ready_url: str | None = None) -> Child:
        return Child(
            name,
            [sys.executable, "-m", module, *arguments],
            folder=folder,
            environment=environment,
            cwd=ROOT,
            ready_url=ready_url,
        )

    def worker(number: int) -> Child:
        port = free_port()
        arguments = ("--config", str(config), "--telemetry.metrics_port", str(port))
        url = f"http://127.0.0.1:{port}/readyz"
        return child(f"worker-{number}", "worker", *arguments, ready_url=url)

    return Cast(
        sim=None if options.urls else child("sim", *sim_command(options, sim_port), ready_url=(
            f"http://127.0.0.1:{sim_port}/model_info")),
        producer=child("producer", "producer", "--config", str(config)),
        verifier=child("verifier", "worker.isolation.verifier", "--config", str(config)),
        workers=[worker(number) for number in range(1, NUM_WORKERS + 1)],
        engines=engines,
    )  # fmt: skip


def sim_command(options: Options, port: int) -> tuple[str, ...]:
    """Return module and arguments of the stand-in: the same answers as the prompts, and faults."""
    faults = [part for kind, rate in FAULTS.items() for part in (f"--fault-{kind}", str(rate))]
    return (
        "worker.engines.sim",
        *("--port", str(port), "--tokenizer", str(options.tokenizer)),
        *("--answers", options.source, "--seed", str(options.seed)),
        *faults,
    )


def tables(
    options: Options, redis_url: str, run: str, engines: tuple[str, ...], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process of the demo."""
    debug = {} if options.simulated else {"wire_dir": str(folder / "wire")}
    return {
        "run": {"name": run, "seed": options.seed},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(options.tokenizer), "renderer": options.renderer},
        "engine": {"kind": options.engine, "urls": list(engines)},
        "producer": {
            "source": options.source,
            "n_samples_per_prompt": SAMPLES_A_GROUP,
            "capacity_groups": CAPACITY,
        },
        "worker": {
            "concurrency": 96,
            "generate": "examples.demo_generate:generate",
            "tools": ["calculator"],
            "max_turns": 6,
            "lease_s": options.lease_s,
        },
        "reward": {"kind": "math", "isolated_share": ISOLATED_SHARE},
        "telemetry": {"metrics_host": "127.0.0.1"},
        "debug": debug,
    }


def to_toml(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of plain values as TOML (whose strings, lists and numbers are JSON's)."""
    lines = ["# Written by the demo. Use it by hand: python -m worker --config THIS"]
    for table, values in content.items():
        if values:
            lines += ["", f"[{table}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
