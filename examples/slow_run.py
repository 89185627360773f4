"""`python -m examples.slow_run FAULT`: a small run that is slow for one reason, to be found out.

    engine    every token takes its time, as on an engine with far too many calls
    reward    the reward waits for something before it answers
    filter    most groups have one and the same reward, and a filter drops those
    starved   the worker has two slots, so the trainer waits for its batches
    stale     the trainer's versions move faster than samples end, and none may be older than one

Starts Valkey, the simulated engine (a stand-in for a model), the producer and one worker, plays the
trainer until Ctrl-C or `--seconds`, and prints how to look at it: `rollstream top` names the cause
and docs/operate.md says what to do about it. Exit code 0; 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.children import ChildFailed
from examples.demo.options import VOCABULARY
from examples.devserver import DevServer
from examples.small_run import (
    EXIT_INTERRUPTED,
    EXIT_WRONG,
    READY_S,
    SmallRun,
    end_on_sigterm,
    stack,
)
from rollstream import GroupStream
from rollstream.errors import ConsumerTaken, StreamStalled
from rollstream.sample import Sample

N = 4
PROMPTS = 100_000
SOURCE = f"reasoning_gym:gsm_symbolic?size={PROMPTS}&seed=1"
WAIT_S = 1.0
SLOW_REWARD_S = 4.0
EASY = 8
"""One prompt in so many is not answered alike by all."""
QUICK = ("--token-s", "0.002")


@dataclass(frozen=True, slots=True)
class Fault:
    """What makes the run slow, and what `rollstream top` says then."""

    cause: str
    about: str
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: tuple[str, ...] = QUICK
    batch: int = 8
    """Groups."""
    step_s: float = 0.2
    """Of the trainer."""
    updates: bool = False
    """Every step is a new weight version."""


async def slow_reward(sample: Sample) -> float:
    """Answer late, as a judge does that others ask too."""
    await asyncio.sleep(SLOW_REWARD_S)
    return float(sample.member % 2)


async def easy_reward(sample: Sample) -> float:
    """Find most prompts answered right by everybody."""
    return float(sample.member % 2) if (sample.group_index or 0) % EASY == 0 else 1.0


FAULTS: dict[str, Fault] = {
    "engine": Fault(
        "engine_slow",
        "the engine gives every sample 5 tokens a second",
        engine=("--token-s", "0.2"),
    ),
    "reward": Fault(
        "reward_slow",
        f"the reward answers after {SLOW_REWARD_S:g} s",
        {"reward": {"kind": "examples.slow_run:slow_reward"}},
    ),
    "filter": Fault(
        "filter_strict",
        f"{EASY - 1} of {EASY} prompts are too easy, and the filter drops them",
        {
            "reward": {"kind": "examples.slow_run:easy_reward"},
            "aggregator": {
                "filters": ["reward_nonzero_std"],
                "stop_after_dropped_batches": 0,
            },
            "worker": {"concurrency": 16},
        },
    ),
    "starved": Fault(
        "trainer_starved",
        "the worker has two slots, and the trainer wants 16 groups a step",
        {"worker": {"concurrency": 2}},
        batch=16,
    ),
    "stale": Fault(
        "stale_groups",
        "every two groups are a new version, and none may be older than one",
        {"weights": {"max_staleness": 1, "on_stale": "drop"}, "worker": {"concurrency": 128}},
        engine=("--token-s", "0.02", "--latency-sigma", "1.0"),
        batch=2,
        step_s=0.1,
        updates=True,
    ),
}


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.slow_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fault", choices=list(FAULTS), help="why it is slow")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="end after so long (default: at Ctrl-C)"
    )
    options = parser.parse_args()
    if not VOCABULARY.exists():
        print("examples.slow_run: there is no vocabulary; run make setup", file=sys.stderr)
        return EXIT_WRONG
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-example-") as folder:
            _play(options.fault, options.seconds, Path(folder))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildFailed as error:
        print(f"examples.slow_run: {error}", file=sys.stderr)
        return EXIT_WRONG
    return 0


def run_of(name: str) -> SmallRun:
    """Return the run that has the fault."""
    fault = FAULTS[name]
    common: dict[str, Mapping[str, Any]] = {
        "producer": {"source": SOURCE, "capacity_groups": 64},
        "worker": {"concurrency": 32, "generate": "single_turn", "lease_s": 3.0},
        "reward": {"kind": "math"},
    }
    tables = {
        table: {**common.get(table, {}), **fault.tables.get(table, {})}
        for table in (*common, *fault.tables)
    }
    return SmallRun(f"slow_{name}", tables, SOURCE, PROMPTS, N, engine=fault.engine)


def _play(name: str, seconds: float | None, folder: Path) -> None:
    run, fault = run_of(name), FAULTS[name]
    there, stop = threading.Event(), threading.Event()
    with DevServer(aof=True) as redis, stack(run, redis.url, folder):
        trainer = threading.Thread(
            target=_train,
            args=(redis.url, run.name, fault, there, stop),
            name="trainer",
            daemon=True,
        )
        trainer.start()
        while not there.wait(0.2) and trainer.is_alive():
            pass  # behind it there is a run to look at
        print(
            f"run {run.name}: {fault.about}\n\n"
            f"look at it:     rollstream top --redis {redis.url}\n"
            f"it should say:  {fault.cause}\n"
            "what to do:     docs/operate.md\n\n"
            "Ctrl-C ends it",
            flush=True,
        )
        try:
            _wait(seconds, trainer)
        finally:
            stop.set()
            trainer.join(READY_S)


def _wait(seconds: float | None, trainer: threading.Thread) -> None:
    limit = None if seconds is None else time.monotonic() + seconds
    while trainer.is_alive() and (limit is None or time.monotonic() < limit):
        time.sleep(0.2)


def _train(url: str, run: str, fault: Fault, there: threading.Event, stop: threading.Event) -> None:
    """Take batches, be busy for a step, ack; until told to stop, or replaced by another trainer."""
    with GroupStream.connect(url, run=run, connect_timeout_s=READY_S) as stream:
        there.set()
        while not stop.is_set():
            try:
                for batch in stream.batches(groups=fault.batch, timeout_s=WAIT_S):
                    time.sleep(fault.step_s)
                    if fault.updates:
                        with stream.updating_weights(stream.version + 1, ack=batch):
                            pass  # a real trainer pushes its weights here
                    else:
                        batch.ack()
                    if stop.is_set():
                        return
                return  # no more prompts
            except StreamStalled:
                continue  # nothing ended for a second: ask again, or stop
            except ConsumerTaken as taken:  # e.g. `rollstream dump`
                print(f"\n{taken}; the run goes on without", flush=True)
                stop.wait()


if __name__ == "__main__":
    sys.exit(main())
