"""Calls that are cancelled at every moment of their way, over any kind of connection."""

from __future__ import annotations

import asyncio

from rollstream.queue import calls
from rollstream.queue.queue import Queue
from tests.backstage import Backstage


async def cancel_calls(url: str, run: str) -> None:
    """Cancel 100 calls, each somewhere else; every later reply belongs to its call."""
    queue = Queue.connect(url, run)
    with Backstage(url, run) as backstage:
        backstage.open()
    for number in range(100):
        task = asyncio.create_task(queue.call(calls.set_budget("cap", number + 1)))
        for _ in range(number % 11):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await queue.call(calls.beat("w", [f"x{number}"]))).lost == [f"x{number}"]
    await queue.aclose()
