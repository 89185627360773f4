"""Cases 107 and 108 over a real server: a member without a token, a judge that nobody awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.errors import STATUS_OF, Status, StopReason
from rollstream.group import GroupView, Keep, PromptGroup, Trajectory
from rollstream.queue import calls
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.unit.worker.works import answer, plain
from worker.aggregate.loader import LoadedFilter
from worker.types import GenerateInput, GenerateOutput


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    # A worker hears of a withdrawn group with its next beat, every third part of a lease.
    async with a_run(valkey_url, run_name, lease_ms=2_000) as opened:
        yield opened


async def test_case_107_a_member_without_a_model_call_is_missing_and_shapes_no_statistics(
    run: Run,
) -> None:
    seen: list[list[float]] = []

    def look(group: GroupView) -> Keep:
        seen.append(group.rewards)
        return Keep()

    async def generate(given: GenerateInput) -> GenerateOutput:
        sample = given.sample
        if sample.member < 2:
            return GenerateOutput(answer(given, reward=float(sample.member)))
        sample.tokens = np.zeros(0, np.int32)
        sample.loss_mask = np.zeros(0, np.uint8)
        sample.rollout_log_probs = np.zeros(0, np.float32)
        sample.reward = 0.0
        sample.finish(StopReason.NO_MODEL_CALL, STATUS_OF[StopReason.NO_MODEL_CALL])
        return GenerateOutput(sample)

    spy = LoadedFilter("mine.py:look", look, built_in=False, needs="headers")
    await run.enqueue(0, 3)
    run.worker(generate=generate, filters=[spy, "reward_nonzero_std"], min_samples=2).start()
    async with await AsyncGroupStream.connect(run.url, run=run.queue.run) as stream:
        batch = await stream.next_batch(1, 10)
        assert batch is not None
        await stream.ack(batch)
    assert seen == [[0.0, 1.0]]
    assert batch.metrics()["batch/reward_mean"] == 0.5
    assert batch.to_arrays()["loss_mask"].sum(axis=1).tolist() == [2, 2]
    [group] = batch.groups
    assert [(m.member, m.status, m.reason) for m in group.missing] == [
        (2, Status.ABORTED, "no_model_call")
    ]
    await run.audit()


class SlowJudge:
    """Scores at once but for one group, which it never ends."""

    def __init__(self, slow_group: int) -> None:
        self._slow_group = slow_group
        self.waiting = self.cancelled = 0

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        if group.group_index != self._slow_group:
            assert not isinstance(trajectory, list)
            trajectory.reward = float(trajectory.member)
            return
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_case_108_a_batch_is_handed_out_while_the_judge_of_a_surplus_group_hangs(
    run: Run,
) -> None:
    judge = SlowJudge(slow_group=2)
    for group_index in range(3):
        await run.enqueue(group_index, 2)
    parts = run.worker(generate=plain, scorer=judge, slots=6)
    parts.start()
    async with await AsyncGroupStream.connect(run.url, run=run.queue.run) as stream:
        batch = await stream.next_batch(2, 10)
        assert batch is not None
        assert sorted(batch.group_indexes) == [0, 1]
        await stream.ack(batch)
        await wait_until(lambda: judge.waiting >= 2)
        # The judge holds the slots of its own two members and no other.
        await wait_until(lambda: parts.shift.num_busy == 2)
        # Nobody wants the surplus: its judge is told, and every slot is free again.
        await run.queue.call(calls.withdraw("2"))
        await wait_until(lambda: judge.cancelled == judge.waiting)
        await wait_until(lambda: parts.shift.num_busy == 0)
    await run.audit()
