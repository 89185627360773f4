"""Shares of a mixture over a whole run, in which one environment only fails (docs/prompts.md).

    python -m benchmarks.mixture [--json] [--groups 600] [--workers 2]
                                 [--failing refused|raises|hangs]

Valkey, the producer, the workers and the simulated engine are processes of their own; this one is
the trainer. Three environments, with weights 5, 3 and 2: `sums` (turns with a calculator, scored by
`math`, n = 4), `words` (one call, a filter of its own, n = 2), and `failing` (n = 2), of which no
sample ever ends well: its sampling asks for what the engine refuses (HTTP 400), its generate
function raises a fault that may pass, so each member is tried again, or it hangs until
`worker.sample_timeout_s`, two seconds here.

The producer enqueues the whole run first, and what is measured of it is read from the records in
Redis, not from the rule that made them. Then workers and trainer go through all of it.

* `enqueued`: shares of the groups; `off_groups_max`: by how many groups any beginning of the run
  was off its share at most, `off_window_groups_max`: any stretch.
* `delivered`: shares of the groups that reached the trainer, `delivered_first_half`: of the first
  half of them; without `failing` they should be 5/8 and 3/8.
* `samples_per_group`: of the groups that came, every size that was seen; n is 4 and 2.
* `dropped`: groups by environment and reason. `told`: lines of the workers that say that an
  environment only fails, one for each worker.
* `run_state` before the run was ended, `unaccounted` groups that neither came nor were dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child, stop_all
from examples.devserver import DevServer, free_port
from examples.vocabulary import write
from rollstream.errors import EnvFault
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from rollstream.wire import decode_prompt
from worker.types import GenerateInput, GenerateOutput

ROOT = Path(__file__).resolve().parents[1]
RUN = "mixture"
WEIGHTS = {"sums": 5, "words": 3, "failing": 2}
SAMPLES = {"sums": 4, "words": 2, "failing": 2}
FAILING = ("refused", "raises", "hangs")
ROWS = 40
"""Of each environment; fewer than its groups, so that each goes through its own several times."""
BATCH = 16
START_S, STALL_S = 60.0, 120.0
TOLD = "environment_only_fails"


def tables(
    redis_url: str, engine: str, folder: Path, tokenizer: Path, groups: int, failing: str
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process."""
    envs: dict[str, dict[str, Any]] = {}
    for name, weight in WEIGHTS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(f"{json.dumps(a_row(name, k))}\n" for k in range(ROWS)))
        envs[f"env.{name}"] = {
            "weight": weight,
            "source": f"jsonl:{rows}",
            "n_samples_per_prompt": SAMPLES[name],
            "generate": "single_turn",
        }
    envs["env.sums"] |= {"generate": "multi_turn", "tools": ["calculator"], "max_turns": 3}
    envs["env.sums.reward"] = {"kind": "math"}
    envs["env.words"]["filters"] = ["length(4096)"]
    if failing == "refused":
        envs["env.failing.sampling"] = {"regex": "[0-9]+"}  # the engine has no grammars
    else:
        envs["env.failing"]["generate"] = f"benchmarks.mixture:{failing}"
    return {
        "run": {"name": RUN},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3"},
        "engine": {"kind": "sim", "urls": [engine]},
        "sampling": {"allow_off_distribution": True},
        "producer": {
            "capacity_groups": groups, "epochs": -(-groups // (ROWS * len(WEIGHTS))),
            "shuffle_seed": 0, "progress": False,
        },
        "worker": {"sample_timeout_s": 2.0 if failing == "hangs" else 60.0, "retry_delay_s": 0.1},
        "reward": {"kind": "deterministic_random"},
        "aggregator": {"filters": []},
        "telemetry": {
            "metrics_host": "127.0.0.1", "log_level": "warning",
            "log_format": "json",
        },
        **envs,
    }  # fmt: skip


def a_row(env: str, number: int) -> dict[str, Any]:
    """Return a row that says whose it is."""
    prompt = f"What is {number} + {number}?" if env == "sums" else f"Say {number} of {env}."
    return {"prompt": prompt, "label": str(2 * number), "metadata": {"whose": env}}


async def raises(_given: GenerateInput) -> GenerateOutput:
    """Fail as a sandbox that is away does."""
    raise EnvFault("the sandbox is away", retryable=True)


async def hangs(_given: GenerateInput) -> GenerateOutput:
    """Never end."""
    await asyncio.Event().wait()
    raise AssertionError


class Cast:
    """Every process but the trainer."""

    def __init__(
        self, redis_url: str, folder: Path, *, groups: int, workers: int, failing: str
    ) -> None:
        tokenizer = write(ROOT / ".cache" / "qwen3")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        config = folder / "rollstream.toml"
        config.write_text(to_toml(tables(redis_url, url, folder, tokenizer, groups, failing)))
        # What the shell says about a run must not reach this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}

        def child(name: str, *command: str, ready_url: str | None = None) -> Child:
            return Child(
                name, [sys.executable, "-m", *command], folder=folder, environment=environment,
                cwd=ROOT, ready_url=ready_url,
            )  # fmt: skip

        self.engine = child(
            "engine", "worker.engines.sim", "--port", str(port), "--tokenizer", str(tokenizer),
            *("--latency-median-s", "0.002", "--token-s", "0.0001"),
            ready_url=f"{url}/model_info",
        )  # fmt: skip
        self.producer = child("producer", "producer", "--config", str(config))
        self.workers = []
        for number in range(workers):
            metrics_port = free_port()
            self.workers.append(
                child(
                    f"worker-{number}", "worker", "--config", str(config),
                    *("--telemetry.metrics_port", str(metrics_port)),
                    ready_url=f"http://127.0.0.1:{metrics_port}/readyz",
                )
            )  # fmt: skip

    @property
    def everyone(self) -> list[Child]:
        """In the order in which they are stopped."""
        return [*self.workers, self.producer, self.engine]

    def told(self) -> int:
        """Return how many lines say that an environment only fails."""
        return sum(worker.log.read_text().count(TOLD) for worker in self.workers)


# --- what is read of the run ---------------------------------------------------------------------
async def enqueued(url: str) -> list[str]:
    """Return the environment of every group, by its record, once all are enqueued."""
    queue = Queue.connect(url, RUN)
    try:
        limit = time.monotonic() + START_S
        while True:
            info = await queue.info()
            if info is not None and info.done:
                break
            if time.monotonic() >= limit:
                raise SystemExit("the producer did not come to the end of its data")
            await asyncio.sleep(0.05)
        ids = sorted(int(g) for g in await queue.client.smembers(f"{queue.prefix}gs"))
        return [await env_of(queue, g) for g in ids]
    finally:
        await queue.aclose()


async def env_of(queue: Queue, group: int) -> str:
    """Return the environment in the record of a live group."""
    record, n = await queue.client.hmget(f"{queue.prefix}g:{group}", "prompt", "n")
    assert isinstance(record, bytes), "no such group"
    return decode_prompt(record, group, int(n or 0)).env


async def outcome(url: str, envs: Sequence[str]) -> tuple[str, dict[str, dict[str, int]]]:
    """Return the run's state, and its drops by environment and reason."""
    queue = Queue.connect(url, RUN)
    try:
        info = await queue.info()
        drops: dict[str, Counter[str]] = {}
        for drop in await queue.past(len(envs)):
            drops.setdefault(envs[int(drop["group_index"])], Counter())[drop["reason"]] += 1
    finally:
        await queue.aclose()
    return "lost" if info is None else info.state, {e: dict(c) for e, c in drops.items()}


def shares(envs: Sequence[str]) -> dict[str, float]:
    """Return the share of each environment."""
    counts = Counter(envs)
    return {name: round(counts[name] / max(1, len(envs)), 4) for name in WEIGHTS}


def off_by(envs: Sequence[str], weights: Mapping[str, int]) -> tuple[float, float]:
    """Return by how many groups a beginning, and any stretch, is off its share at most."""
    beginning, stretch = 0.0, 0.0
    for name, weight in weights.items():
        share, ahead, low, high = weight / sum(weights.values()), 0.0, 0.0, 0.0
        for env in envs:
            ahead += (env == name) - share
            low, high = min(low, ahead), max(high, ahead)
        beginning, stretch = max(beginning, high, -low), max(stretch, high - low)
    return round(beginning, 3), round(stretch, 3)


# --- the run -------------------------------------------------------------------------------------
def train(url: str) -> tuple[list[str], dict[str, list[int]]]:
    """Take every batch.

    Returns:
        The environments of the groups in order of their arrival, and how many samples their groups
        had.
    """
    delivered: list[str] = []
    sizes: dict[str, set[int]] = {}
    with GroupStream.connect(url, run=RUN, connect_timeout_s=START_S) as stream:
        for batch in stream.batches(groups=BATCH, timeout_s=STALL_S):
            for group in batch:
                whose = {sample.metadata["whose"] for sample in group.flat()}
                assert whose == {group.env}, "a row got the environment of another source"
                delivered.append(group.env)
                sizes.setdefault(group.env, set()).add(len(group.samples))
            batch.ack()
    return delivered, {env: sorted(found) for env, found in sizes.items()}


def measure(groups: int, workers: int, failing: str = FAILING[0]) -> dict[str, Any]:
    """Start everything, go through the whole run, and return the figures."""
    started_s = time.monotonic()
    with DevServer(aof=True) as server, tempfile.TemporaryDirectory() as name:
        cast = Cast(server.url, Path(name), groups=groups, workers=workers, failing=failing)
        try:
            cast.producer.start()
            cast.engine.start()
            envs = asyncio.run(enqueued(server.url))
            cast.engine.wait_ready(START_S)
            for worker in cast.workers:
                worker.start()
            for worker in cast.workers:
                worker.wait_ready(START_S)
            delivered, sizes = train(server.url)
            state, dropped = asyncio.run(outcome(server.url, envs))
        finally:
            stop_all(cast.everyone)
        told = cast.told()
    beginning, stretch = off_by(envs, WEIGHTS)
    num_dropped = sum(sum(reasons.values()) for reasons in dropped.values())
    return {
        "groups": len(envs),
        "weights": WEIGHTS,
        "enqueued": shares(envs),
        "off_groups_max": beginning,
        "off_window_groups_max": stretch,
        "delivered": shares(delivered),
        "delivered_first_half": shares(delivered[: len(delivered) // 2]),
        "samples_per_group": sizes,
        "dropped": dropped,
        "told": told,
        "workers": workers,
        "failing": failing,
        "run_state": state,
        "unaccounted": len(envs) - len(delivered) - num_dropped,
        "seconds": round(time.monotonic() - started_s, 1),
    }


def main() -> None:
    cli = argparse.ArgumentParser(
        prog="python -m benchmarks.mixture", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cli.add_argument("--json", action="store_true", help="one JSON line")
    cli.add_argument("--groups", type=int, default=600, help="of the whole run, at least")
    cli.add_argument("--workers", type=int, default=2)
    cli.add_argument("--failing", choices=FAILING, default=FAILING[0], help="how it fails")
    args = cli.parse_args()
    found = measure(args.groups, args.workers, args.failing)
    if args.json:
        print(json.dumps({"benchmark": "mixture", **found}))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
