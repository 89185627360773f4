"""Cases H over a real server: rollout, aggregator, and what the trainer is handed.

The pure judgements are in `tests/unit/worker/test_filters.py` and `test_judge.py`; here every case
goes through lease, complete, judge, deliver and audit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.batch import Batch
from rollstream.errors import EngineFault, Status, StopReason, ToolFault
from rollstream.group import GroupView, Keep
from tests.integration.worker.parts import Parts, Run, a_run, wait_until
from tests.unit.worker.works import answer
from worker.aggregate.loader import LoadedFilter
from worker.types import GenerateInput, GenerateOutput

DEFAULTS = ("no_aborted", "reward_nonzero_std")


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name) as opened:
        yield opened


class Outcomes:
    """A generate function: (group, member) → a reward, a stop reason with one, or a fault."""

    def __init__(self, outcomes: Mapping[tuple[int, int], Any], **fields: Any) -> None:
        self._outcomes, self._fields = outcomes, fields
        self.started: list[tuple[int, int]] = []
        self.turn: dict[tuple[int, int], asyncio.Event] = {}
        """Where a member is named here, it ends only after its event was set."""

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        assert given.sample.group_index is not None
        key = (given.sample.group_index, given.sample.member)
        self.started.append(key)
        if key in self.turn:
            await self.turn[key].wait()
        outcome = self._outcomes[key]
        if isinstance(outcome, Exception):
            raise outcome
        reward, stop = outcome if isinstance(outcome, tuple) else (outcome, StopReason.STOP)
        sample = answer(given, reward=reward)
        sample.stop_reason = stop
        sample.remove_sample = stop is StopReason.RESPONSE_LENGTH
        return GenerateOutput(sample)


def of_group(group_index: int, outcomes: Sequence[Any]) -> dict[tuple[int, int], Any]:
    return {(group_index, member): outcome for member, outcome in enumerate(outcomes)}


async def start(run: Run, outcomes: Outcomes, n: int, **options: Any) -> Parts:
    """Enqueue every group of `outcomes` with n members and start one worker."""
    for group_index in sorted({g for g, _ in outcomes._outcomes}):
        await run.enqueue(group_index, n)
    parts = run.worker(generate=outcomes, slots=16, **({"filters": DEFAULTS} | options))
    parts.start()
    return parts


async def delivered(run: Run, groups: int) -> Batch:
    """Return the trainer's next batch, acked."""
    async with await AsyncGroupStream.connect(run.url, run=run.queue.run) as stream:
        batch = await stream.next_batch(groups, 10)
        assert batch is not None
        await stream.ack(batch)
    await run.audit()
    return batch


async def dropped(run: Run) -> tuple[dict[str, int], str]:
    """Return the drops by reason, once there is one, and what is told about the last."""
    await wait_until(run.drops, what="a drop")
    await run.audit()
    return await run.drops(), str((await run.queue.past())[-1])


def missing_of(batch: Batch) -> list[tuple[int, Status, str, str]]:
    [group] = batch.groups
    return [(m.member, m.status, m.reason, m.error) for m in group.missing]


# --- 95, 97: no verdict --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([None] * 4, "0 of 4 usable, 4 needed: reward_error (missing) x4"),
        ([1.0, None, 0.0, 1.0], "3 of 4 usable, 4 needed: reward_error (missing) x1"),
        ([1.0, math.nan, 0.0, 1.0], "3 of 4 usable, 4 needed: reward_error (invalid) x1"),
        ([1.0, math.nan, 1.0, 1.0], "3 of 4 usable, 4 needed: reward_error (invalid) x1"),
    ],
)
async def test_case_95_97_a_group_with_a_member_without_verdict_is_dropped_as_short_and_told_why(
    rewards: list[float | None], told: str, run: Run
) -> None:
    await start(run, Outcomes(of_group(0, rewards)), 4)
    drops, record = await dropped(run)
    assert drops == {"short_group": 1}
    assert told in record


@pytest.mark.parametrize(("odd", "error"), [(None, "missing"), (math.nan, "invalid")])
async def test_case_95_97_min_samples_delivers_the_others_and_never_a_zero_or_a_nan(
    odd: float | None, error: str, run: Run
) -> None:
    await start(run, Outcomes(of_group(0, [1.0, odd, 0.0, 1.0])), 4, min_samples=3)
    batch = await delivered(run, 1)
    assert batch.to_arrays()["reward"].tolist() == [1.0, 0.0, 1.0]
    assert [sample.member for sample in batch.flat()] == [0, 2, 3]
    assert missing_of(batch) == [(1, Status.FAILED, "reward_error", error)]
    assert batch.metrics()["batch/reward_mean"] == pytest.approx(2 / 3)
    assert batch.metrics()["batch/missing/reward_error"] == 1


# --- 98 to 100: spread ---------------------------------------------------------------------------
async def test_case_98_a_group_of_one_is_kept_once(run: Run) -> None:
    outcomes = Outcomes(of_group(0, [5.0]))
    await start(run, outcomes, 1)
    assert (await delivered(run, 1)).to_arrays()["reward"].tolist() == [5.0]
    assert outcomes.started == [(0, 0)]
    assert await run.drops() == {}


