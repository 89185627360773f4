"""Time over a real server: deadlines of groups, pauses, and the waits before a retry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.errors import EngineFault
from rollstream.queue import calls
from worker.types import GenerateInput, GenerateOutput

from .parts import Gate, Run, a_run, wait_until

LEASE_MS, DEADLINE_MS = 1000, 1000


async def clock_ms(run: Run) -> int:
    info = await run.queue.info()
    assert info is not None
    return info.clock_ms


@pytest.mark.parametrize(("min_samples", "ends"), [(3, "ready"), (None, "deadline")])
async def test_a_group_whose_one_member_hangs_ends_at_its_deadline_with_the_others(
    valkey_url: str, run_name: str, min_samples: int | None, ends: str
) -> None:
    gate = Gate()
    async with a_run(valkey_url, run_name, lease_ms=LEASE_MS) as run:
        await run.enqueue(1, 4, timeout_ms=DEADLINE_MS)
        parts = run.worker(generate=gate, min_samples=min_samples)
        parts.start()
        gate.end(1, 0, 1, 3)

        if ends == "ready":
            await run.ready(1)
            group = await run.group(1, 4)
            errors = group.errors
        else:
            await wait_until(run.drops)
            assert await run.drops() == {"deadline": 1}
            (drop,) = await run.queue.past()
            errors = drop["errors"]
        await wait_until(lambda: parts.shift.num_busy == 0, what="a free slot")
        assert errors == [None, None, ("deadline", "the deadline of the group passed"), None]
        assert await run.counter("attempts") == 0
        await run.audit()


@pytest.mark.slow
async def test_a_pause_longer_than_deadline_lease_and_sample_timeout_ends_nothing(
    valkey_url: str, run_name: str
) -> None:
    gate = Gate()
    async with a_run(valkey_url, run_name, lease_ms=LEASE_MS) as run:
        await run.enqueue(1, 4, timeout_ms=DEADLINE_MS)
        parts = run.worker(generate=gate, sample_timeout_s=DEADLINE_MS / 1000)
        parts.start()
        await wait_until(lambda: len(gate.started) == 4)
        await run.queue.call(calls.pause())
        parts.heart.nudge()
        paused_at = await clock_ms(run)

        async def long_enough() -> bool:
            return await clock_ms(run) >= paused_at + 2 * DEADLINE_MS + LEASE_MS

        await wait_until(long_enough, what="a long pause")
        await run.queue.call(calls.resume())
        parts.heart.nudge()
        gate.end(1, 0, 1, 2, 3)

        await run.ready(1)
        counters = await run.queue.counters()
        assert counters["completed"] == 4
        assert not {name for name in counters if name.startswith(("crash", "attempt", "member"))}
        assert len(gate.started) == 4
        await run.audit()


async def test_the_deadline_that_a_function_sees_moves_with_a_pause(
    valkey_url: str, run_name: str
) -> None:
    seen: list[GenerateInput] = []

    async def waits(given: GenerateInput) -> GenerateOutput:
        seen.append(given)
        await asyncio.Event().wait()
        raise AssertionError

    async with a_run(valkey_url, run_name) as run:
        await run.enqueue(1, 1)
        parts = run.worker(generate=waits)
        parts.start()
        await wait_until(lambda: seen)
        before = seen[0].deadline
        await run.queue.call(calls.pause())
        parts.heart.nudge()
        await wait_until(lambda: seen[0].deadline > before + 0.3, what="a deadline that moves")
        await run.queue.call(calls.resume())
        parts.heart.nudge()
        await wait_until(lambda: parts.view.state == "running")
        after = seen[0].deadline
        await asyncio.sleep(0.3)
        assert seen[0].deadline <= after + 0.2


async def test_waits_before_a_retry_grow_and_no_two_members_wait_the_same(
    valkey_url: str, run_name: str
) -> None:
    n, first_s = 32, 20.0

    async def fails(given: GenerateInput) -> GenerateOutput:
        raise EngineFault("no luck", retryable=True)

    async def delays(run: Run) -> dict[str, float]:
        """Return how long each member waits, of the queue's clock."""
        client: Any = run.queue.client
        due = await client.zrange(f"{run.queue.prefix}d", 0, -1, withscores=True)
        now = await clock_ms(run)
        return {name.decode(): (score - now) / 1000 for name, score in due}

    async with a_run(valkey_url, run_name) as run:
        await run.enqueue(1, n)
        # Without a heart the queue's clock stands (but for what each call adds to it).
        run.worker(generate=fails, slots=n, retry_delay_s=first_s).start(beat=False)

        async def all_wait() -> Any:
            found = await delays(run)
            return found if len(found) == n else None

        once: dict[str, float] = await wait_until(all_wait)
        await run.queue.client.zadd(f"{run.queue.prefix}d", dict.fromkeys(once, 0.0))

        async def all_wait_again() -> Any:
            found = await delays(run)
            return found if len(found) == n and min(found.values()) > 0 else None

        again: dict[str, float] = await wait_until(all_wait_again)

    slack_s = 5.0
    assert 0.5 * first_s <= min(once.values()) <= max(once.values()) <= 1.5 * first_s + slack_s
    assert 1.0 * first_s <= min(again.values()) <= max(again.values()) <= 3.0 * first_s + slack_s
    assert sum(again.values()) > 1.4 * sum(once.values())
    assert len({round(delay, 1) for delay in once.values()}) > n // 2
