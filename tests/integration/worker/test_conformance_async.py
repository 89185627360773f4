"""Conformance 149 to 154: what becomes of groups that broke, and how much runs at once."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator

import pytest

from rollstream.errors import Status, Withheld
from tests.unit.worker.works import answer
from worker.types import GenerateInput, GenerateOutput

from .parts import Gate, Run, a_run, wait_until

GENEROUS = {"on_stale": "requeue", "max_requeues": 3}


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, **GENEROUS) as opened:
        yield opened


async def settled(run: Run) -> None:
    """Wait until no group is live any more, and hold the accounts against the keys."""

    async def over() -> bool:
        return (await run.queue.depths())["live"] == 0

    await wait_until(over, what="no live group")
    await run.audit()


async def test_149_a_member_that_was_stopped_begins_at_its_prompt_uncharged_and_its_group_arrives(
    run: Run,
) -> None:
    seen: list[tuple[int | None, int, str, list[int]]] = []

    async def stopped_once(given: GenerateInput) -> GenerateOutput:
        sample = given.sample
        seen.append(
            (sample.group_index, sample.member, sample.response, list(sample.weight_versions))
        )
        if sample.group_index == 1 and len(seen) == 1:
            answer(given)
            sample.response, sample.weight_versions = "half a", [7]
            raise Withheld
        return GenerateOutput(answer(given, reward=float(sample.member)))

    for group_index in (1, 2):
        await run.enqueue(group_index, 2)
    run.worker(generate=stopped_once, slots=1).start()
    await run.ready(2)
    members = [(1, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert sorted(seen) == [(*member, "", []) for member in members]
    names = ("given_back", "attempts", "requeued")
    assert [await run.counter(name) for name in names] == [1, 0, 0]
    await run.audit()


async def test_149_a_group_with_an_aborted_result_is_dropped_and_never_begins_anew(
    run: Run,
) -> None:
    calls = 0

    async def aborted(given: GenerateInput) -> GenerateOutput:
        nonlocal calls
        calls += 1
        sample = answer(given, reward=float(given.sample.member))
        if sample.member == 0:
            sample.status = Status.ABORTED
        return GenerateOutput(sample)

    await run.enqueue(1, 2)
    run.worker(generate=aborted, filters=("no_aborted",)).start()
    await settled(run)
    assert await run.drops() == {"no_aborted": 1}
    assert (calls, await run.counter("requeued")) == (2, 0)


async def test_152_slots_are_counted_in_members_and_never_exceeded(run: Run) -> None:
    gate = Gate()
    for group_index in (1, 2, 3):
        await run.enqueue(group_index, 2)
    parts = run.worker(generate=gate, slots=3)
    parts.start()
    await wait_until(lambda: len(gate.started) == 3)
    assert sorted(gate.started) == [(1, 0), (1, 1), (2, 0)]
    assert (parts.shift.num_busy, (await run.queue.depths())["l"]) == (3, 3)


async def test_153_one_aborted_leaf_of_a_list_drops_the_whole_group_once(run: Run) -> None:
    calls = 0

    async def list_with_an_aborted_leaf(given: GenerateInput) -> GenerateOutput:
        nonlocal calls
        calls += 1
        sample = answer(given, reward=float(given.sample.member))
        if sample.member == 1:
            return GenerateOutput(sample)
        broken = copy.copy(sample)
        broken.status = Status.ABORTED
        return GenerateOutput([sample, broken])

    await run.enqueue(1, 2)
    run.worker(generate=list_with_an_aborted_leaf, filters=("no_aborted",)).start()
    await settled(run)
    assert await run.drops() == {"no_aborted": 1}
    assert (calls, await run.counter("requeued")) == (2, 0)


async def test_154_what_a_filter_refused_never_begins_anew_whatever_stale_groups_do(
    run: Run,
) -> None:
    calls = 0

    async def alike(given: GenerateInput) -> GenerateOutput:
        nonlocal calls
        calls += 1
        return GenerateOutput(answer(given, reward=1.0))

    await run.enqueue(1, 2)
    parts = run.worker(generate=alike, filters=("no_aborted", "reward_nonzero_std"))
    parts.start()
    await settled(run)
    assert await run.drops() == {"zero_std": 1}
    assert (calls, await run.counter("requeued")) == (2, 0)
    parts.metrics.flush()
    counted = parts.metrics.registry.counter("rollout_judged_groups_total", "default", "dropped")
    assert counted._value.get() == 1
