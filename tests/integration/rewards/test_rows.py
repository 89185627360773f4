"""Rewards in a worker's whole run: what rows name, what fails, and what the trainer is handed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rollstream.async_stream import AsyncGroupStream
from rollstream.group import FinishedGroup
from rollstream.settings import RewardTable
from tests.integration.worker.parts import Run, a_run, wait_until
from tests.unit.worker.works import answer
from worker.rewards import build_scorer
from worker.types import GenerateInput, GenerateOutput

from .parts import Plain, serving


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name) as opened:
        yield opened


class Replies:
    """A generate function whose member k replies with the k-th text, and that counts its calls."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.calls: Counter[tuple[int | None, int]] = Counter()

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        sample = given.sample
        self.calls[sample.group_index, sample.member] += 1
        ids = tuple(map(ord, self._texts[sample.member]))
        return GenerateOutput(answer(given, reward=None, ids=ids))


def scorer_of(**table: Any) -> Any:
    renderer: Any = Plain()
    known = {"retry_backoff_s": 0.001}
    return build_scorer(RewardTable(**(known | table)), renderer=renderer, run_seed=0, is_own=False)


async def delivered(run: Run, num_groups: int) -> list[FinishedGroup]:
    async with await AsyncGroupStream.connect(run.url, run=run.queue.run) as stream:
        batch = await stream.next_batch(num_groups, 15)
        assert batch is not None
        await stream.ack(batch)
    await run.audit()
    return sorted(batch.groups, key=lambda group: group.group_index)


async def test_162_163_rows_of_one_run_are_scored_by_what_they_name(run: Run) -> None:
    await run.enqueue(0, 2, label="B", metadata={"rm_type": "gpqa"})
    await run.enqueue(1, 2, label="answer B", metadata={"rm_type": "f1"})
    await run.enqueue(2, 2, label="B", metadata={})
    replies = Replies("Answer: B", r"\boxed{B}")
    run.worker(generate=replies, scorer=scorer_of()).start()
    rewards = [[s.reward for s in group.flat()] for group in await delivered(run, 3)]
    assert rewards == [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


async def test_a_row_that_names_nonsense_is_dropped_with_its_cause_and_is_never_a_zero(
    run: Run,
) -> None:
    await run.enqueue(0, 2, metadata={"rm_type": "os:system"})
    replies = Replies("8", "8")
    parts = run.worker(generate=replies, scorer=scorer_of())
    parts.start()
    await wait_until(run.drops, what="a drop")
    assert await run.drops() == {"short_group": 1}
    [record] = await run.queue.past()
    assert "reward_error x2" in record["detail"]
    assert set(replies.calls.values()) == {1}  # nothing is generated again for a verdict
    await run.audit()


async def test_a_judge_that_is_away_for_a_moment_costs_no_sample_and_no_generation(
    run: Run,
) -> None:
    def second(_: Any, num_asked: int) -> Any:
        return web.Response(status=503) if num_asked <= 2 else 0.5

    async with serving(second) as server:
        await run.enqueue(0, 2)
        replies = Replies("7", "8")
        scorer = scorer_of(kind="remote", url=server.url)
        run.worker(generate=replies, scorer=scorer).start()
        [group] = await delivered(run, 1)
        await scorer.aclose()
    assert [sample.reward for sample in group.flat()] == [0.5, 0.5]
    assert len(server.bodies) == 4
    assert set(replies.calls.values()) == {1}


async def test_a_judge_that_stays_away_leaves_its_samples_out_and_the_others_in(run: Run) -> None:
    def poison(body: Any, _: int) -> Any:
        return web.Response(status=503) if body["final_text"] == "7" else 0.5

    async with serving(poison) as server:
        await run.enqueue(0, 3)
        scorer = scorer_of(kind="remote", url=server.url, max_retries=1)
        replies = Replies("7", "8", "9")
        run.worker(generate=replies, scorer=scorer, min_samples=2).start()
        [group] = await delivered(run, 1)
        await scorer.aclose()
    assert [sample.reward for sample in group.flat()] == [0.5, 0.5]
    [missing] = group.missing
    assert (missing.member, missing.reason) == (0, "reward_error")
    assert "answered 503" in missing.error
    assert "(asked 2 times)" in missing.error
    assert set(replies.calls.values()) == {1}
