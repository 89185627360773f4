"""User functions of real workers that do what their row says: the worst that user code can do.

A row's metadata names the deed and the members that do it:
`{"deed": "sigkill", "members": [1]}`; every other member answers after a moment. Nothing here asks
an engine. `journal` (a file) gets a line per call, so that a test can count executions.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

from rollstream.errors import EngineFault
from rollstream.group import Drop, GroupView, Keep
from rollstream.sample import Sample
from tests.unit.worker.works import answer
from worker.types import GenerateInput, GenerateOutput

MOMENT_S = 0.1
HOARD_BYTES = 16 << 20
_hoard: list[bytearray] = []


async def generate(given: GenerateInput) -> GenerateOutput:
    """Answer after a moment, or do the row's deed first."""
    sample = given.sample
    asked: dict[str, Any] = sample.metadata
    note(asked, f"start {sample.group_index}:{sample.member}")
    if sample.member in asked.get("members", ()):
        await _do(asked)
    await asyncio.sleep(float(asked.get("takes_s", MOMENT_S)))
    return GenerateOutput(answer(given, reward=None))


async def reward(sample: Sample) -> float:
    """Score a sample: members of a group differ."""
    return float(sample.member)


def hanging_reward(sample: Sample) -> float:
    """Hold a thread for ever, but for the rows that say otherwise."""
    if "hang" in sample.metadata:
        time.sleep(3600)
    return float(sample.member)


async def _do(asked: dict[str, Any]) -> None:
    deed = asked["deed"]
    if deed == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "loop":
        while True:
            pass
    elif deed == "c_loop":
        re.match("(a+)+$", "a" * 60 + "b")
    elif deed == "hang":
        await asyncio.Event().wait()
    elif deed == "fail":
        raise EngineFault("no luck", retryable=True)
    elif deed == "wait_for":  # until the test makes the file
        while not Path(asked["file"]).exists():
            await asyncio.sleep(0.02)
    else:
        await _eat(within_a_limit=deed == "eat_to_limit")


async def _eat(*, within_a_limit: bool) -> None:
    """Take memory without end: until the process's own limit, or until somebody ends us for it."""
    if within_a_limit:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 8 * HOARD_BYTES, resource.RLIM_INFINITY))
    while True:
        # Not zero, so that it is resident.
        _hoard.append(bytearray(b"x") * HOARD_BYTES)
        if not within_a_limit:
            await asyncio.sleep(0.01)


def note(asked: dict[str, Any], line: str) -> None:
    """Append one line; small appends of several processes do not mix."""
    if "journal" in asked:
        with Path(asked["journal"]).open("a") as journal:
            journal.write(line + "\n")


# --- filters -------------------------------------------------------------------------------------
def evil_filter(group: GroupView) -> Keep | Drop:
    """Do the row's deed in a thread, where the row has one for filters."""
    deed = _begin(group)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "raise":
        raise KeyError("nope")
    elif deed == "hang":
        time.sleep(3600)
    elif deed == "burn":
        while True:
            pass
    elif deed == "wait_for":
        while not Path(group.metadata["file"]).exists():
            time.sleep(0.02)
    return Keep()


async def evil_async_filter(group: GroupView) -> Keep | Drop:
    """The same on the loop."""
    if _begin(group) == "burn":
        while True:
            pass
    return Keep()


def _begin(group: GroupView) -> str:
    note(dict(group.metadata), f"judge {group.group_index}")
    return str(group.metadata.get("filter", ""))
