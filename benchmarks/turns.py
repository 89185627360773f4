"""What a worker adds to a turn, and how many turns a second one core stands.

    python -m benchmarks.turns [--json] [--rate 500] [--in-flight 1024] [--seconds 14] [--watch]

One process runs the real path: `multi_turn`, Trajectory, the renderer's bridge, a trivial tool, the
engine pool over HTTP, the response's decoding and the finished sample. The engine is
`benchmarks.engine`, precomputed bytes in a process of its own that times from outside; its ceiling
comes first, and a figure that it could have bounded is marked `engine_bound`.

Turns of 261 sampled and about 200 observed tokens, 8 to 24 a conversation, prompts of 1.5k to 16k.

* `added_ms_…`: reply sent → next request complete, at `--rate` turns a second.
* `cpu_ms_per_turn`: of this process, all threads, in that window; whole conversations included.
* `turns_per_s_per_core`: turns in a second of CPU time of this process with the engine answering at
  once (nothing waits but for this core), so other processes on the machine do not count.
* `watch_share`: of this process's CPU, what the check on every sample takes
  (`worker.members.fidelity`), by the thread's own clock in saturated windows; the cost of asking
  that clock is in it.
* `watch_cpu_ratio`: CPU of a turn with the check by that without it, median of pairs of windows
  that follow each other in this run; on a shared machine it is good for a few per cent. A
  conversation is watched or not as a whole, so few should be in flight: `--in-flight 128`.
* `run_queue_wait_share`: how long this process waited for a core in the paced window. Above a few
  per cent the machine was shared, and `added_ms_p99` says more about it than about the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.engine import SAMPLED, TOOL, Words
from examples.devserver import die_with_parent
from examples.vocabulary import write
from rollstream.sample import Sample
from worker.engines.fleet.pool import EnginePool
from worker.generate.multi_turn import multi_turn
from worker.members.fidelity import Watch, WatchedEngine
from worker.sampling import Sampling, call_seed
from worker.telemetry.gc_policy import GcPolicy
from worker.telemetry.spans import SpanList
from worker.tito.load import load_renderer, render_prompt
from worker.tools.function import FunctionTool
from worker.types import Completion, GenerateInput, Limits, PromptIds, Renderer, Tool

OBSERVED = 200
NUM_PROMPTS = 128
MAX_TOKEN_ID = 151_668
MEMBERS = 8
"""Of a group: the first one's check reads the prompt that they share."""
WATCH_PAIRS = 5
WATCH_WINDOW_S = 3.0
WATCH_SETTLE_S = 4.0
"""Until most conversations of the window before are over."""


class TimedWatch(Watch):
    """A watch that may be off, and says how long it took while it was on."""

    is_on = True
    """Of conversations that begin now."""
    took_s = 0.0

    def __init__(self, prompt: PromptIds, *, is_prompt_proven: bool = False) -> None:
        super().__init__(prompt, is_prompt_proven=is_prompt_proven)
        self.counts = TimedWatch.is_on

    def add(self, pieces: tuple[bytes, ...], completion: Completion) -> None:
        """Take one answered request."""
        if self.counts:
            started = time.thread_time()
            super().add(pieces, completion)
            TimedWatch.took_s += time.thread_time() - started

    def hold(self, sample: Sample) -> None:
        """Check a finished sample."""
        if self.counts:
            started = time.thread_time()
            found = self.check(sample)
            TimedWatch.took_s += time.thread_time() - started
            assert found is None, found


class Driver:
    """Keeps a fixed number of conversations in flight."""

    def __init__(self, engine: EnginePool, renderer: Renderer, path: Path) -> None:
        words = Words(Tokenizer.from_file(str(path)), seed=5)
        chosen = itertools.cycle([words.text(OBSERVED) for _ in range(512)])

        async def lookup(key: str) -> str:
            """Look a key up."""
            return next(chosen)

        tool = FunctionTool(lookup)
        assert tool.name == TOOL
        self._engine, self._renderer = engine, renderer
        self._tools: Mapping[str, Tool] = {tool.name: tool}
        draw = random.Random(1)
        sizes = [
            int(math.exp(draw.uniform(math.log(1500), math.log(16000)))) for _ in range(NUM_PROMPTS)
        ]
        self._prompts = [
            render_prompt(renderer, [{"role": "user", "content": words.text(size)}], [tool.spec])
            for size in sizes
        ]
        self._limits = Limits(max_turns=64, max_context=131_072)
        self._numbers = itertools.count()
        self.finished = 0

    async def keep_going(self, delay_s: float) -> None:
        """Run one conversation after another, from `delay_s` on."""
        await asyncio.sleep(delay_s)
        while True:
            number = next(self._numbers)
            prompt = self._prompts[number % NUM_PROMPTS]
            watch = TimedWatch(prompt, is_prompt_proven=number % MEMBERS > 0)
            output = await multi_turn(self._input(number, prompt, watch))
            sample = output.samples
            assert isinstance(sample, Sample)
            watch.hold(sample)
            assert sample.status == "completed"
            assert sample.num_sampled == SAMPLED * len(sample.calls)
            self.finished += 1

    def _input(self, number: int, prompt: PromptIds, watch: Watch) -> GenerateInput:
        return GenerateInput(
            sample=Sample(group_index=number, routing_key=f"c{number}-w"),
            sampling=Sampling(max_new_tokens=1024),
            engine=WatchedEngine(self._engine, watch),
            renderer=self._renderer,
            tools=self._tools,
            spans=SpanList(),
            deadline=time.monotonic() + 3600,
            prompt=prompt,
            limits=self._limits,
            version=lambda: 0,
            turn_seed=lambda turn: call_seed(0, number, 0, turn),
        )


