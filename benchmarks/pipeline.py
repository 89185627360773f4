"""The whole queue with a generate function that does nothing (docs/benchmarks.md).

    python -m benchmarks.pipeline [--json] [--samples N] [--profile]

Producer, one worker with its aggregator inside, trainer and Valkey are processes of their own, on
the two cores that this machine (or `taskset`) gives them. All of them are the real components: the
producer's own program, the worker's shift, submitter, heart and aggregator, `GroupStream.batches`
and `ack`. Only generate is a stand-in: it returns a sample of 33 KB that lies ready.

`samples_per_s` is timed by the trainer from its first batch to its last. `latency_ms_*` is from the
end of a group's last attempt (on the worker) to the moment the trainer holds the group, in a run at
half that rate. `redis_us_per_sample` is the server's own CPU over everything that was sent to it;
`keys_left` counts keys of groups when the run is over. Figures with AOF everysec stand under `aof`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from examples.devserver import DevServer, die_with_parent

GROUP = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 64, 3_600
"""4 bytes an id, 5 more a response token: 33 KB."""
PROMPT_CHARS = 1_800
ROWS = 500
SLOTS = 256
CAPACITY = 512
RUN = "bench"
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="the queue's pipeline with a no-op generate")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument(
        "--profile", action="store_true", help="the worker's and trainer's hot spots"
    )
    parser.add_argument("--no-aof", action="store_true", help="without the run with AOF")
    parser.add_argument("--role", choices=("worker", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--mean-s", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        play(asked)
        return
    figures = measure(asked, aof=False)
    if not asked.no_aof:
        figures["aof"] = measure(asked, aof=True)
    if asked.json:
        print(json.dumps({"benchmark": "pipeline", **figures}))
        return
    for name, value in figures.items():
        print(f"{name:22} {value}")


# --- the director --------------------------------------------------------------------------------
def measure(asked: argparse.Namespace, *, aof: bool) -> dict[str, Any]:
    """Measure throughput at full load, then latency at half of it."""
    full = one_run(asked, asked.samples, aof=aof, mean_s=0.0)
    rate = full["samples_per_s"]
    half = one_run(asked, max(4_000, asked.samples // 4), aof=aof, mean_s=2 * SLOTS / rate)
    return {
        "samples_per_s": round(rate),
        "latency_ms_p50": half["latency_ms_p50"],
        "latency_ms_p99": half["latency_ms_p99"],
        "latency_at_samples_per_s": round(half["samples_per_s"]),
        "redis_us_per_sample": full["redis_us_per_sample"],
        "keys_left": full["keys_left"] + half["keys_left"],
        "commands_per_sample": full["commands_per_sample"],
        "cpu_us_per_sample": full["cpu_us_per_sample"],
    }


def one_run(asked: argparse.Namespace, samples: int, *, aof: bool, mean_s: float) -> dict[str, Any]:
    epochs = max(1, round(samples / GROUP / ROWS))
    with DevServer(aof=aof) as server, tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "prompts.jsonl"
        text = "x" * PROMPT_CHARS
        rows.write_text(
            "".join(
                json.dumps({"prompt": [{"role": "user", "content": f"{i} {text}"}], "label": "42"})
                + "\n"
                for i in range(ROWS)
            )
        )
        client = redis.Redis(port=server.port)
        before = client.info()
        producer = start(
            "-m", "producer",
            "--redis.url", server.url, "--run.name", RUN,
            "--producer.source", f"jsonl:{rows}", "--producer.epochs", str(epochs),
            "--producer.n_samples_per_prompt", str(GROUP),
            "--producer.capacity_groups", str(CAPACITY),
            "--producer.stay", "false", "--producer.progress", "false",
            "--telemetry.log_level", "warning",
        )  # fmt: skip
        flags = ["--profile"] if asked.profile else []
        common = ("-m", "benchmarks.pipeline", "--url", server.url, "--mean-s", str(mean_s), *flags)
        worker = start(*common, "--role", "worker", stdout=subprocess.PIPE)
        trainer = start(*common, "--role", "trainer", stdout=subprocess.PIPE)
        out, _ = trainer.communicate(timeout=600)
        worker.terminate()
        worked, _ = worker.communicate(timeout=30)
        os.kill(producer.pid, signal.SIGTERM)
        _, producer.returncode, usage = os.wait4(producer.pid, 0)
        if trainer.returncode:
            raise SystemExit("the trainer failed")
        figures: dict[str, Any] = json.loads(out.splitlines()[-1])
        after = client.info()
        cpu = sum(after[f"used_cpu_{x}"] - before[f"used_cpu_{x}"] for x in ("user", "sys"))
        commands = after["total_commands_processed"] - before["total_commands_processed"]
        num = figures["samples"]
        figures["cpu_us_per_sample"] = {
            "producer_with_start": round((usage.ru_utime + usage.ru_stime) / num * 1e6, 1),
            "worker": round(json.loads(worked.splitlines()[-1])["cpu_s"] / num * 1e6, 1),
            "trainer": round(figures["cpu_us_per_sample"], 1),
        }
        figures["redis_us_per_sample"] = round(cpu / figures["samples"] * 1e6, 1)
        figures["commands_per_sample"] = round(commands / figures["samples"], 3)
        figures["keys_left"] = sum(
            key.partition(b"}:")[2][:2] in (b"g:", b"b:") for key in client.scan_iter(count=1000)
        )
        client.close()
        return figures


def start(*command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen((sys.executable, *command), stdout=stdout, preexec_fn=die_with_parent)


# --- the roles -----------------------------------------------------------------------------------
def play(asked: argparse.Namespace) -> None:
    profile = cProfile.Profile(time.process_time) if asked.profile else None
    if profile is not None:
        profile.enable()
    if asked.role == "worker":
        asyncio.run(work(asked.url, asked.mean_s))
    else:
        train(asked.url, latency=asked.mean_s > 0)
    if profile is not None:
        profile.disable()
        import pstats

        stats = pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime")
        print(f"--- {asked.role}", file=sys.stderr)
        stats.print_stats(40)


async def work(url: str, mean_s: float) -> None:  # noqa: PLR0915 - it puts the parts together
    """Run one worker, aggregator inside; generate waits `mean_s` on average."""
    from rollstream.group import EnvRule
    from rollstream.link import Link
    from rollstream.queue.queue import Queue
    from rollstream.sample import Call
    from worker.aggregate.aggregator import Aggregator
    from worker.aggregate.judge import EnvJudge
    from worker.aggregate.loader import load_filters
    from worker.generate.finish import finish
    from worker.members.groups import GroupBook
    from worker.members.rollout import Rollout
    from worker.members.shift import Shift, ShiftLimits, new_incarnation
    from worker.members.view import RunView
    from worker.members.work import EnvRuntime
    from worker.process.heart import Heart
    from worker.sampling import Sampling
    from worker.telemetry.gc_policy import GcPolicy
    from worker.telemetry.metrics import Metrics
    from worker.telemetry.pulse import Pulse
    from worker.tito.ids import prompt_ids
    from worker.types import GenerateInput, GenerateOutput, Limits

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tokens = np.arange(PROMPT_TOKENS + RESPONSE_TOKENS, dtype=np.int32)
    log_probs = np.full(RESPONSE_TOKENS, -0.5, dtype=np.float32)
    mask = np.ones(RESPONSE_TOKENS, dtype=np.uint8)
    prompt = prompt_ids(tokens[:PROMPT_TOKENS])
    uniform = random.Random(7)

    async def no_op(given: GenerateInput) -> GenerateOutput:
        if mean_s:
            await asyncio.sleep(uniform.expovariate(1 / mean_s))
        sample = given.sample
        sample.tokens, sample.response_length = tokens, RESPONSE_TOKENS
        sample.rollout_log_probs, sample.loss_mask = log_probs, mask
        end = len(tokens)
        version = given.version()
        sample.calls = [
            Call(
                rid="0" * 32, engine="http://none", start=PROMPT_TOKENS, end=end, finish="stop",
                versions=[(version, PROMPT_TOKENS, end)], dispatched_version=version,
                sampling={"temperature": 1.0, "seed": given.turn_seed(0)},
            )
        ]  # fmt: skip
        sample.reward = float(sample.member % 2)
        return GenerateOutput(sample)

    class Always:
        def healthy(self) -> bool:
            return True

    env = EnvRuntime("default", no_op, "no_op", Limits(8, 32768), Sampling())
    metrics = Metrics(version="0", wire=1, envs=["default"])
    link, view, queue, name = Link(), RunView(), Queue.connect(url, RUN), new_incarnation()
    book = GroupBook(run=RUN, envs={"default": env}, render=lambda *_: prompt)
    rollout = Rollout(
        engine=None,  # type: ignore[arg-type]  # never asked for
        renderer=None,  # type: ignore[arg-type]  # never asked for
        book=book, finish=finish, version=lambda: view.version, run_seed=0,
    )  # fmt: skip
    limits = ShiftLimits(SLOTS, 3600.0, 0.5, 20)
    shift = Shift(
        queue, link, view, name=name, rollout=rollout, book=book, health=Always(), limits=limits,
        metrics=metrics,
    )  # fmt: skip
    filters = load_filters(["no_aborted", "reward_nonzero_std"])
    judges = {"default": EnvJudge("default", EnvRule(), filters)}
    heart = Heart(queue, link, view, name=name, held=shift.held, lost=shift.lost, metrics=metrics)
    while (info := await queue.info()) is None:
        await asyncio.sleep(0.01)
    view.opened(info)
    GcPolicy().install()
    cpu = time.process_time()
    parts = [
        heart.run(),
        shift.submitter.run(),
        shift.watch(),
        shift.run(),
        Aggregator(queue, link, judges, metrics=metrics).run(),
        Pulse(metrics, lambda: None).run(),
        stop.wait(),
    ]
    tasks = [asyncio.create_task(part) for part in parts]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    print(json.dumps({"cpu_s": time.process_time() - cpu}))
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    for task in done:
        task.result()
    await queue.aclose()


def train(url: str, *, latency: bool) -> None:
    """Consume the run; print samples/s and latencies."""
    from rollstream.stream import GroupStream

    waits: list[float] = []
    samples, started, ended = 0, 0.0, 0.0
    cpu = 0.0
    with GroupStream.connect(url, run=RUN) as stream:
        for batch in stream.batches(groups=1 if latency else BATCH, timeout_s=60):
            now = time.time()
            if not started:
                started, cpu = now, time.process_time()
                batch.ack()
                continue
            for group in batch:
                flat = group.flat()
                samples += len(flat)
                last = max(sample.metadata["attempt"]["attempt_end"] for sample in flat)
                waits.append((now - last) * 1e3)
            batch.ack()
            ended = time.time()
        cpu = time.process_time() - cpu
    waits.sort()
    figures = {
        "samples": samples,
        "samples_per_s": samples / (ended - started),
        "latency_ms_p50": round(waits[len(waits) // 2], 2),
        "latency_ms_p99": round(waits[len(waits) * 99 // 100], 2),
        "cpu_us_per_sample": cpu / samples * 1e6,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
