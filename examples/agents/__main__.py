"""`python -m examples.agents [NAME]`: one of the agents, offline, against the real stack.

Starts Valkey, the simulated engine (a stand-in for a model), the producer and one worker whose
gateway the agent calls, and plays the trainer: each sample is printed in a few lines. Everything
ends with it. Exit code 0 where every sample was there and none of an infrastructure's faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child, ChildFailed, stop_all
from examples.demo.options import ROOT, VOCABULARY
from examples.devserver import DevServer, free_port
from rollstream import GroupStream
from rollstream.group import FinishedGroup
from rollstream.sample import Sample

AGENTS = ("openai_sdk", "anthropic_sdk", "openai_agents", "mini_swe")
READY_S = 60.0
STALL_S = 120.0
SHOWN_CHARS = 100
EXIT_WRONG, EXIT_INTERRUPTED = 1, 130


def main() -> int:
    """Run one agent; return the exit code."""
    options = _options()
    if not VOCABULARY.exists():
        print("examples.agents: there is no vocabulary; run make setup", file=sys.stderr)
        return EXIT_WRONG
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-agents-") as folder:
            return _run(options, Path(folder))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildFailed as error:
        print(f"examples.agents: {error}", file=sys.stderr)
        return EXIT_WRONG


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.agents", description=__doc__)
    parser.add_argument("agent", nargs="?", default=AGENTS[0], choices=AGENTS)
    parser.add_argument("--groups", type=int, default=2, metavar="N", help="prompts (default 2)")
    parser.add_argument("--n", type=int, default=2, metavar="N", help="samples of each (default 2)")
    parser.add_argument("--session", default="linear", choices=("linear", "tree"))
    return parser.parse_args()


def _run(options: argparse.Namespace, folder: Path) -> int:
    seen = 0
    with (
        DevServer(aof=True) as server,
        _stack(options, server.url, folder) as run,
        GroupStream.connect(server.url, run=run, connect_timeout_s=READY_S, text=True) as stream,
    ):
        for batch in stream.batches(groups=1, timeout_s=STALL_S):
            for group in batch.groups:
                seen += _show(group)
            batch.ack()
            if batch.number >= options.groups:
                break
        asked = options.groups * options.n
        print(f"{seen} of {asked} samples")
        if seen < asked:  # what became of groups without a usable sample
            show = ["-m", "rollstream.cli", "show", "--redis", server.url, "--run", run]
            subprocess.run([sys.executable, *show], cwd=ROOT, check=False)
            lines = (folder / "worker.log").read_text().splitlines()
            print("\n".join(lines))
    return 0 if seen == asked else EXIT_WRONG


@contextlib.contextmanager
def _stack(options: argparse.Namespace, redis_url: str, folder: Path) -> Iterator[str]:
    """Start everything beside the trainer; yields the run's name."""
    source = f"reasoning_gym:gsm_symbolic?size={options.groups}&seed=1"
    engine, metrics = free_port(), free_port()
    config = folder / "rollstream.toml"
    config.write_text(to_toml(_tables(options, redis_url, source, engine, metrics)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def child(name: str, module: str, *arguments: str, ready_url: str | None = None) -> Child:
        command = [sys.executable, "-m", module, *arguments]
        return Child(
            name, command, folder=folder, environment=environment, cwd=ROOT, ready_url=ready_url
        )

    sim = child(
        "sim", "worker.engines.sim", "--port", str(engine), "--tokenizer", str(VOCABULARY),
        "--answers", source, "--latency-median-s", "0.05",
        ready_url=f"http://127.0.0.1:{engine}/model_info",
    )  # fmt: skip
    ready_url = f"http://127.0.0.1:{metrics}/readyz"
    worker = child("worker", "worker", "--config", str(config), ready_url=ready_url)
    producer = child("producer", "producer", "--config", str(config))
    children = [worker, producer, sim]
    try:
        for one in reversed(children):
            one.start()
        for one in children:
            one.wait_ready(READY_S)
        yield "agents"
    finally:
        stop_all(children)


def _tables(
    options: argparse.Namespace, redis_url: str, source: str, engine: int, metrics: int
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"name": "agents"},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(VOCABULARY)},
        "engine": {"kind": "sim", "urls": [f"http://127.0.0.1:{engine}"]},
        "producer": {"source": source, "n_samples_per_prompt": options.n, "progress": False},
        "worker": {
            "generate": "agent",
            "agent": f"examples.agents.{options.agent}:run",
            "drain_s": 0.0,
        },
        "gateway": {"port": 0, "session": options.session},
        "aggregator": {"filters": [], "min_samples": 1},
        "reward": {"kind": "math"},
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": metrics},
    }


def _show(group: FinishedGroup) -> int:
    """Print a group's samples; return how many members are there."""
    for missing in group.missing:
        print(
            f"group {group.group_index}, member {missing.member}: {missing.reason} {missing.error}"
        )
    for trajectory in group.samples:
        for sample in trajectory if isinstance(trajectory, list) else [trajectory]:
            _show_sample(sample)
    return len(group.samples)


def _show_sample(sample: Sample) -> None:
    agent = sample.metadata.get("agent", {})
    told = {k: v for k, v in sample.metadata.items() if k in ("turns", "steps", "handed_in")}
    print(
        f"group {sample.group_index}, member {sample.member}: {sample.status.value} "
        f"({sample.stop_reason}), reward {sample.reward}, {len(sample.calls)} calls, "
        f"{sample.num_sampled} tokens sampled of {len(sample.tokens)}, "
        f"{agent.get('dropped_tokens', 0)} dropped, the agent says {told}"
    )
    text = " ".join(sample.response.split())
    print(f"    … {text[-SHOWN_CHARS:]}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
