"""Every process of a scene, and what each is told.

Owns commands and configuration. Never starts or kills anybody. Invariant: nothing in this
configuration ends a group but training: no filter, no staleness, no deadline.
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
from tests.e2e.agents import scenes
from tests.e2e.agents.scenes import ROOT, VOCABULARY, Protocol, Scene
from tests.e2e.chaos.rows import answer_of, question_of
from worker.engines.sim.script import PolicyConfig

POLICY = PolicyConfig(max_sentences=3, split_rate=0.05, malformed_rate=0.05, again_rate=0.4)
"""Of the engines, and of who computes again what they sampled."""
FAULTS = {
    "503": 0.01, "reset": 0.005, "half-body": 0.01, "slow": 0.02, "abort": 0.008, "length": 0.004,
}  # fmt: skip
"""Of the engines: shares of requests. Half a body is half a stream: nothing can be tried again."""
SLOW_FACTOR = 8.0


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


def write_rows(folder: Path, scene: Scene) -> Path:
    """Write what the producer reads and the engines answer from."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for row in range(scene.groups):
            prompt = [{"role": "user", "content": question_of(row)}]
            whole = {"prompt": prompt, "label": answer_of(row), "metadata": {"row": row}}
            file.write(json.dumps(whole) + "\n")
    return path


def assemble(
    scene: Scene, folder: Path, redis_url: str, seed: int, *, agent_name: str = "run",
    quiet: tuple[str, ...] = (), num_engines: int = scenes.NUM_ENGINES,
    num_workers: int = scenes.NUM_WORKERS, concurrency: int = scenes.CONCURRENCY,
) -> Cast:  # fmt: skip
    """Write the configuration; return the processes.

    Args:
        scene: what this is about.
        folder: for everything that is written.
        redis_url: of the server.
        seed: of the run, of plans and of faults.
        agent_name: in `agent.py`'s folder, `run` or a module and a name.
        quiet: arguments of the engines in place of latencies and faults.
        num_engines: how many.
        num_workers: how many.
        concurrency: samples in flight at each worker.
    """
    source = write_rows(folder, scene)
    ports = [free_port() for _ in range(num_engines)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    config = folder / "rollstream.toml"
    settings = tables(scene, redis_url, urls, source, seed, agent_name)
    settings["worker"]["concurrency"] = concurrency
    config.write_text(to_toml(settings))
    # What the shell says about a run must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {
        "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT),
        scenes.FOLDER: str(folder), scenes.SEED: str(seed),
        scenes.TREE: "1" if scene.kind == "tree" else "",
    }  # fmt: skip

    def child(name: str, *command: str, ready_url: str | None = None) -> Child:
        return Child(
            name, [sys.executable, "-m", *command], folder=folder, environment=environment,
            cwd=ROOT, ready_url=ready_url,
        )  # fmt: skip

    def engine(number: int) -> Child:
        return child(
            f"engine-{number}", "tests.e2e.agents.engine", str(folder / f"engine-{number}.jsonl"),
            *("--port", str(ports[number]), "--tokenizer", str(VOCABULARY)),
            *("--answers", f"jsonl:{source}", "--seed", str(seed + number)),
            *(quiet or disturbances()),
            *(("--logprobs-mode", "processed") if scene.protocol is Protocol.VLLM else ()),
            *flags(POLICY.to_dict()),
            ready_url=f"{urls[number]}/model_info",
        )  # fmt: skip

    return Cast(
        engines=[engine(number) for number in range(num_engines)],
        urls=urls,
        producer=child("producer", "producer", "--config", str(config)),
        workers=[
            child(f"worker-{number}", "worker", "--config", str(config))
            for number in range(1, num_workers + 1)
        ],
    )


def flags(values: dict[str, Any]) -> list[str]:
    """Return arguments of the simulated engine."""
    return [
        part
        for name, value in values.items()
        for part in ("--" + name.replace("_", "-"), str(value))
    ]


def disturbances() -> list[str]:
    """Return latencies and faults."""
    return flags(
        {
            "latency_median_s": scenes.LATENCY_S,
            "token_s": scenes.TOKEN_S,
            "slow_factor": SLOW_FACTOR,
            **{f"fault-{name}": share for name, share in FAULTS.items()},
        }
    )


def tables(
    scene: Scene, redis_url: str, urls: list[str], source: Path, seed: int, agent_name: str
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process of a scene."""
    policy = "picker" if scene.kind == "tree" else "on_divergence"
    file, _, name = agent_name.rpartition(":")
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
            "capacity_groups": max(scene.groups, 2 * scenes.GROUPS_A_BATCH),
            "progress": False,
        },
        "worker": {
            "generate": "agent",
            "agent": f"{Path(__file__).with_name(file or 'agent.py')}:{name}",
            "lease_s": scenes.LEASE_S,
            "drain_s": 0.3,
        },
        "gateway": {"port": 0, "session": scene.kind, policy: scene.policy},
        "weights": {"partial": scene.partial},
        "reward": {"kind": "deterministic_random"},
        "aggregator": {"filters": []},
        # Any port: one that was free a moment ago may be another program's by now.
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": 0},
    }
