"""The generate function of the chaos run: `multi_turn` with tools, and everything user code may do.

Owns which attempts fail and how; a share of them is a pure function of (group, member, attempt),
so a retried attempt may fare better and a poison never does. Never touches what the engine
sampled. Invariant: once the file `CALM` exists nothing fails on purpose any more, so that a drain
is one.

In the configuration: `worker.generate = "tests.e2e.chaos.faults:generate"`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from examples.generate_list import generate as generate_list
from rollstream.errors import EngineFault, EnvFault, ToolFault
from worker.generate import multi_turn
from worker.types import GenerateInput, GenerateOutput

CALM = "ROLLSTREAM_CHAOS_CALM"
"""Environment variable that names the file; workers of a run share it."""
LIST_SHARE = 0.1
"""Groups whose members are lists of samples; no fault, but another shape."""
BLOCK_S = 2.5
"""A blocked loop outlasts a lease: nobody beats meanwhile."""
TOO_LARGE_CHARS = 400_000


class Failure(StrEnum):
    """What an attempt does in place of a result."""

    RAISE = "raise"
    RETRYABLE = "retryable"
    FINAL = "final"
    HANG = "hang"
    STUBBORN = "stubborn"
    """Hangs, and swallows its cancellation for a while."""
    NOTHING = "nothing"
    INVALID = "invalid"
    """Samples whose arrays do not fit together."""
    FOREIGN = "foreign"
    """Another group's sample."""
    TOO_LARGE = "too_large"
    UNSTORABLE = "unstorable"
    EXIT = "exit"
    LEAK = "leak"
    """Raises CancelledError although nobody cancelled it."""
    BLOCK = "block"
    """Holds the event loop for longer than a lease."""
    POISON = "poison"
    """Kills its worker, whenever this member is tried."""


SHARES: dict[Failure, float] = {
    Failure.RAISE: 0.03,
    Failure.RETRYABLE: 0.18,
    Failure.FINAL: 0.01,
    Failure.HANG: 0.01,
    Failure.STUBBORN: 0.003,
    Failure.NOTHING: 0.015,
    Failure.INVALID: 0.015,
    Failure.FOREIGN: 0.01,
    Failure.TOO_LARGE: 0.01,
    Failure.UNSTORABLE: 0.005,
    Failure.EXIT: 0.004,
    Failure.LEAK: 0.004,
    Failure.BLOCK: 0.003,
    Failure.POISON: 0.001,
}
"""Of all attempts, 30 % together; the engine's own faults (one request in seven) come on top."""


def unit(*parts: Any) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def failure_of(group: int, member: int, attempt: int) -> Failure | None:
    """Return how one attempt fails, None where it does not."""
    if unit(group, member, "poison") < SHARES[Failure.POISON]:
        return Failure.POISON
    at = unit(group, member, attempt)
    for failure, share in SHARES.items():
        if failure is Failure.POISON:
            continue
        if at < share:
            return failure
        at -= share
    return None


async def generate(given: GenerateInput) -> GenerateOutput:
    """Return a trajectory, or fail as the attempt's number has it."""
    sample = given.sample
    group = sample.group_index or 0
    if not _is_calm() and (failure := failure_of(group, sample.member, sample.attempts)):
        return await _fail(failure, given)
    if unit(group, "list") < LIST_SHARE:
        return await generate_list(given)
    return await multi_turn(given)


def _is_calm() -> bool:
    path = os.environ.get(CALM)
    return path is None or Path(path).exists()


async def _fail(failure: Failure, given: GenerateInput) -> GenerateOutput:
    """Fail before, within or after the real work."""
    if failure is Failure.RAISE:
        raise ValueError("chaos: the generate function raised")
    if failure is Failure.RETRYABLE:
        kind = (EngineFault, EnvFault, ToolFault)[given.sample.member % 3]
        raise kind("chaos: may pass by itself", retryable=True)
    if failure is Failure.FINAL:
        raise EnvFault("chaos: will never pass")
    if failure is Failure.EXIT:
        raise SystemExit(7)
    if failure is Failure.LEAK:
        raise asyncio.CancelledError
    if failure is Failure.HANG:
        await asyncio.sleep(3600)
    if failure is Failure.STUBBORN:
        await _be_stubborn()
    if failure is Failure.POISON:
        # In the middle of a sample: its lease is held and its siblings are under way.
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    output = await multi_turn(given)
    if failure is Failure.BLOCK:
        time.sleep(BLOCK_S)
        return output
    spoilt: GenerateOutput = _spoilt(failure, output)
    return spoilt


async def _be_stubborn() -> None:
    limit = time.monotonic() + 8.0
    while time.monotonic() < limit:
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            continue


def _spoilt(failure: Failure, output: GenerateOutput) -> Any:
    leaf = output.samples
    assert not isinstance(leaf, list)
    if failure is Failure.NOTHING:
        return None
    if failure is Failure.INVALID and leaf.rollout_log_probs is not None:
        leaf.rollout_log_probs = np.append(leaf.rollout_log_probs, np.float32(0.0))
    if failure is Failure.FOREIGN:
        leaf.group_index = (leaf.group_index or 0) + 1
    if failure is Failure.TOO_LARGE:
        leaf.metadata["filler"] = "x" * TOO_LARGE_CHARS
    if failure is Failure.UNSTORABLE:
        leaf.metadata["filler"] = {1, 2}
    return output
