"""Group rewards and samples that a limit cut, from the worker to what the trainer is handed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.batch import Batch
from rollstream.errors import Status, StopReason, ToolFault
from rollstream.group import Drop, EnvRule, GroupView, Keep, PromptGroup, Trajectory
from rollstream.queue import calls
from rollstream.wire import decode_header, encode_envs, encode_prompt
from tests.builders import a_prompt
from tests.unit.worker.works import answer
from worker.aggregate import judging
from worker.aggregate.aggregator import CONSUMER
from worker.aggregate.group_reward import GroupReward
from worker.aggregate.loader import LoadedFilter
from worker.bounded import in_thread
from worker.types import GenerateInput, GenerateOutput

from .parts import Parts, Run, a_run, wait_until

SCORED = EnvRule(group_reward=True)
STD = ("no_aborted", "reward_nonzero_std")


@contextlib.asynccontextmanager
async def a_run_with(url: str, name: str, rule: EnvRule, **changes: Any) -> AsyncIterator[Run]:
    async with a_run(url, name, envs=encode_envs({"default": rule}), **changes) as opened:
        yield opened


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run_with(valkey_url, run_name, SCORED) as opened:
        yield opened


ODD = "the reward mine.py:f returned str; it must return a number"


class Members:
    """A generate function whose members end as the list says: a reward, a stop, or a fault."""

    def __init__(self, *outcomes: Any, leaves: int = 1) -> None:
        self._outcomes, self._leaves = outcomes, leaves

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        outcome = self._outcomes[given.sample.member % len(self._outcomes)]
        if isinstance(outcome, Exception):
            raise outcome
        reward, stop = outcome if isinstance(outcome, tuple) else (outcome, StopReason.STOP)
        sample = answer(given, reward=reward)
        sample.stop_reason = stop
        samples = [sample, *(copy.deepcopy(sample) for _ in range(1, self._leaves))]
        return GenerateOutput(samples[0] if self._leaves == 1 else samples)


class Judge:
    """A group reward that gives members their place as reward, and notes what it was given."""

    def __init__(self, *failures: Exception) -> None:
        self.groups: list[list[Trajectory]] = []
        self._failures = list(failures)

    async def __call__(self, samples: list[Trajectory]) -> list[float]:
        self.groups.append(samples)
        if self._failures:
            raise self._failures.pop(0)
        return [float(place) for place in range(len(samples))]

    @property
    def reward(self) -> GroupReward:
        async def at_once(seconds: float) -> None:
            pass

        return GroupReward("mine.py:f", self, timeout_s=20, max_retries=1, sleep=at_once)


def start(run: Run, judge: Judge, *outcomes: Any, leaves: int = 1, **options: Any) -> Parts:
    known = {"rule": SCORED, "filters": STD, "slots": 16} | options
    parts = run.worker(
        generate=Members(*outcomes, leaves=leaves), group_reward=judge.reward, **known
    )
    parts.start()
    return parts


async def delivered(run: Run, groups: int = 1) -> Batch:
    async with await AsyncGroupStream.connect(run.url, run=run.queue.run) as stream:
        batch = await stream.next_batch(groups, 15)
        assert batch is not None
        await stream.ack(batch)
    await run.audit()
    return batch


async def dropped(run: Run) -> tuple[dict[str, int], Any]:
    await wait_until(run.drops, what="a drop")
    await run.audit()
    return await run.drops(), (await run.queue.past())[-1]


def figures(parts: Parts, name: str) -> dict[str, float]:
    """Return the counts of one metric, by its labels but for the environment."""
    parts.metrics.flush()
    return {
        "/".join(v for k, v in sample.labels.items() if k != "env"): sample.value
        for metric in parts.metrics.registry.prometheus.collect()
        for sample in metric.samples
        if sample.name == name and sample.value
    }


# --- group rewards -------------------------------------------------------------------------------
async def test_146_a_group_reward_scores_the_whole_group_once_and_the_trainer_reads_it(
    run: Run,
) -> None:
    await run.enqueue(0, 4, label="8")
    judge = Judge()
    parts = start(run, judge, None)
    batch = await delivered(run)
    assert batch.to_arrays()["reward"].tolist() == [0.0, 1.0, 2.0, 3.0]
    (given,) = judge.groups
    seen = [sample for sample in given if not isinstance(sample, list)]
    assert [(s.member, s.label, s.tokens.tolist()) for s in seen] == [
        (member, "8", [1, 2, 3, 4, 5]) for member in range(4)
    ]
    assert figures(parts, "rollout_reward_gained_total") == {"all": 6.0, "delivered": 6.0}
    assert figures(parts, "rollout_span_duration_seconds_count")["reward"] == 1, "of the group"


async def test_146_a_reward_that_is_there_is_kept_and_the_missing_ones_are_filled(
    run: Run,
) -> None:
    await run.enqueue(0, 4)
    start(run, Judge(), 0.5, None)
    assert (await delivered(run)).to_arrays()["reward"].tolist() == [0.5, 1.0, 0.5, 3.0]


async def test_a_group_that_brings_all_its_rewards_along_is_not_scored(run: Run) -> None:
    await run.enqueue(0, 2)
    judge = Judge()
    start(run, judge, 0.25, 0.75)
    assert (await delivered(run)).to_arrays()["reward"].tolist() == [0.25, 0.75]
    assert judge.groups == []


async def test_leaves_of_a_trajectory_get_its_one_reward(run: Run) -> None:
    await run.enqueue(0, 2)
    judge = Judge()
    start(run, judge, None, leaves=3)
    batch = await delivered(run)
    assert batch.to_arrays()["reward"].tolist() == [0.0] * 3 + [1.0] * 3
    assert [type(one) for one in judge.groups[0]] == [list, list]


async def test_a_failed_member_is_not_scored_and_its_group_not_where_it_is_short_anyway(
    run: Run,
) -> None:
    await run.enqueue(0, 3)
    judge, gone = Judge(), ToolFault("gone")
    start(run, judge, None, None, gone)
    drops, record = await dropped(run)
    assert drops == {"short_group": 1}
    assert record["detail"] == "2 of 3 usable, 3 needed: tool_error x1"
    assert judge.groups == []


async def test_a_failed_member_leaves_the_others_to_be_scored_where_they_are_enough(
    run: Run,
) -> None:
    await run.enqueue(0, 3)
    judge = Judge()
    start(run, judge, None, ToolFault("gone"), None, min_samples=2)
    batch = await delivered(run)
    assert [(s.member, s.reward) for s in batch.flat()] == [(0, 0.0), (2, 1.0)]


async def test_rewards_of_a_group_meet_the_filters_and_the_record_of_a_drop_has_them(
    run: Run,
) -> None:
    class Same(Judge):
        async def __call__(self, samples: list[Trajectory]) -> list[float]:
            return [0.5] * len(samples)

    await run.enqueue(0, 2)
    parts = start(run, Same(), None)
    drops, record = await dropped(run)
    assert drops == {"zero_std": 1}
    assert [decode_header(raw).reward for raw in record["headers"]] == [0.5, 0.5]
    assert figures(parts, "rollout_rewards_total") == {"all": 2.0}


async def test_a_group_reward_that_fails_for_good_leaves_its_members_missing_with_the_cause(
    run: Run,
) -> None:
    await run.enqueue(0, 2)
    judge = Judge(ValueError("boom"), ValueError("boom \ud800"))
    parts = start(run, judge, None)
    drops, record = await dropped(run)
    assert drops == {"short_group": 1}
    assert record["detail"] == (
        "0 of 2 usable, 2 needed: reward_error x2 (the reward mine.py:f raised ValueError: boom ? "
        "(asked 2 times))"
    )
    assert len(judge.groups) == 2
    assert figures(parts, "rollout_reward_errors_total") == {"raised": 2.0}
    assert figures(parts, "rollout_rewards_total") == {}
    assert figures(parts, "rollout_span_duration_seconds_count")["reward"] == 1


async def test_one_member_without_a_group_reward_is_told_to_the_trainer_with_the_cause(
    run: Run,
) -> None:
    class Odd(Judge):
        async def __call__(self, samples: list[Trajectory]) -> Any:
            return [1.0, "good", None, float("nan"), 0.0]

    await run.enqueue(0, 5)
    parts = start(run, Odd(), None, min_samples=2)
    batch = await delivered(run)
    assert [(s.member, s.reward) for s in batch.flat()] == [(0, 1.0), (4, 0.0)]
    (group,) = batch.groups
    assert [(m.member, m.status, m.reason, m.error) for m in group.missing] == [
        (1, Status.FAILED, "reward_error", f"{ODD}, a dictionary or None"),
        (2, Status.FAILED, "reward_error", "missing"),
        (3, Status.FAILED, "reward_error", "invalid"),
    ]  # fmt: skip
    assert figures(parts, "rollout_reward_errors_total") == {"invalid": 2.0, "missing": 1.0}
    assert figures(parts, "rollout_rewards_total") == {"all": 2.0, "delivered": 2.0}


async def test_a_filter_that_breaks_does_not_ask_the_group_reward_again(run: Run) -> None:
    seen: list[list[float]] = []

    class Partly(Judge):
        async def __call__(self, samples: list[Trajectory]) -> Any:
            self.groups.append(samples)
            return [1.0, None, 0.0]

    def breaks(group: GroupView) -> Keep:
        seen.append(group.rewards)
        raise KeyError("nope")

    await run.enqueue(0, 3)
    judge = Partly()
    broken = LoadedFilter("mine.py:g", breaks, built_in=False)
    start(run, judge, None, filters=(broken,), min_samples=2)
    assert (await dropped(run))[0] == {"filter_error": 1}
    assert (len(judge.groups), seen) == (1, [[1.0, 0.0]] * 3)


async def test_a_filter_that_asks_for_bodies_sees_the_rewards_of_the_group(run: Run) -> None:
    seen: list[Any] = []

    def looks(group: GroupView) -> Keep:
        seen.extend(m.trajectory.reward for m in group.members if m.trajectory)  # type: ignore[union-attr]  # no list
        return Keep()

    await run.enqueue(0, 2)
    filters = (LoadedFilter("mine.py:g", looks, built_in=False, needs="bodies"),)
    start(run, Judge(), None, filters=filters)
    await delivered(run)
    assert seen == [0.0, 1.0]


async def test_what_a_group_reward_writes_into_its_samples_goes_nowhere(run: Run) -> None:
    seen: list[Any] = []

    class Writes(Judge):
        async def __call__(self, samples: list[Trajectory]) -> list[float]:
            for leaves in samples:
                assert isinstance(leaves, list)
                leaves[0].reward, leaves[0].label, leaves[0].response_length = 5.0, "9", 0
                del leaves[1:]
            return [0.0, 1.0]

    def looks(group: GroupView) -> Keep:
        for member in group.members:
            assert isinstance(member.trajectory, list)
            seen.append([(s.reward, s.label, s.response_length) for s in member.trajectory])
        return Keep()

    await run.enqueue(0, 2, label="8")
    filters = (LoadedFilter("mine.py:g", looks, built_in=False, needs="bodies"),)
    start(run, Writes(), None, leaves=2, filters=filters)
    batch = await delivered(run)
    assert seen == [[(0.0, "8", 2)] * 2, [(1.0, "8", 2)] * 2]
    assert [(s.reward, s.label, s.response_length) for s in batch.flat()] == seen[0] + seen[1]


async def test_a_group_reward_that_hangs_delays_no_other_group(run: Run) -> None:
    release, hanging = asyncio.Event(), asyncio.Event()

    class Slow(Judge):
        async def __call__(self, samples: list[Trajectory]) -> list[float]:
            if samples[0].group_index == 0:  # type: ignore[union-attr]  # no list
                hanging.set()
                await release.wait()
            return [0.0, 1.0]

    for g in range(4):
        await run.enqueue(g, 2)
    start(run, Slow(), None)
    await hanging.wait()
    await run.ready(3)
    assert await run.state_of(0, 2) == "full"
    release.set()
    await run.ready(4)


async def test_a_group_that_begins_anew_while_it_is_scored_keeps_nothing_of_it(run: Run) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    class Held(Judge):
        async def __call__(self, samples: list[Trajectory]) -> list[float]:
            first = not self.groups
            self.groups.append(samples)
            if first:
                entered.set()
                await release.wait()
                return [7.0, 8.0]
            return [0.0, 1.0]

    await run.enqueue(0, 2)
    judge = Held()
    start(run, judge, None)
    await entered.wait()
    assert await run.queue.call(calls.requeue("0", 0)) == "requeued"
    release.set()
    assert (await delivered(run)).to_arrays()["reward"].tolist() == [0.0, 1.0]
    assert len(judge.groups) == 2


async def test_case_108_a_batch_does_not_wait_for_a_surplus_groups_slow_judge(
    valkey_url: str, run_name: str
) -> None:
    judging = asyncio.Event()

    class SlowForTheThird:
        async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
            if group.group_index == 2:
                judging.set()
                await asyncio.Event().wait()

    async with a_run_with(valkey_url, run_name, EnvRule(), lease_ms=400) as run:
        for g in range(3):
            await run.enqueue(g, 2)
        parts = run.worker(
            generate=Members(0.0, 1.0), scorer=SlowForTheThird(), filters=STD, slots=6
        )
        parts.start()
        await judging.wait()
        batch = await delivered(run, 2)
        assert sorted(batch.group_indexes) == [0, 1]
        await wait_until(lambda: parts.shift.num_busy == 2, what="two slots of the judge's")
        assert await run.queue.call(calls.withdraw("2")) == "dropped"
        await wait_until(lambda: parts.shift.num_busy == 0, what="free slots")


async def test_144_only_groups_that_a_filter_keeps_are_in_a_batch_and_others_make_room(
    valkey_url: str, run_name: str
) -> None:
    async def by_group(given: GenerateInput) -> GenerateOutput:
        return GenerateOutput(answer(given, reward=float((given.sample.group_index or 0) % 2)))

    async with a_run_with(valkey_url, run_name, EnvRule(), cap=4) as run:
        for g in range(4):
            await run.enqueue(g, 2)
        record = encode_prompt(a_prompt(4, 2))
        assert await run.queue.call(calls.enqueue(4, 2, record)) == "full"
        run.worker(generate=by_group, filters=("reward_range(1, 1)",)).start()
        batch = await delivered(run, 2)
        assert sorted(batch.group_indexes) == [1, 3]
        assert await run.drops() == {"range": 2}
        for g in range(4, 8):  # what was dropped and what was acked made room
            await run.enqueue(g, 2)


# --- samples that a limit cut --------------------------------------------------------------------
CUT = (0.0, StopReason.RESPONSE_LENGTH)


async def truncated(
    url: str, name: str, on_truncated: Any, *outcomes: Any, **options: Any
) -> tuple[Batch, list[Any]]:
    """Return the batch of one group of four, and what a filter saw of it."""
    seen: list[Any] = []

    def looks(group: GroupView) -> Keep:
        header = [m.header.leaves[-1].num_trainable for m in group.members if m.header]
        bodies = [m.trajectory for m in group.members if m.trajectory]
        masks = [int(s.loss_mask.sum()) for s in bodies]  # type: ignore[union-attr]  # no list
        seen.append((group.rewards, header, masks))
        return Keep()

    rule = EnvRule(on_truncated=on_truncated)
    async with a_run_with(url, name, rule) as run:
        await run.enqueue(0, 4)
        spy = LoadedFilter("mine.py:g", looks, built_in=False, needs="bodies")
        parts = run.worker(generate=Members(*outcomes), rule=rule, filters=(*STD, spy), **options)
        parts.start()
        return await delivered(run), seen


async def test_a_cut_sample_is_trained_where_it_is_kept(valkey_url: str, run_name: str) -> None:
    batch, seen = await truncated(valkey_url, run_name, "keep", 1.0, CUT)
    assert batch.to_arrays()["loss_mask"].sum(axis=1).tolist() == [2, 2, 2, 2]
    assert seen == [([1.0, 0.0, 1.0, 0.0], [2] * 4, [2] * 4)]


async def test_110_a_masked_one_stays_in_the_statistics_and_trains_no_token(
    valkey_url: str, run_name: str
) -> None:
    batch, seen = await truncated(valkey_url, run_name, "mask", 1.0, CUT)
    arrays = batch.to_arrays()
    assert arrays["loss_mask"].sum(axis=1).tolist() == [2, 0, 2, 0]
    assert arrays["attention_mask"].sum(axis=1).tolist() == [5] * 4
    assert arrays["reward"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert arrays["rollout_mask_sum"].tolist() == [2, 0, 2, 0]
    assert batch.metrics()["batch/trainable_tokens"] == 4
    assert batch.metrics()["batch/reward_mean"] == 0.5
    assert seen == [([1.0, 0.0, 1.0, 0.0], [2, 0, 2, 0], [2, 0, 2, 0])]


async def test_a_dropped_one_is_missing_with_its_stop_reason(
    valkey_url: str, run_name: str
) -> None:
    batch, seen = await truncated(valkey_url, run_name, "drop", 1.0, CUT, 0.0, 0.5, min_samples=3)
    assert [(s.member, s.reward) for s in batch.flat()] == [(0, 1.0), (2, 0.0), (3, 0.5)]
    (group,) = batch.groups
    assert [(m.member, m.status, m.reason) for m in group.missing] == [
        (1, Status.TRUNCATED, "response_length")
    ]
    assert seen[0][0] == [1.0, 0.0, 0.5]
    assert batch.metrics()["batch/missing/response_length"] == 1


async def test_a_group_whose_cut_members_are_dropped_is_short(
    valkey_url: str, run_name: str
) -> None:
    rule = EnvRule(on_truncated="drop")
    async with a_run_with(valkey_url, run_name, rule) as run:
        await run.enqueue(0, 2)
        run.worker(generate=Members(1.0, CUT), rule=rule).start()
        drops, record = await dropped(run)
        assert drops == {"short_group": 1}
        assert record["detail"] == "1 of 2 usable, 2 needed: response_length x1"


# --- drops in a row ------------------------------------------------------------------------------
async def test_two_aggregators_count_one_row_of_drops_and_the_trainer_hears_why_it_failed(
    valkey_url: str, run_name: str
) -> None:
    async with a_run_with(valkey_url, run_name, EnvRule(), max_drops=6) as run:
        for g in range(7):
            await run.enqueue(g, 2)
        first = run.worker(generate=Members(1.0, 0.0), filters=STD, slots=64)
        first.start(aggregate=False)

        async def are_full() -> bool:
            return (await run.queue.depths())["full"] == 7

        await wait_until(are_full, what="full groups")
        picky = LoadedFilter("reward_range", lambda group: _drop(), built_in=False)
        pair = [run.worker(filters=(picky,)).aggregator for _ in range(2)]
        for turn in range(6):
            entries = await run.queue.read_full(CONSUMER, count=1, block_s=0)
            info = await run.queue.info()
            assert info is not None
            assert info.state == "running"
            await pair[turn % 2].judge_entries(entries)
        info = await run.queue.info()
        assert info is not None
        assert info.state == "failed"
        assert info.error.startswith("6 groups in a row were dropped and none kept: custom 6;")
        assert await run.drops() == {"custom": 6}
        await run.audit()


def _drop() -> Drop:
    return Drop("too_easy", "all right")


async def test_a_large_group_is_read_in_a_thread_and_scored_alike(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    async def noted(function: Any, *args: Any) -> Any:
        threads.append(function.__name__)
        return await in_thread(function, *args)

    monkeypatch.setattr(judging, "in_thread", noted)
    monkeypatch.setattr(judging, "LARGE_BYTES", 10)
    await run.enqueue(0, 2)
    start(run, Judge(), None)
    assert (await delivered(run)).to_arrays()["reward"].tolist() == [0.0, 1.0]
    assert threads == ["view_of", "_decoded", "view_of"]
