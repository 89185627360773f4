"""A judge's process is killed under a sample: the sample is tried again, not lost (celery#1628)."""

from __future__ import annotations

import os
import signal

import pytest

from rollstream.errors import RewardFault
from rollstream.group import PromptGroup, Trajectory
from tests.integration.worker.parts import a_run
from worker.isolation import IsolatedFault

from .parts import HANGS, Asker, asking, at_work, end, start_verifier

pytestmark = [pytest.mark.xdist_group("verifier"), pytest.mark.slow, pytest.mark.timeout(120)]


class ByVerifier:
    """Scores through a real verifier; the first attempt's answer hangs there."""

    def __init__(self, isolated: Asker) -> None:
        self._isolated = isolated
        self.asked = 0

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        assert not isinstance(trajectory, list)
        self.asked += 1
        answer = HANGS if self.asked == 1 else "8"
        try:
            trajectory.reward = await self._isolated.judge(answer, "8")
        except IsolatedFault as fault:
            raise RewardFault(fault.message, retryable=fault.retryable) from fault


async def test_a_sample_whose_judge_is_killed_is_tried_again_and_lands(
    valkey_url: str, run_name: str
) -> None:
    verifier = start_verifier(valkey_url)
    try:
        async with (
            a_run(valkey_url, run_name) as run,
            asking(valkey_url, run_name, timeout_s=10.0) as isolated,
        ):
            scorer = ByVerifier(isolated)
            await run.enqueue(0, 1)
            run.worker(scorer=scorer).start()
            killed: list[int] = []
            for _ in range(2):  # the verifier tries the job once more by itself
                pid = await at_work(verifier, but=killed)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            await run.ready(1)

            assert scorer.asked == 2
            assert await run.counter("attempts") == 1
            assert await run.counter("completed") == 1
            await run.audit()
    finally:
        end(verifier)
