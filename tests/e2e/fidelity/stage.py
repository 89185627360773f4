"""Every process of the proof, and what each is told; and the engine's control calls.

Owns commands, the configuration files and the folder of weights of each version. Never rolls out.
Invariant: version v of the weights is always the same folder, for the engine and for the teacher.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child
from examples.devserver import free_port
from examples.tiny_model import write_tiny_model
from tests.e2e.fidelity import tools
from tests.e2e.fidelity.options import (
    CONCURRENCY,
    MAX_CONTEXT,
    MAX_NEW_TOKENS,
    MAX_RESPONSE,
    MAX_TURNS,
    NUM_WORKERS,
    ROOT,
    VOCABULARY,
)

CONTROL_S = 60.0
CALLS = 0.88
"""Share of turns that call a tool: most samples get far, some to the last turn."""


class Weights:
    """The models of the proof: even versions are one, odd ones the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folders = [
            write_tiny_model(
                folder / f"model-{place}",
                tokenizer_json=VOCABULARY,
                seed=2 * seed + place,
                calls=CALLS,
            )
            for place in (0, 1)
        ]

    def of(self, version: int) -> Path:
        """Return the folder of a version's weights."""
        return self._folders[version % 2]


class EngineControl:
    """The running engine, told over HTTP as a trainer or an operator would."""

    def __init__(self, url: str, weights: Weights) -> None:
        self.url, self._weights, self.version = url, weights, 0

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one control call."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CONTROL_S) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer

    def abort(self, rid: str | None) -> None:
        """Abort one request, or all."""
        self.post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def update(self, *, abort_all: bool) -> int:
        """Load the next version's weights from the disk; return the version.

        Requests in flight are aborted, or go on under the new weights with their KV recomputed.
        """
        version = self.version + 1
        answer = self.post(
            "/update_weights_from_disk",
            {
                "model_path": str(self._weights.of(version)),
                "weight_version": str(version),
                "abort_all_requests": abort_all,
                "flush_cache": True,
            },
        )
        if not answer["success"]:
            raise RuntimeError(f"the engine took no new weights: {answer['message']}")
        self.version = version
        return version


def clean_environment() -> dict[str, str]:
    """Return what the children get: what the shell says about a run must not reach them."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    return mine | offline | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def child(folder: Path, name: str, *command: str, ready_url: str | None = None) -> Child:
    """Return a process, not started."""
    return Child(
        name,
        [sys.executable, "-m", *command],
        folder=folder,
        environment=clean_environment(),
        cwd=ROOT,
        ready_url=ready_url,
    )


def engine(folder: Path, weights: Weights, *, seed: int, logprob_mode: str) -> tuple[Child, str]:
    """Return the engine and its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = child(
        folder,
        "engine",
        "worker.engines.hf",
        *("--model", str(weights.of(0)), "--port", str(port), "--dtype", "float32"),
        *("--device", "cpu", "--threads", "1", "--max-batch", str(2 * CONCURRENCY)),
        *("--seed", str(seed), "--weight-version", "0", "--logprob-mode", logprob_mode),
        ready_url=f"{url}/model_info",
    )
    return process, url


class Service:
    """A producer and workers of one run, and what they were told."""

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        redis_url: str,
        engine_url: str,
        rows: list[dict[str, Any]],
        seed: int,
        workers: int = NUM_WORKERS,
        max_turns: int = MAX_TURNS,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir()
        self.run, self.folder, self.wire_dir = run, folder, folder / "wire"
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = folder / "rollstream.toml"
        content = tables(run, redis_url, engine_url, path, seed, self.wire_dir, sampling or {})
        content["worker"]["max_turns"] = max_turns
        config.write_text(to_toml(content))
        self.ports = [free_port() for _ in range(workers)]
        self.producer = child(folder, "producer", "producer", "--config", str(config))
        self.workers = [
            child(
                folder,
                f"worker-{number}",
                "worker",
                *("--config", str(config), "--telemetry.metrics_port", str(port)),
                ready_url=f"http://127.0.0.1:{port}/readyz",
            )
            for number, port in enumerate(self.ports, 1)
        ]

    @property
    def children(self) -> list[Child]:
        """In the order in which they are stopped."""
        return [*self.workers, self.producer]

    def counter(self, name: str) -> float | None:
        """Return the sum of a counter over the workers and its labels; None where there is none."""
        values: list[float] = []
        for port in self.ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                text = page.read().decode()
            found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            values += [float(value) for value in found]
        return sum(values) if values else None


def tables(
    run: str,
    redis_url: str,
    engine_url: str,
    rows: Path,
    seed: int,
    wire_dir: Path,
    sampling: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process of a run."""
    return {
        "run": {"name": run, "seed": seed},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(VOCABULARY), "max_context_tokens": MAX_CONTEXT},
        "engine": {"urls": [engine_url]},
        "sampling": {
            "max_new_tokens": MAX_NEW_TOKENS,
            "max_response_tokens": MAX_RESPONSE,
            **sampling,
        },
        "producer": {
            "source": f"jsonl:{rows}",
            "progress": False,
        },
        "worker": {
            "concurrency": CONCURRENCY // NUM_WORKERS,
            "tools": list(tools.PATHS),
        },
        "aggregator": {"filters": []},
        "reward": {"kind": "deterministic_random"},
        "telemetry": {"metrics_host": "127.0.0.1"},
        "debug": {"wire_dir": str(wire_dir)},
    }
