"""Every process around the trainer, and what it is told.

Owns the configuration file, the rows, and the commands. Never kills anything. Invariant: nothing
in this configuration ends a prompt but training: no filter, no deadline, no budget of attempts or
crashes, so whatever is missing at the end was skipped.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child
from examples.devserver import free_port
from tests.e2e.resume.options import ROOT, VOCABULARY, Options
from tests.e2e.resume.trainer import Task

RUN = "resume"
CAPACITY = 24
"""Groups that may be live at once: small against the prompts, so that the producer scans."""
SAMPLES_A_PROMPT = 2
UNBOUNDED = 1_000_000


@dataclass(frozen=True)
class Cast:
    """The processes that are started again as they were."""

    sim: Child
    producer: Child
    workers: list[Child]

    @property
    def everyone(self) -> list[Child]:
        """In the order in which they are stopped."""
        return [*self.workers, self.producer, self.sim]


def assemble(options: Options, redis_url: str, folder: Path) -> Cast:
    """Write rows and configuration; return the processes, none of them started."""
    rows = folder / "prompts.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"What is {i} plus {i}?", "label": str(2 * i)}) + "\n"
            for i in range(options.prompts // options.epochs)
        )
    )
    port = free_port()
    config = folder / "rollstream.toml"
    config.write_text(to_toml(_tables(options, redis_url, rows, f"http://127.0.0.1:{port}")))
    told = ("--config", str(config))

    return Cast(
        sim=_child(
            folder,
            "sim",
            "worker.engines.sim",
            *("--port", str(port), "--tokenizer", str(VOCABULARY), "--answers", f"jsonl:{rows}"),
            *("--latency-median-s", "0.03", "--seed", str(options.seed)),
            ready_url=f"http://127.0.0.1:{port}/model_info",
        ),
        producer=_child(folder, "producer", "producer", *told),
        workers=[
            _child(folder, f"worker-{number}", "worker", *told)
            for number in range(1, options.workers + 1)
        ],
    )


def trainer(
    redis_url: str, folder: Path, generation: int, start: str, fate: dict[str, Any] | None
) -> Child:
    """Return one trainer process; each is another one, because it starts from elsewhere."""
    task = Task(
        url=redis_url, run=RUN, folder=str(folder), generation=generation, start=start,
        groups=4, save_every=3, step_s=0.06, fate=fate,
    )  # fmt: skip
    return _child(folder, "trainer", "tests.e2e.resume.trainer", task.to_json())


def _tables(options: Options, url: str, rows: Path, engine: str) -> dict[str, dict[str, Any]]:
    return {
        "run": {"name": RUN, "seed": options.seed},
        "redis": {"url": url},
        "model": {"tokenizer": str(VOCABULARY)},
        "engine": {"kind": "sim", "urls": [engine]},
        "sampling": {"max_new_tokens": 24},
        "producer": {
            "source": f"jsonl:{rows}",
            "epochs": options.epochs,
            "shuffle_seed": options.seed,
            "n_samples_per_prompt": SAMPLES_A_PROMPT,
            "capacity_groups": CAPACITY,
            "progress": False,
        },
        "worker": {
            "generate": "single_turn",
            "concurrency": 32,
            "lease_s": 1.0,
            "max_attempts": UNBOUNDED,
            "max_crashes": UNBOUNDED,
        },
        "reward": {"kind": "none"},
        "aggregator": {"filters": []},
        # Any port: one that was free a moment ago may be another program's by now.
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": 0},
    }


def _child(
    folder: Path, name: str, module: str, *arguments: str, ready_url: str | None = None
) -> Child:
    # What the shell says about a run must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    return Child(
        name,
        [sys.executable, "-m", module, *arguments],
        folder=folder,
        environment=environment | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        ready_url=ready_url,
    )
