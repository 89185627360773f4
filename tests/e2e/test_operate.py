"""Why is my run slow? The path of docs/operate.md, tried on five runs that are slow for one reason.

And a run that an operator brings to rest. Real processes throughout, as a person starts them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer, die_with_parent
from examples.slow_run import FAULTS, run_of
from examples.small_run import stack
from rollstream import GroupStream
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from tests.backstage import wait_until

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 90.0
IN_A_ROW = 3
"""Looks that name the cause: once might be chance."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m …`, and end it."""
    started = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.terminate()
        started.communicate(timeout=60)


def told(running: subprocess.Popen[str], pattern: str) -> str:
    """Return what a process prints where the pattern has its group."""
    assert running.stdout is not None
    for line in running.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended without {pattern}: exit code {running.wait()}")


def rollstream(*argv: str) -> tuple[int, Any]:
    """Run one command; return its exit code and what its `--json` says."""
    done = subprocess.run(
        [sys.executable, "-m", "rollstream.cli", *argv, "--json"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(vocabulary: Path) -> Iterator[dict[str, tuple[str, str]]]:
    """All of them at once, for they mostly wait: by fault (URL, what top should say)."""
    with ExitStack() as ends:
        started = {name: ends.enter_context(process("examples.slow_run", name)) for name in FAULTS}
        yield {
            name: (
                told(running, r"rollstream top --redis (redis://\S+)"),
                told(running, r"it should say: +(\w+)"),
            )
            for name, running in started.items()
        }
        for running in started.values():
            running.terminate()  # all of them, before the first is waited for


@pytest.mark.parametrize("name", list(FAULTS))
def test_top_names_the_cause_of_a_run_that_is_slow_by(
    name: str, runs: dict[str, tuple[str, str]]
) -> None:
    url, wanted = runs[name]
    assert wanted == FAULTS[name].cause
    with process("rollstream.cli", "top", "--json", "--interval-s", "1", "--redis", url) as top:
        assert top.stdout is not None
        seen: list[str] = []
        limit = time.monotonic() + WITHIN_S
        while seen[-IN_A_ROW:] != [wanted] * IN_A_ROW:
            assert time.monotonic() < limit, seen
            record = json.loads(top.stdout.readline())
            assert record["run"] == f"slow_{name}"
            seen.append(record["cause"])


def test_a_slow_run_goes_on_where_somebody_else_takes_its_groups() -> None:
    with process("examples.slow_run", "reward") as running:
        url = told(running, r"--redis (\S+)")
        with GroupStream.connect(url, run="slow_reward") as other:
            assert told(running, "(the run goes on)")
            batch = next(other.batches(groups=1, timeout_s=WITHIN_S))
            batch.ack()
        assert running.poll() is None


def test_drain_brings_a_run_to_rest_with_nothing_lost_and_its_worker_has_nothing_to_give_back(
    vocabulary: Path, tmp_path: Path
) -> None:
    run = run_of("reward")
    producer = {**run.tables["producer"], "capacity_groups": 16}
    run = replace(run, tables={**run.tables, "producer": producer})
    with (
        DevServer() as redis,
        stack(run, redis.url, tmp_path) as children,
        closing(BlockingQueue.connect(redis.url, run.name)) as queue,
    ):
        where = ("--redis", redis.url, "--run", run.name)
        wait_until(lambda: queue.counters().get("completed", 0) > 0)  # in the middle of its work
        code, said = rollstream("drain", "--timeout-s", "110", *where)
        assert (code, said["drained"]) == (0, True)
        assert said["left"]["queued"] == said["left"]["running"] == said["left"]["full"] == 0
        counters = queue.counters()
        assert counters["enqueued"] == said["left"]["ready"] > 0

        children["worker"].ask_to_stop()
        children["worker"].wait_or_kill(30)
        assert children["worker"].exit_code == 0
        after = queue.counters()
        for name in ("given_back", "crashes", "attempts", "fenced"):
            assert after.get(name, 0) == 0, name

        with GroupStream.connect(redis.url, run=run.name) as stream:
            batch = next(stream.batches(groups=counters["enqueued"], timeout_s=60))
            assert all(len(group.samples) == run.n for group in batch.groups)
            batch.ack()
        assert rollstream("audit", "--deep", *where)[1]["live"] == 0
        assert queue.counters()["enqueued"] == counters["enqueued"]  # room, and nothing came
        assert rollstream("resume", *where)[0] == 0
        wait_until(lambda: queue.counters()["enqueued"] > counters["enqueued"])
        assert queue.call(calls.audit(deep=True)).problems == []
