"""A small run on this machine, offline: what the examples have in common.

Owns the processes beside the trainer (Valkey, the simulated engine, producer, one worker, a
verifier where it is asked for) and the trainer's loop. Never knows what an example shows: it is
given tables and what to do with each group. Invariant: everything that was started ends with it,
however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
EXIT_WRONG, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class SmallRun:
    """What is run.

    Attributes:
        name: of the run and of the example.
        tables: of the configuration, beside what every small run has.
        answers: what the simulated engine answers from, as in its `--answers`.
        groups: prompts.
        n: samples of each.
        verifier: start one beside the worker.
        engine: further options of the simulated engine.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    answers: str
    groups: int
    n: int
    verifier: bool = False
    engine: tuple[str, ...] = ()


def play(run: SmallRun, show: Callable[[FinishedGroup], None]) -> int:
    """Run it, and give every group to `show`; return the exit code.

    0 where every sample came, 1 where some are missing: then what became of them is printed.
    """
    if not VOCABULARY.exists():
        print(f"examples.{run.name}: there is no vocabulary; run make setup", file=sys.stderr)
        return EXIT_WRONG
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-example-") as folder:
            return _play(run, show, Path(folder))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildFailed as error:
        print(f"examples.{run.name}: {error}", file=sys.stderr)
        return EXIT_WRONG


def samples_of(group: FinishedGroup) -> list[Sample]:
    """Return the samples of a group, after a line for each that is missing."""
    for missing in group.missing:
        print(
            f"group {group.group_index}, member {missing.member}: {missing.reason} {missing.error}"
        )
    return group.flat()


def _play(run: SmallRun, show: Callable[[FinishedGroup], None], folder: Path) -> int:
    seen = 0
    with (
        DevServer(aof=True) as redis,
        stack(run, redis.url, folder),
        GroupStream.connect(
            redis.url, run=run.name, connect_timeout_s=READY_S, text=True
        ) as stream,
    ):
        for batch in stream.batches(groups=1, timeout_s=STALL_S):
            for group in batch.groups:
                seen += len(group.samples)
                show(group)
            batch.ack()
        asked = run.groups * run.n
        print(f"{seen} of {asked} samples")
        if seen < asked:
            command = ["-m", "rollstream.cli", "show", "--redis", redis.url, "--run", run.name]
            subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
            print((folder / "worker.log").read_text())
    return 0 if seen == asked else EXIT_WRONG


@contextlib.contextmanager
def stack(run: SmallRun, redis_url: str, folder: Path) -> Iterator[dict[str, Child]]:
    """Start everything beside the trainer; yield the processes by what they are called."""
    engine, metrics = free_port(), free_port()
    config = folder / "rollstream.toml"
    config.write_text(to_toml(_tables(run, redis_url, engine, metrics)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}

    def child(module: str, *arguments: str, ready_url: str | None = None) -> Child:
        command = [sys.executable, "-m", module, *arguments]
        name = module.rpartition(".")[2]
        return Child(
            name, command, folder=folder, environment=environment, cwd=ROOT, ready_url=ready_url
        )

    told = ("--config", str(config))
    sim = child(
        "worker.engines.sim", "--port", str(engine), "--tokenizer", str(VOCABULARY),
        "--answers", run.answers, "--latency-median-s", "0.05", *run.engine,
        ready_url=f"http://127.0.0.1:{engine}/model_info",
    )  # fmt: skip
    worker = child("worker", *told, ready_url=f"http://127.0.0.1:{metrics}/readyz")
    others = [child("worker.isolation.verifier", *told)] if run.verifier else []
    children = [sim, *others, child("producer", *told), worker]
    try:
        sim.start()
        sim.wait_ready(READY_S)  # a worker asks a few seconds for its engine, then gives up
        for one in children[1:]:
            one.start()
        for one in children[1:]:
            one.wait_ready(READY_S)
        yield {one.name: one for one in children}
    finally:
        stop_all(children[::-1])


def _tables(
    run: SmallRun, redis_url: str, engine: int, metrics: int
) -> dict[str, Mapping[str, Any]]:
    common: dict[str, Mapping[str, Any]] = {
        "run": {"name": run.name},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(VOCABULARY)},
        "engine": {"kind": "sim", "urls": [f"http://127.0.0.1:{engine}"]},
        "producer": {"n_samples_per_prompt": run.n, "progress": False},
        "worker": {"drain_s": 0.0},
        "aggregator": {"filters": [], "min_samples": 1},
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": metrics},
    }
    return common | {table: {**common.get(table, {}), **v} for table, v in run.tables.items()}


def end_on_sigterm() -> None:
    """Make SIGTERM what Ctrl-C is, so that every process is ended."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
