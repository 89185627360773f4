"""A small run of real processes whose sinks can be broken, and what a trainer got of it.

Every run has the same rows and the same seed, so what is sampled is the same, token for token: a
broken sink that loses or changes one is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from examples.devserver import die_with_parent, free_port
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.sample import Sample
from rollstream.stream import GroupStream
from tests.integration.worker.processes import ENVIRONMENT, ROOT, wait_for_url

GROUPS, N = 8, 4
NOISY = ("--telemetry.log_level", "debug")


@dataclass
class Stage:
    """One run: its server, engine and folder."""

    redis_url: str
    run: str
    engine_url: str
    vocabulary: Path
    folder: Path
    metrics_port: int = field(default_factory=free_port)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def start(
        self,
        module: str,
        *more: str,
        stderr: IO[bytes] | int,
        shell: str = 'exec "$@"',
        file_bytes: int = 0,
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            module: of `python -m`.
            more: flags beside what all have.
            stderr: its standard error.
            shell: what starts it: with `2>&-` it has none.
            file_bytes: no file that it writes may be larger; 0 is any.
        """
        rows = self.folder / "rows.jsonl"
        if not rows.exists():
            prompts = [{"prompt": f"What is {i} + 1?", "label": str(i + 1)} for i in range(GROUPS)]
            rows.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        flags = {
            "redis.url": self.redis_url, "run.name": self.run, "run.seed": "7",
            "producer.source": f"jsonl:{rows}", "producer.n_samples_per_prompt": str(N),
            "producer.progress": "false", "model.tokenizer": str(self.vocabulary),
            "engine.kind": "sim", "engine.urls": self.engine_url, "reward.kind": "none",
            "telemetry.metrics_host": "127.0.0.1", "telemetry.metrics_port": str(self.metrics_port),
        }  # fmt: skip
        told = [part for name, value in flags.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", module, *told, *more]

        def prepare() -> None:
            die_with_parent()
            if file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *command], stdout=subprocess.DEVNULL, stderr=stderr,
            env=ENVIRONMENT, cwd=ROOT, preexec_fn=prepare,
        )  # fmt: skip
        self.running.append(process)
        return process

    def wait_ready(self, worker: subprocess.Popen[bytes]) -> None:
        wait_for_url(f"http://127.0.0.1:{self.metrics_port}/readyz", worker, self.folder / "log")

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """Ask a process to end; its exit code."""
        process.terminate()
        return process.wait(30)

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def digest(sample: Sample) -> str:
    """Everything of a sample that its sinks have no say in."""
    assert sample.rollout_log_probs is not None
    log_probs = sample.rollout_log_probs.tolist()
    kept = (sample.tokens.tolist(), sample.status.value, sample.num_sampled, log_probs)
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def train(stream: GroupStream) -> dict[int, list[str]]:
    """Train on everything; return what came, by group."""
    found: dict[int, list[str]] = {}
    for batch in stream.batches(groups=3, timeout_s=60.0):
        for group in batch:
            assert group.group_index not in found, "no group twice"
            assert group.missing == []
            found[group.group_index] = [digest(sample) for sample in group.flat()]
        batch.ack()
    return found


def figures(page: str) -> dict[str, float]:
    """Return the samples of an exposition page by name and labels."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def audited(stage: Stage) -> tuple[int, int]:
    """Return (enqueued, acked), and fail where a group or a member is not in its one place."""
    with contextlib.closing(BlockingQueue.connect(stage.redis_url, stage.run)) as queue:
        answer = queue.call(calls.audit(deep=True))
    assert answer.problems == []
    return answer.enqueued, answer.acked


@contextlib.contextmanager
def whole_run(
    stage: Stage,
    break_sink: Callable[[Stage], dict[str, Any]],
    worker_flags: tuple[str, ...] = (),
    beside: Callable[[Stage], contextlib.AbstractContextManager[Any]] | None = None,
) -> Iterator[tuple[dict[int, list[str]], subprocess.Popen[bytes], Any]]:
    """Play a run to its end; yields what came, the worker, and what ran beside it."""
    how = break_sink(stage)
    stage.start("producer", *NOISY, **how)
    worker = stage.start("worker", *NOISY, *worker_flags, **how)
    stage.wait_ready(worker)
    with contextlib.ExitStack() as stack:
        aside = None if beside is None else stack.enter_context(beside(stage))
        stream = stack.enter_context(
            GroupStream.connect(stage.redis_url, run=stage.run, connect_timeout_s=60.0)
        )
        found = train(stream)
        yield found, worker, aside