@pytest.mark.parametrize(
    ("rewards", "filters"),
    [
        ([1.0, 1.0, 1.0000000010], DEFAULTS),
        ([0.1 + 0.2, 0.3], DEFAULTS),
        ([0.3, 0.3], DEFAULTS),
        ([0.42] * 4, ("reward_range(0.1, 0.9)", *DEFAULTS)),
    ],
)
async def test_case_99_100_rewards_that_differ_by_rounding_only_are_zero_std(
    rewards: list[float], filters: tuple[str, ...], run: Run
) -> None:
    await start(run, Outcomes(of_group(0, rewards)), len(rewards), filters=filters)
    assert (await dropped(run))[0] == {"zero_std": 1}


# --- 102: uneven groups --------------------------------------------------------------------------
async def test_case_102_members_that_end_in_turns_stay_with_their_own_group(run: Run) -> None:
    gone = EngineFault("gone", detail="refused")
    outcomes = Outcomes({(0, 0): 1.0, (0, 1): 3.0, (1, 0): 5.0, (1, 1): gone})
    outcomes.turn = {key: asyncio.Event() for key in [(0, 0), (1, 0), (0, 1), (1, 1)]}
    await start(run, outcomes, 2)
    await wait_until(lambda: len(outcomes.started) == 4)
    for done, key in enumerate([(0, 0), (1, 0), (0, 1)], 1):
        outcomes.turn[key].set()
        await wait_until(lambda done=done: _is(run, "completed", done))
    outcomes.turn[1, 1].set()
    drops, record = await dropped(run)
    assert drops == {"short_group": 1}
    assert "engine_error" in record
    batch = await delivered(run, 1)
    assert batch.group_indexes == [0]
    assert batch.to_arrays()["reward"].tolist() == [1.0, 3.0]
    assert batch.to_arrays()["group_index"].tolist() == [0, 0]
    assert batch.metrics()["batch/reward_mean"] == 2.0


async def _is(run: Run, name: str, count: int) -> bool:
    return await run.counter(name) == count


# --- 103: a member that fails for good -----------------------------------------------------------
SANDBOX = ToolFault("sandbox lost", retryable=True)


@pytest.mark.parametrize("min_samples", [None, 7])
async def test_case_103_a_member_fails_after_its_retries_and_its_siblings_run_once(
    min_samples: int | None, run: Run
) -> None:
    rewards: list[Any] = [float(member % 2) for member in range(8)]
    rewards[5] = SANDBOX
    outcomes = Outcomes(of_group(0, rewards))
    await start(run, outcomes, 8, min_samples=min_samples)
    if min_samples is None:
        drops, record = await dropped(run)
        assert drops == {"short_group": 1}
        assert "sandbox lost" in record
    else:
        batch = await delivered(run, 1)
        assert missing_of(batch) == [
            (5, Status.FAILED, "tool_error", "ToolFault: sandbox lost"),
        ]  # fmt: skip
        assert batch.to_arrays()["reward"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert [outcomes.started.count((0, member)) for member in range(8)] == [1] * 5 + [3] + [1] * 2


async def test_case_103_one_usable_member_left_of_eight_is_dropped(run: Run) -> None:
    outcomes = Outcomes(of_group(0, [1.0, *[EngineFault("gone", detail="refused")] * 7]))
    await start(run, outcomes, 8, min_samples=1)
    assert (await dropped(run))[0] == {"zero_std": 1}


# --- 104: an impossible prompt -------------------------------------------------------------------
async def test_case_104_a_refused_prompt_is_tried_once_a_member_and_says_the_engines_words(
    run: Run,
) -> None:
    refusal = EngineFault("http://e answered 400: tool choice not enabled", detail="refused")
    fine = {(g, i): float(i) for g in range(10) for i in range(2) if g != 7}
    outcomes = Outcomes({**fine, (7, 0): refusal, (7, 1): refusal})
    await start(run, outcomes, 2, fail_after_groups=2)
    drops, record = await dropped(run)
    assert drops == {"short_group": 1}
    assert "tool choice not enabled" in record
    batch = await delivered(run, 9)
    assert batch.group_indexes == [g for g in range(10) if g != 7]
    assert [outcomes.started.count((7, member)) for member in range(2)] == [1, 1]


# --- 110: what counts and what trains ------------------------------------------------------------
@pytest.mark.parametrize(
    ("ended", "status", "reason"),
    [
        (EngineFault("connection lost", detail="refused"), Status.FAILED, "engine_error"),
        ((0.0, StopReason.ABORT_REQUESTED), Status.ABORTED, "abort_requested"),
    ],
    ids=["failed", "aborted"],
)
async def test_case_110_infrastructure_leaves_the_statistics_and_a_masked_truncation_stays(
    ended: Any, status: Status, reason: str, run: Run
) -> None:
    seen: list[list[float]] = []

    def look(group: GroupView) -> Keep:
        seen.append(group.rewards)
        return Keep()

    spy = LoadedFilter("mine.py:look", look, built_in=False, needs="headers")
    rewards = [1.0, 0.0, (0.0, StopReason.RESPONSE_LENGTH), ended]
    await start(run, Outcomes(of_group(0, rewards)), 4, min_samples=3, filters=(spy, DEFAULTS[1]))
    batch = await delivered(run, 1)
    assert seen == [[1.0, 0.0, 0.0]]
    assert [m[:3] for m in missing_of(batch)] == [(3, status, reason)]
    arrays = batch.to_arrays()
    assert arrays["reward"].tolist() == [1.0, 0.0, 0.0]
    assert arrays["loss_mask"].sum(axis=1).tolist() == [2, 2, 0]
    assert [sample.status for sample in batch.flat()] == [
        Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED,
    ]  # fmt: skip
    assert batch.metrics()["batch/reward_mean"] == pytest.approx(1 / 3)
