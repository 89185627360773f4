"""Budgets that change while the run goes on: by a producer that starts again, or by an operator."""

from __future__ import annotations

import asyncio

import pytest

from rollstream.queue import calls
from rollstream.queue.calls import ScriptCall
from rollstream.queue.keys import SCHEMA
from tests.backstage import Backstage
from tests.builders import budgets
from tests.integration.worker.parts import Gate, Run, a_run, wait_until

SHORT = 1_000
CHANGES: dict[str, ScriptCall[object]] = {
    "a producer with a shorter lease": calls.open_run(SCHEMA, "f", budgets(lease_ms=SHORT)),
    "an operator": calls.set_budget("lease_ms", SHORT),
}


async def clock_of(run: Run) -> int:
    info = await run.queue.info()
    assert info is not None
    return info.clock_ms


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_a_lease_that_gets_shorter_expires_under_no_worker_that_lives(
    valkey_url: str, run_name: str, change: str
) -> None:
    """Workers beat by the lease that they read at their start: three times in 15 s."""
    gate = Gate()
    async with a_run(valkey_url, run_name, lease_ms=15_000) as run:
        run.worker(generate=gate).start()
        await run.enqueue(0, 4)
        await wait_until(lambda: len(gate.started) == 4)
        await run.queue.call(CHANGES[change])
        await run.enqueue(1, 4)
        await wait_until(lambda: len(gate.started) == 8)
        until = await clock_of(run) + 3 * SHORT
        while await clock_of(run) < until:  # somebody sweeps as often as the new lease wants it
            await run.queue.call(calls.sweep())
            await asyncio.sleep(0.1)
        assert await run.counter("crashes") == 0
        for g in (0, 1):
            gate.end(g, 0, 1, 2, 3)
        await run.ready(2)
        await run.audit()


def test_two_producers_with_different_capacities_lose_and_double_nothing(run: Backstage) -> None:
    """The last one that opened the run decides; what is live already stays."""
    small, large = budgets(cap=2), budgets(cap=4)
    run.queue.call(calls.open_run(SCHEMA, "data", large))
    assert run.enqueue(0, 1, 2, 3, 4) == ["new"] * 4 + ["full"]
    run.queue.call(calls.open_run(SCHEMA, "data", small))
    assert run.enqueue(3, 4) == ["dup", "full"]
    run.queue.call(calls.open_run(SCHEMA, "data", large))
    assert run.enqueue(0, 4) == ["dup", "full"]
    run.queue.call(calls.withdraw("0"))
    assert run.enqueue(0, 4, 4) == ["done", "new", "dup"]
    answer = run.queue.call(calls.audit(deep=True))
    assert (answer.problems, answer.enqueued, answer.dropped, answer.live) == ([], 5, 1, 4)
