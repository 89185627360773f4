"""A real verifier process, and somebody who asks it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.devserver import die_with_parent
from worker.isolation import Isolated

HANGS = "9^{9^{9^{9}}}"
"""Its evaluation never leaves C code: no signal, no exception, no timeout inside can end it."""


class Asker(Isolated):
    """Asks for verdicts, all with one timeout."""

    timeout_s = 5.0

    async def judge(self, answer: str, label: str) -> Any:
        payload = {"answer": answer, "label": label}
        return await self.call("math_verify", payload, timeout_s=self.timeout_s)


def start_verifier(url: str) -> subprocess.Popen[str]:
    """Start a verifier and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.isolation.verifier", "--redis.url", url],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "verifier_ready" in line:
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


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that the verifier forked and that live."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


async def until(condition: Callable[[], Any], limit_s: float = 45.0) -> Any:
    """Return the first true answer of `condition`."""
    async with asyncio.timeout(limit_s):
        while not (found := condition()):
            await asyncio.sleep(0.01)
        return found
