"""The watchdog in processes of their own: what ends one, what must not, and what it says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.devserver import die_with_parent
from worker.process.watchdog import EXIT_STALLED, Watchdog

ROOT = Path(__file__).parents[3]
LIMIT_S = 0.6
PROGRAM = """
import asyncio, sys, re, threading, time
from rollstream.logs import configure
from worker.process.watchdog import Watchdog

async def main():
    dog = Watchdog({limit}, lease_s=lambda: 0.3, held=lambda: ["7:1:abc-1-1"], tick_s=0.05)
    dog.start()
    print("started", flush=True)
    task = asyncio.create_task(work(), name="7:1:abc-1-1")
    await task
    dog.stop()
    print("done", flush=True)

async def work():
    await asyncio.sleep(0.01)
{body}

configure()
asyncio.run(main())
"""


@contextmanager
def a_process(body: str, limit_s: float = LIMIT_S) -> Iterator[subprocess.Popen[str]]:
    """Run `body` as a sample on a watched loop."""
    text = PROGRAM.format(limit=limit_s, body="".join(f"    {x}\n" for x in body.splitlines()))
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=die_with_parent,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


def test_a_loop_that_stands_still_ends_the_process_and_says_which_sample_and_where() -> None:
    with a_process("while True: pass") as process:
        _, said = process.communicate(timeout=45)
    assert process.returncode == EXIT_STALLED
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["event_loop_blocked", "event_loop_stalled"]
    assert lines[-1]["task"] == "7:1:abc-1-1"
    assert lines[-1]["at"][-1].endswith(" work")
    assert (lines[-1]["held"], lines[-1]["exit_code"]) == (["7:1:abc-1-1"], EXIT_STALLED)
    assert "Thread 0x" in said  # the stacks of all threads
    assert "in work" in said


def test_c_code_that_keeps_the_interpreter_ends_the_process_with_its_stacks() -> None:
    backtracking = "re.match('(a+)+$', 'a' * 60 + 'b')"
    with a_process(backtracking) as process:
        _, said = process.communicate(timeout=45)
    assert process.returncode == -signal.SIGPROF
    assert "in work" in said


@pytest.mark.slow
def test_a_process_that_was_frozen_for_longer_than_the_limit_goes_on() -> None:
    # Its loop is busy with its own work before and after: the watchdog looks again before it turns.
    body = """
last = time.monotonic()  # before it says so: the freeze may come at once
print("busy", flush=True)
while (now := time.monotonic()) - last < 2:
    last = now
until = time.process_time() + 0.1
while time.process_time() < until: pass
"""
    with a_process(body, limit_s=3) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        said, errors = process.communicate(timeout=45)
    assert (process.returncode, said) == (0, "done\n"), errors
    assert "event_loop_stalled" not in errors


def test_a_loop_that_waits_in_a_debugger_is_left_alone() -> None:
    with a_process("import pdb; pdb.set_trace()") as process:
        assert process.stderr is not None
        while "event_loop_blocked" not in process.stderr.readline():
            pass
        time.sleep(2 * LIMIT_S)
        assert process.poll() is None
        said, errors = process.communicate("c\n", timeout=45)
    assert process.returncode == 0, errors
    assert said.endswith("done\n")


@pytest.mark.slow
def test_a_full_standard_error_does_not_keep_the_process_from_ending() -> None:
    # Nobody reads the pipe: the loop blocks in its own write, and so would the last words.
    with a_process("while True: sys.stderr.write('x' * 4096)") as process:
        assert process.wait(45) == EXIT_STALLED


def test_a_limit_of_zero_watches_nothing() -> None:
    with a_process("time.sleep(1)", limit_s=0) as process:
        said, errors = process.communicate(timeout=45)
    assert (process.returncode, said, errors) == (0, "done\n", "")


async def test_the_limit_is_never_less_than_a_lease(tmp_path: Path) -> None:
    ended: list[int] = []
    with (tmp_path / "stacks").open("w+") as stacks:
        dog = Watchdog(0.01, lease_s=lambda: 30, end=ended.append, stacks=stacks, tick_s=0.01)
        dog.start()
        await asyncio.sleep(0)
        time.sleep(0.2)
        dog.stop()
    assert ended == []


async def test_a_loop_that_turns_is_watched_for_nothing_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    ended: list[int] = []
    with (tmp_path / "stacks").open("w+") as stacks:
        dog = Watchdog(0.1, lease_s=lambda: 0.1, end=ended.append, stacks=stacks, tick_s=0.01)
        dog.start()
        await asyncio.sleep(0.4)
        dog.stop()
    assert ended == []
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
