"""The collector's settings in a worker: installed once, put back, and measured."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from worker.telemetry.gc_policy import NEVER, YOUNG_THRESHOLD, GcPolicy


@pytest.fixture
def policy() -> Iterator[GcPolicy]:
    policy = GcPolicy()
    yield policy
    policy.uninstall()


def test_gc_policy_freezes_what_start_up_made_and_puts_everything_back(policy: GcPolicy) -> None:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    policy.install()
    policy.install()
    assert gc.get_threshold() == (YOUNG_THRESHOLD, NEVER, NEVER)
    assert gc.get_freeze_count() > frozen
    policy.uninstall()
    policy.uninstall()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_gc_policy_records_every_pause_once(policy: GcPolicy) -> None:
    policy.install()
    policy.take()
    gc.collect(0)
    gc.collect()
    pauses = policy.take()
    assert (pauses.num >= 2, pauses.num_full) == (True, 1)
    assert 0.0 < pauses.longest_s <= pauses.total_s
    assert policy.take().num_full == 0


@pytest.mark.parametrize(
    ("idle", "full_every_s", "collects"),
    [(False, 0.0, True), (True, 99.0, True), (False, 99.0, False)],
)
async def test_gc_policy_collects_fully_on_a_slow_timer_or_when_idle(
    policy: GcPolicy, idle: bool, full_every_s: float, collects: bool
) -> None:
    policy.install()
    policy.take()
    looks = 0

    def is_idle() -> bool:
        nonlocal looks
        looks += 1
        return idle

    task = asyncio.create_task(policy.run(is_idle, full_every_s=full_every_s, idle_every_s=0.0))
    async with asyncio.timeout(45):
        while looks < 3 and policy.pauses.num_full == 0:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (policy.pauses.num_full > 0) is collects
