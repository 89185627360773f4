"""What a worker does while the place for isolated jobs does not answer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from worker.bounded import in_thread
from worker.isolation import Isolated, client


async def test_a_place_for_jobs_that_does_not_answer_holds_none_of_the_worker_s_own_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_SOCKET_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}/0"
        isolated = Isolated(redis_url=url, rq_url=None, run="mute", incarnation="0123456789ab")
        jobs = [asyncio.create_task(isolated.call("code", {}, timeout_s=1.0)) for _ in range(32)]
        try:
            await asyncio.sleep(0.3)  # each of them is being sent by now, or waits for a thread
            async with asyncio.timeout(0.5):
                assert await in_thread(int) == 0
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await isolated.aclose()
