"""Every process of a scene, and what each is told.

Owns commands and configuration. Never starts or kills anybody. Invariant: nothing in this
configuration ends a group but training and staleness: no filter, no deadline.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child
from examples.devserver import free_port
from tests.e2e.weights import rollout, scenes
from tests.e2e.weights.scenes import ROOT, VOCABULARY, Protocol, Scene
from tests.e2e.weights.truth import POLICY

WORKER_READY = '"worker_ready"'
"""What a worker logs once it leases."""
DRAIN_S = 0.3
LATENCY_S = 0.03
"""Of the engines: a reply takes a few tenths of a second, so that most updates meet one."""


@dataclass(frozen=True)
class Cast:
    """The processes, none of them started."""

    engines: list[Child]
    urls: list[str]
    producer: Child
    workers: list[Child]

    @property
    def everyone(self) -> list[Child]:
        """In the order in which they are stopped."""
        return [*self.workers, self.producer, *self.engines]


def assemble(
    scene: Scene, folder: Path, redis_url: str, seed: int, sources: tuple[Path, Path],
    damage: str = "",
) -> Cast:  # fmt: skip
    """Write the configuration; return the processes.

    Args:
        scene: what this is about.
        folder: for everything that is written.
        redis_url: of the server.
        seed: of the run.
        sources: what the producer reads, and what the engines answer from.
        damage: of the worker's generate function; none is none.
    """
    source, answers = sources
    ports = [free_port() for _ in range(scenes.NUM_ENGINES)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    config = folder / "rollstream.toml"
    config.write_text(to_toml(tables(scene, redis_url, urls, source, seed)))
    # What the shell says about a run must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {
        "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT),
        rollout.FOLDER: str(folder), rollout.DAMAGE: damage,
    }  # fmt: skip

    def child(name: str, *command: str, ready_url: str | None = None) -> Child:
        return Child(
            name, [sys.executable, "-m", *command], folder=folder, environment=environment,
            cwd=ROOT, ready_url=ready_url,
        )  # fmt: skip

    def engine(number: int) -> Child:
        notes = folder / f"engine-{number}.jsonl"
        flags = [
            part
            for name, value in POLICY.to_dict().items()
            for part in ("--" + name.replace("_", "-"), str(value))
        ]
        return child(
            f"engine-{number}", "tests.e2e.weights.engine", str(notes),
            *("--port", str(ports[number]), "--tokenizer", str(VOCABULARY)),
            *("--answers", f"jsonl:{answers}", "--seed", str(seed + number)),
            *("--latency-median-s", str(LATENCY_S), "--token-s", str(scenes.TOKEN_S)),
            "--versioned-log-probs",
            *(("--logprobs-mode", "processed") if scene.protocol is Protocol.VLLM else ()),
            *flags,
            ready_url=f"{urls[number]}/model_info",
        )  # fmt: skip

    return Cast(
        engines=[engine(number) for number in range(scenes.NUM_ENGINES)],
        urls=urls,
        producer=child("producer", "producer", "--config", str(config)),
        workers=[
            child(f"worker-{number}", "worker", "--config", str(config))
            for number in range(1, scenes.NUM_WORKERS + 1)
        ],
    )


def tables(
    scene: Scene, redis_url: str, urls: list[str], source: Path, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process of a scene."""
    weights: dict[str, Any] = {
        "mode": scene.weights_mode,
        "max_staleness": scene.max_staleness,
        "on_stale": scene.on_stale,
        "partial": scene.partial,
        "mask_offpolicy": scene.mask_offpolicy,
    }
    if scene.weights_mode != "async":
        weights["groups_per_step"] = scenes.GROUPS_A_BATCH
    return {
        "run": {"name": scene.name, "seed": seed},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(VOCABULARY), "max_context_tokens": scenes.MAX_CONTEXT},
        "engine": {
            "kind": "vllm" if scene.protocol is Protocol.VLLM else "sim",
            "urls": urls,
            "probe_interval_s": 0.5,
        },
        "sampling": {
            "max_new_tokens": scenes.MAX_NEW_TOKENS,
            "max_response_tokens": scenes.MAX_RESPONSE,
        },
        "producer": {
            "source": f"jsonl:{source}",
            "n_samples_per_prompt": scenes.SAMPLES_A_GROUP,
            "capacity_groups": scenes.CAPACITY,
            "progress": False,
        },
        "worker": {
            "generate": "tests.e2e.weights.rollout:generate",
            "tools": ["tests.e2e.weights.rollout:compute"],
            "max_turns": scenes.MAX_TURNS,
            "concurrency": scenes.CONCURRENCY,
            "lease_s": scenes.LEASE_S,
            "submission": scene.submission,
            # Shorter than a sample: some are stopped half-way when a worker is asked to end.
            "drain_s": DRAIN_S,
        },
        "weights": weights,
        "reward": {"kind": "deterministic_random"},
        "aggregator": {"filters": []},
        # Any port: one that was free a moment ago may be another program's by now.
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": 0},
    }
