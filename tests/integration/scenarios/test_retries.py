"""A member that breaks is tried again alone: later each time, and not all of them at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from rollstream.errors import EngineFault
from rollstream.queue.calls import ScriptCall
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.unit.worker.works import plain
from worker.types import GenerateInput, GenerateOutput

FIRST_S = 0.05


def delays_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Note the delay of every retry that is asked for, by how often that member was tried."""
    asked: dict[int, list[float]] = defaultdict(list)
    tries: Counter[tuple[Any, Any]] = Counter()
    send = run.queue.call_many

    async def noted(calls: list[ScriptCall[Any]]) -> list[Any]:
        for call in calls:
            if call.script == "fail":
                member = call.args[0], call.args[1]
                asked[tries[member]].append(float(call.args[6]) / 1000)
                tries[member] += 1
        return await send(calls)

    monkeypatch.setattr(run.queue, "call_many", noted)
    return asked


async def test_only_the_missing_members_run_again_with_a_growing_jittered_delay(
    valkey_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen groups of four, of which member 3 breaks three times."""
    runs: Counter[tuple[int, int]] = Counter()

    async def generate(given: GenerateInput) -> GenerateOutput:
        key = given.sample.group_index or 0, given.sample.member
        runs[key] += 1
        if given.sample.member == 3 and runs[key] <= 3:
            raise EngineFault("connection reset", retryable=True)
        return await plain(given)

    async with a_run(valkey_url, run_name, max_attempts=4) as run:
        asked = delays_asked(run, monkeypatch)
        run.worker(generate=generate, slots=64, retry_delay_s=FIRST_S).start()
        for gid in range(16):
            await run.enqueue(gid, 4)
        await run.ready(16)
        assert {runs[g, m] for g in range(16) for m in range(3)} == {1}
        assert {runs[g, 3] for g in range(16)} == {4}
        assert await run.counter("completed") == 64
        assert await run.counter("attempts") == 48
        assert sorted(asked) == [0, 1, 2]
        for attempt, delays in asked.items():
            assert len(delays) == 16
            # Half to one and a half of the doubled delay, in whole milliseconds.
            bounds = FIRST_S * 2**attempt * 0.5 - 0.001, FIRST_S * 2**attempt * 1.5
            assert all(bounds[0] <= delay <= bounds[1] for delay in delays), (attempt, delays)
            assert len(set(delays)) > 4
        await run.audit()


async def test_members_of_one_fault_do_not_all_come_back_at_the_same_moment(
    valkey_url: str, run_name: str
) -> None:
    """What waits lies in `d` under due times that differ."""

    async def generate(given: GenerateInput) -> GenerateOutput:
        raise EngineFault("connection reset", retryable=True)

    async with a_run(valkey_url, run_name) as run:
        run.worker(generate=generate, slots=64, retry_delay_s=30.0).start()
        await run.enqueue(0, 64)

        async def all_wait() -> bool:
            return (await run.queue.depths())["d"] == 64

        await wait_until(all_wait)
        due = await run.queue.client.zrange(f"{run.queue.prefix}d", 0, -1, withscores=True)
        times = sorted(score for _, score in due)
        assert len(set(times)) > 56
        assert times[-1] - times[0] > 15_000
        await run.audit()