async def measure(
    client: httpx.AsyncClient, url: str, latency_s: float, seconds: float
) -> dict[str, Any]:
    """Return what the engine saw in a window of so many seconds."""
    order = {"latency_s": latency_s, "seconds": seconds, "pid": os.getpid()}
    await client.post(url + "/bench", json=order)
    seen: dict[str, Any] | None = None
    async with asyncio.timeout(3 * seconds + 60):
        while seen is None:
            await asyncio.sleep(0.5)
            seen = (await client.get(url + "/bench")).json()
    return seen


async def measure_watch(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Return what the check on every sample costs: windows with and without it, in pairs."""
    ratios, shares = [], []
    for _ in range(WATCH_PAIRS):
        cpu_s = {}
        for is_on in (True, False):
            TimedWatch.is_on = is_on
            await asyncio.sleep(WATCH_SETTLE_S)
            TimedWatch.took_s = 0.0
            seen = await measure(client, url, 0.001, WATCH_WINDOW_S)
            cpu_s[is_on] = seen["worker_cpu_s"] / max(1, seen["requests"])
            if is_on:
                shares.append(TimedWatch.took_s / seen["worker_cpu_s"])
        ratios.append(cpu_s[True] / cpu_s[False])
    TimedWatch.is_on = True
    return {
        "watch_share": round(statistics.median(shares), 5),
        "watch_cpu_ratio": round(statistics.median(ratios), 4),
    }


async def drive(url: str, ceiling: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the paced and the saturated window."""
    path = write(Path(".cache") / "qwen3")
    renderer = load_renderer(path, "qwen3")
    pool = EnginePool([url], max_token_id=MAX_TOKEN_ID)
    driver = Driver(pool, renderer, path)
    gc_policy = GcPolicy()
    gc_policy.install()
    latency_s = args.in_flight / args.rate
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(url + "/bench", json={"latency_s": latency_s})
        draw = random.Random(2)
        tasks = [
            asyncio.create_task(driver.keep_going(draw.uniform(0, latency_s)))
            for _ in range(args.in_flight)
        ]
        await asyncio.sleep(3 * latency_s)
        gc_policy.take()
        paced = await measure(client, url, latency_s, args.seconds)
        pauses = gc_policy.take()
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        await client.post(url + "/bench", json={"latency_s": 0.001})
        await asyncio.sleep(3.0)
        full = await measure(client, url, 0.001, 6.0)
        watching = await measure_watch(client, url) if args.watch else {}
        broken = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await pool.aclose()
    gc_policy.uninstall()
    if broken:
        raise RuntimeError(f"{len(broken)} conversations broke; the first: {broken[0]!r}")
    return {
        "turns_per_s_per_core": round(full["requests"] / full["worker_cpu_s"], 1),
        "added_ms_p50": round(paced["added_ms_p50"], 3),
        "added_ms_p99": round(paced["added_ms_p99"], 3),
        "cpu_ms_per_turn": round(1e3 * paced["worker_cpu_s"] / max(1, paced["requests"]), 3),
        "rss_mb": round(rss_mb, 1),
        "in_flight": args.in_flight,
        "asked_turns_per_s": args.rate,
        "paced_turns_per_s": round(paced["requests_per_s"], 1),
        "added_ms_max": round(paced["added_ms_max"], 1),
        "gc_pause_ms_max": round(1e3 * pauses.longest_s, 1),
        "worker_core_share": round(paced["worker_core_share"], 3),
        "run_queue_wait_share": round(paced["worker_wait_share"], 3),
        "saturated_turns_per_s": round(full["requests_per_s"], 1),
        "saturated_run_queue_wait_share": round(full["worker_wait_share"], 3),
        "engine_ceiling_per_s": round(ceiling, 1),
        "engine_bound": ceiling < 1.5 * max(args.rate, full["requests_per_s"]),
        "engine_late_ms_max": round(paced["engine_late_ms_max"], 1),
        "engine_core_share": round(paced["engine_core_share"], 3),
        "engine_run_queue_wait_share": round(paced["engine_wait_share"], 3),
        "conversations": driver.finished,
        **watching,
    }


def main() -> None:
    cli = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    cli.add_argument("--json", action="store_true")
    cli.add_argument("--rate", type=float, default=500.0, help="turns a second in the paced window")
    cli.add_argument("--in-flight", type=int, default=1024)
    cli.add_argument("--seconds", type=float, default=14.0, help="length of the paced window")
    cli.add_argument(
        "--watch", action="store_true", help="also what the check on every sample costs (75 s more)"
    )
    args = cli.parse_args()
    engine = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    try:
        assert engine.stdout is not None
        said = json.loads(engine.stdout.readline())
        if not args.json:
            print(f"engine: {said['ceiling_per_s']:,.0f} requests/s by a bare loader")
        figures = asyncio.run(drive(said["url"], said["ceiling_per_s"], args))
    finally:
        engine.kill()
        engine.wait()
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
