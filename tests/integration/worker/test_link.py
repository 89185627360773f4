"""What a worker's loops rely on of their connections: a cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest
from redis import exceptions as redis_errors

from rollstream.link import Link
from rollstream.queue.queue import Queue


async def test_a_wait_that_is_cancelled_at_any_moment_of_its_connection_ends(
    valkey_url: str, run_name: str
) -> None:
    async def wait(queue: Queue) -> None:
        while True:
            await queue.wait_bell(0.5)

    for steps in (*range(0, 24, 2), 40):
        queue = Queue.connect(valkey_url, run_name)
        task = asyncio.create_task(wait(queue))
        for _ in range(steps):
            await asyncio.sleep(0.0001)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=45)
        assert done, f"the cancellation after {steps} steps was swallowed"
        await queue.aclose()


async def test_link_asks_until_it_is_answered_and_remembers_the_outage_once() -> None:
    link, asked = Link(), []

    async def ask() -> str:
        asked.append(link.up)
        if len(asked) < 4:
            raise redis_errors.ConnectionError("away")
        return "here"

    assert await link.answered(ask) == "here"
    assert asked == [True, False, False, False]
    assert link.up


@pytest.mark.parametrize(
    "error", [redis_errors.ResponseError("WRONGTYPE x"), redis_errors.DataError("bug")]
)
async def test_link_does_not_hide_an_error_that_will_not_pass(error: Exception) -> None:
    async def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        await Link().answered(ask)
