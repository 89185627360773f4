"""`python -m examples.mcp_tools`: a small run whose model calls the tool of an MCP server, offline.

Starts Valkey, the MCP server of `examples/mcp_server.py`, the simulated engine (a stand-in for a
model), the producer and one worker, and plays the trainer: each sample is printed with what its
tool was asked and what the model read. Everything ends with it. Exit code 0 where every sample came
and the tool was called.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
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

READY_S = 60.0
STALL_S = 120.0
SHOWN_CHARS = 100
EXIT_WRONG, EXIT_INTERRUPTED = 1, 130


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.mcp_tools", description=__doc__)
    parser.add_argument("--groups", type=int, default=3, metavar="N", help="prompts (default 3)")
    parser.add_argument("--n", type=int, default=2, metavar="N", help="samples of each (default 2)")
    options = parser.parse_args()
    if not VOCABULARY.exists():
        print("examples.mcp_tools: there is no vocabulary; run make setup", file=sys.stderr)
        return EXIT_WRONG
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-mcp-") as folder:
            return _run(options, Path(folder))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildFailed as error:
        print(f"examples.mcp_tools: {error}", file=sys.stderr)
        return EXIT_WRONG


def _run(options: argparse.Namespace, folder: Path) -> int:
    num_samples = num_calls = 0
    with (
        DevServer(aof=True) as redis,
        stack(redis.url, folder, groups=options.groups, n=options.n) as children,
        contextlib.ExitStack() as closing,
    ):
        children["producer"].start()
        stream = closing.enter_context(
            GroupStream.connect(redis.url, run="mcp", connect_timeout_s=READY_S, text=True)
        )
        for batch in stream.batches(groups=1, timeout_s=STALL_S):
            for group in batch.groups:
                num_samples += len(group.samples)
                num_calls += _show(group)
            batch.ack()
            if batch.number >= options.groups:
                break
    asked = options.groups * options.n
    print(f"{num_samples} of {asked} samples, {num_calls} calls of the server's tool")
    return 0 if num_samples == asked and num_calls else EXIT_WRONG


@contextlib.contextmanager
def stack(redis_url: str, folder: Path, *, groups: int, n: int) -> Iterator[dict[str, Child]]:
    """Start everything but the producer and the trainer; yields all processes by name."""
    source = f"reasoning_gym:gsm_symbolic?size={groups}&seed=1"
    engine, server, metrics = free_port(), free_port(), free_port()
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "mcp"},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(VOCABULARY)},
        "engine": {"kind": "sim", "urls": [f"http://127.0.0.1:{engine}"]},
        "producer": {"source": source, "n_samples_per_prompt": n, "progress": False},
        "mcp.arithmetic": {"url": f"http://127.0.0.1:{server}/mcp"},
        "tool.evaluate": {"timeout_s": 10.0},
        "worker": {
            "generate": "multi_turn",
            "tools": ["mcp:arithmetic"],
            "max_turns": 4,
            "drain_s": 0.0,
        },
        "aggregator": {"filters": [], "min_samples": 1},
        "reward": {"kind": "math"},
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": metrics},
    }
    config = folder / "rollstream.toml"
    config.write_text(to_toml(tables))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def child(name: str, module: str, *arguments: str, ready_url: str | None = None) -> Child:
        command = [sys.executable, "-m", module, *arguments]
        return Child(
            name, command, folder=folder, environment=environment, cwd=ROOT, ready_url=ready_url
        )

    children = [
        child(
            "mcp-server", "examples.mcp_server", "--port", str(server),
            ready_url=f"http://127.0.0.1:{server}/health",
        ),
        child(
            "sim", "worker.engines.sim", "--port", str(engine), "--tokenizer", str(VOCABULARY),
            "--answers", source, "--latency-median-s", "0.05",
            ready_url=f"http://127.0.0.1:{engine}/model_info",
        ),
        child(
            "worker", "worker", "--config", str(config),
            ready_url=f"http://127.0.0.1:{metrics}/readyz",
        ),
        child("producer", "producer", "--config", str(config)),
    ]  # fmt: skip
    try:
        for one in children[:-1]:
            one.start()
        for one in children[:-1]:
            one.wait_ready(READY_S)
        yield {one.name: one for one in children}
    finally:
        stop_all(children[::-1])


def _show(group: FinishedGroup) -> int:
    """Print a group's samples; return how many calls were made in them."""
    for missing in group.missing:
        print(
            f"group {group.group_index}, member {missing.member}: {missing.reason} {missing.error}"
        )
    num_calls = 0
    for trajectory in group.samples:
        for sample in trajectory if isinstance(trajectory, list) else [trajectory]:
            num_calls += _show_sample(sample)
    return num_calls


def _show_sample(sample: Sample) -> int:
    calls = sample.metadata.get("tool_calls", [])
    print(
        f"group {sample.group_index}, member {sample.member}: {sample.stop_reason}, "
        f"reward {sample.reward}, {sample.num_sampled} tokens sampled of {len(sample.tokens)}"
    )
    for call in calls:
        print(f"    {call['name']} {call['arguments']}{'' if call['executed'] else ' (not run)'}")
    if errors := sample.metadata.get("tool_errors"):
        print(f"    errors: {errors}")
    print(f"    … {' '.join(sample.response.split())[-SHOWN_CHARS:]}")
    return sum(call["executed"] for call in calls)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
