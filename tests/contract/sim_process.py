"""A simulated engine as a process of its own, and pools of either protocol on it.

Owns the process: it ends with the test, and listens on a port of its own choice. What the engine
says is a pure function of prompt and seed, so a trajectory under a tighter budget is a prefix of
the one without.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from examples.devserver import die_with_parent
from tests.scripted_engine import ABORTS
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.protocol.replay import ReplayShape

ROOT = Path(__file__).parents[2]
KINDS = ("sglang", "vllm")
"""The protocols; the simulated engine speaks both on one port."""
MAX_TOKEN_ID = 151_668
START_S = 40.0
NO_WAITS = ("--latency-median-s=0", "--token-s=0")


_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class SimProcess:
    """A running engine; told and asked without the HTTP library that the product uses."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of a path; with a body it is posted."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with _OPEN(request, timeout=20) as answer:
            raw = answer.read()
        told: dict[str, Any] = json.loads(raw) if raw else {}
        return told

    def get(self) -> dict[str, Any]:
        """Return what it counts."""
        return self.ask("/sim")

    def reached(self) -> int:
        """Return how many requests for tokens came, those that it refused as wrong among them."""
        counts = self.get()["counts"]
        return int(counts.get("requests", 0) + counts.get("refused", 0))

    def aborts(self) -> int:
        """Return how many aborts came, in the words of either protocol."""
        paths = self.get()["paths"]
        return sum(int(paths.get(path, 0)) for path in ABORTS)

    def damage(self, *kinds: Any) -> None:
        """Say what happens to its next requests, in order: names, None, or {"kind", "after"}."""
        ordered = self.ask("/sim/next", {"damage": list(kinds)})["ordered"]
        assert ordered == len(kinds), "an earlier test left orders behind"


@contextlib.contextmanager
def sim_process(folder: Path, vocabulary: Path, *argv: str) -> Iterator[SimProcess]:
    """Run an engine until the block ends."""
    log = folder / f"sim-{time.monotonic_ns()}.log"
    command = [
        sys.executable, "-m", "worker.engines.sim", "--port=0", f"--tokenizer={vocabulary}",
        *NO_WAITS, *argv,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        yield SimProcess(_url_in(log, process))
    finally:
        process.kill()
        process.wait()


def _url_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        text = log.read_text()
        if found := re.search(r" on (http://\S+)\n", text):
            return found[1]
        assert process.poll() is None, text
        time.sleep(0.01)
    raise AssertionError(f"the simulated engine did not start: {log.read_text()}")


@contextlib.asynccontextmanager
async def pool_of(
    kind: str,
    *urls: str,
    wire_dir: Path | None = None,
    retries: int = 0,
    replay: ReplayShape | None = None,
    check_logprobs: bool = False,
    **bounds: Any,
) -> AsyncIterator[EnginePool]:
    """Yield a pool of one protocol on these engines."""
    quick = {"backoff_s": 0.001, "backoff_max_s": 0.01, "abort_wait_s": 5.0}
    policy = RetryPolicy(max_retries=retries, **(quick | bounds))
    pool = EnginePool(
        urls, kind=kind, max_token_id=MAX_TOKEN_ID, policy=policy, wire_dir=wire_dir,
        replay=replay, check_logprobs=check_logprobs,
    )  # fmt: skip
    try:
        await pool.probe()
        yield pool
    finally:
        await pool.aclose()


def requests_in(folder: Path) -> list[dict[str, Any]]:
    """Return the bodies of the requests that a pool with this `wire_dir` sent, in any order."""
    return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.req"))]
