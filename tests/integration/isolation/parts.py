"""A real verifier process, and somebody who asks it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.devserver import die_with_parent
from tests.backstage import wait_until
from worker.isolation import Isolated

HANGS = "9^{9^{9^{9}}}"
"""Its evaluation never leaves C code: no signal, no exception, no timeout inside can end it."""


class Asker(Isolated):
    """Asks for verdicts, all with one timeout."""

    timeout_s = 5.0

    async def judge(self, answer: str, label: str) -> float:
        payload = {"answer": answer, "label": label}
        reward: float = await self.call("math_verify", payload, timeout_s=self.timeout_s)
        return reward


def start_line(url: str) -> list[str]:
    """Return the command of a verifier."""
    return [sys.executable, "-m", "worker.isolation.verifier", "--redis.url", url]


def start_verifier(url: str, *more: str, processes: int = 1) -> subprocess.Popen[str]:
    """Start a verifier of so many processes and wait until it says that it is ready."""
    count = str(processes)
    process = subprocess.Popen(
        [
            *start_line(url),
            *("--verifier.processes", count, "--verifier.max_processes", count),
            *more,
        ],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "verifier_ready" in line:
            wait_until(lambda: len(pens(process)) == processes)
            return process
    raise AssertionError(f"the verifier ended with {process.wait()}")


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    """Ask for the end and return the exit code."""
    process.send_signal(number)
    try:
        return process.wait(45)
    finally:
        if process.poll() is None:
            process.kill()
        if process.stderr is not None:
            process.stderr.close()


@asynccontextmanager
async def asking(url: str, run: str, timeout_s: float = 5.0, **how: Any) -> AsyncIterator[Asker]:
    isolated = Asker(redis_url=url, rq_url=None, run=run, incarnation="0123456789ab", **how)
    isolated.timeout_s = timeout_s
    try:
        yield isolated
    finally:
        await isolated.aclose()


def children(pid: int) -> list[int]:
    """Return the children of a process that live."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in listed.split()]


def below(pid: int) -> list[int]:
    """Return all processes below one."""
    return [found for child in children(pid) for found in (child, *below(child))]


def servers(verifier: subprocess.Popen[str]) -> list[int]:
    """Return the processes that take jobs."""
    return children(verifier.pid)


def pens(verifier: subprocess.Popen[str]) -> list[int]:
    """Return the processes that jobs run in."""
    return [pen for server in servers(verifier) for pen in children(server)]


def cpu_ticks(pid: int) -> int:
    """Return the CPU time that a process has had; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])


async def at_work(verifier: subprocess.Popen[str], but: Sequence[int] = ()) -> int:
    """Return a process in which a job computes, once there is one."""
    before: dict[int, int] = {}

    def busy() -> list[int]:
        now = {pid: cpu_ticks(pid) for pid in pens(verifier) if pid not in but}
        for pid, ticks in now.items():
            before.setdefault(pid, ticks)
        return [pid for pid, ticks in now.items() if ticks > before[pid] + 5]

    found: list[int] = await until(busy)
    return found[0]


async def until(condition: Callable[[], Any], limit_s: float = 45.0) -> Any:
    """Return the first true answer of `condition`."""
    async with asyncio.timeout(limit_s):
        while not (found := condition()):
            await asyncio.sleep(0.01)
        return found
