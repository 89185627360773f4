"""The aggregator over a real server: take-over, broken filters, and how much it asks of Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.group import Drop, GroupView, Keep
from rollstream.queue import calls
from worker.aggregate.aggregator import CONSUMER, TRIES
from worker.aggregate.loader import LoadedFilter
from worker.bounded import THREADS

from .parts import Parts, Run, a_run, wait_until


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name) as opened:
        yield opened


async def full(run: Run, groups: int, n: int = 2, **options: Any) -> Parts:
    """Return a worker that made `groups` full groups and judged none of them."""
    for g in range(groups):
        await run.enqueue(g, n)
    parts = run.worker(slots=64, **options)
    parts.start(aggregate=False)

    async def all_full() -> bool:
        return (await run.queue.depths())["full"] == groups

    await wait_until(all_full, what="full groups")
    return parts


def a_filter(function: Any, needs: Any = "headers") -> LoadedFilter:
    return LoadedFilter("mine.py:f", function, built_in=False, needs=needs)


async def judge_all(parts: Parts, count: int = 32) -> None:
    entries = await parts.queue.read_full(CONSUMER, count=count, block_s=0)
    await parts.aggregator.judge_entries(entries)


async def test_many_groups_cost_one_round_trip_for_headers_and_one_for_verdicts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await full(run, 25, filters=("no_aborted", "reward_nonzero_std"))
    await judge_all(parts, count=1)  # the server knows the script from here on
    entries = await run.queue.read_full(CONSUMER, count=32, block_s=0)
    trips: list[int] = []
    send = run.queue._send

    async def counted(commands: Any, *rest: Any) -> Any:
        trips.append(len(commands))
        return await send(commands, *rest)

    monkeypatch.setattr(run.queue, "_send", counted)
    await parts.aggregator.judge_entries(entries)

    assert trips == [24, 24]
    assert (await run.queue.depths())["ready"] == 25


async def test_an_entry_that_another_aggregator_left_is_taken_over_and_judged_once(
    run: Run,
) -> None:
    parts = await full(run, 3, claim_idle_s=0.05)
    # Another aggregator took them and died before it said anything.
    assert len(await run.queue.read_full(CONSUMER, count=10, block_s=0)) == 3
    await asyncio.sleep(0.06)
    task = asyncio.create_task(parts.aggregator.run())

    await run.ready(3)
    task.cancel()
    assert (await run.queue.depths())["full"] == 0
    await run.audit()


async def test_two_aggregators_that_judge_one_group_decide_once(run: Run) -> None:
    parts = await full(run, 1)
    (entry,) = await run.queue.read_full(CONSUMER, count=1, block_s=0)

    await parts.aggregator.judge_entries([entry])
    await parts.aggregator.judge_entries([entry])

    assert (await run.queue.depths())["ready"] == 1
    parts.metrics.flush()
    kept = parts.metrics.registry.counter("rollout_judged_groups_total", "default", "ready")
    assert kept._value.get() == 1
    await run.audit()


async def test_a_filter_that_raises_is_tried_three_times_and_its_group_dropped(run: Run) -> None:
    tried: list[int] = []

    def breaks(group: GroupView) -> Keep:
        tried.append(group.group_index)
        if group.group_index == 1:
            raise KeyError("nope")
        return Keep()

    parts = await full(run, 3, filters=(a_filter(breaks),))
    await judge_all(parts)

    assert tried == [0, 1, 1, 1, 2]
    assert await run.drops() == {"filter_error": 1}
    (drop,) = await run.queue.past()
    assert "KeyError" in str(drop)
    assert (await run.queue.depths())["ready"] == 2


async def test_a_group_whose_judgement_kills_aggregators_is_dropped_at_its_fourth_delivery(
    run: Run,
) -> None:
    parts = await full(run, 1, claim_idle_s=0.0)
    await run.queue.read_full(CONSUMER, count=1, block_s=0)
    for _ in range(2):
        await run.queue.claim_full(CONSUMER, idle_s=0, count=1)

    await parts.aggregator._take_over()

    assert await run.drops() == {"filter_error": 1}


@pytest.mark.slow
async def test_groups_read_together_with_one_that_ends_aggregators_are_all_kept(
    run: Run,
) -> None:
    judged: list[int] = []

    async def never(group: GroupView) -> Keep:
        judged.append(group.group_index)
        if group.group_index == 2:
            await asyncio.Event().wait()  # until its aggregator dies
        return Keep()

    options: dict[str, Any] = {"filters": (a_filter(never),), "claim_idle_s": 0.6}
    await full(run, 5, **options)
    # The first one dies with all of them in hand.
    assert len(await run.queue.read_full(CONSUMER, count=10, block_s=0)) == 5
    for life in range(1, TRIES):
        dying = asyncio.create_task(run.worker(**options).aggregator.run())
        await wait_until(lambda life=life: judged.count(2) == life)
        await run.ready(4)
        dying.cancel()

    last = asyncio.create_task(run.worker(**options).aggregator.run())
    await wait_until(run.drops)
    last.cancel()

    assert await run.drops() == {"filter_error": 1}
    (drop,) = await run.queue.past()
    assert drop["group_index"] == "2"
    assert "3 aggregators had it and died or stood still" in drop["detail"]
    assert sorted(judged) == [0, 1, 2, 2, 3, 4]
    assert (await run.queue.depths())["ready"] == 4


async def test_a_broken_filter_fails_the_run_where_that_is_configured(run: Run) -> None:
    def breaks(group: GroupView) -> Keep:
        raise ZeroDivisionError("by zero")

    parts = await full(run, 2, filters=(a_filter(breaks),), stop_on_filter_error=True)
    await judge_all(parts)

    info = await run.queue.info()
    assert info is not None
    assert info.state == "failed"
    assert "filter_error: filter mine.py:f: ZeroDivisionError" in info.error


async def test_a_group_that_ended_or_began_anew_since_its_entry_was_read_is_no_filters_business(
    run: Run,
) -> None:
    def breaks(group: GroupView) -> Keep:
        raise ZeroDivisionError("by zero")

    parts = await full(run, 3, filters=(a_filter(breaks),), stop_on_filter_error=True)
    entries = await run.queue.read_full(CONSUMER, count=10, block_s=0)
    assert await run.queue.call(calls.withdraw("0")) == "dropped"
    assert await run.queue.call(calls.requeue("1", 0)) == "requeued"
    assert await run.queue.call(calls.requeue("2", 0)) == "requeued"
    await wait_until(lambda: are_full_again(run, 2))  # under other entries
    await parts.aggregator.judge_entries(entries)

    info = await run.queue.info()
    assert info is not None
    assert info.state == "running"
    assert await run.drops() == {"withdrawn": 1}


async def are_full_again(run: Run, count: int) -> bool:
    return (await run.queue.depths())["full"] == count


async def test_a_group_that_begins_anew_while_its_bodies_are_read_is_not_judged_by_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[GroupView] = []

    def looks(group: GroupView) -> Keep:
        seen.append(group)
        return Keep()

    parts = await full(run, 1, filters=(a_filter(looks, "bodies"),))
    entries = await run.queue.read_full(CONSUMER, count=10, block_s=0)
    read = run.queue.groups

    async def late(*args: Any, **options: Any) -> Any:
        assert await run.queue.call(calls.requeue("0", 0)) == "requeued"
        return await read(*args, **options)

    monkeypatch.setattr(run.queue, "groups", late)
    await parts.aggregator.judge_entries(entries)
    assert not seen
    assert (await run.queue.depths())["ready"] == 0


async def test_a_filter_that_asks_for_bodies_gets_trajectories_and_the_rows_metadata(
    run: Run,
) -> None:
    seen: list[tuple[Any, ...]] = []

    async def looks(group: GroupView) -> Keep | Drop:
        for member in group.members:
            sample = member.trajectory
            assert sample is not None
            assert not isinstance(sample, list)
            seen.append((member.member, sample.tokens.tolist(), group.metadata["level"]))
        return Drop("seen enough")

    await run.enqueue(0, 2, metadata={"level": 3})
    run.worker(filters=(a_filter(looks, "bodies"),)).start()

    await wait_until(run.drops)
    assert seen == [(0, [1, 2, 3, 4, 5], 3), (1, [1, 2, 3, 4, 5], 3)]
    assert await run.drops() == {"custom": 1}
    (drop,) = await run.queue.past()
    assert "seen enough" in str(drop)


async def test_a_filter_that_hangs_delays_no_other_group_and_is_asked_once(run: Run) -> None:
    asked: list[int] = []
    release = threading.Event()

    def hangs(group: GroupView) -> Keep:
        asked.append(group.group_index)
        if group.group_index == 0:
            release.wait(30)
        return Keep()

    parts = await full(run, 3, filters=(a_filter(hangs),), filter_timeout_s=1.0)
    task = asyncio.create_task(parts.aggregator.run())
    try:
        await run.ready(2)
        assert await run.drops() == {}
        await wait_until(run.drops)
        assert await run.drops() == {"filter_error": 1}
        (drop,) = await run.queue.past()
        assert drop["detail"] == "filter mine.py:f: no answer within 1 s"
        assert sorted(asked) == [0, 1, 2]
        assert THREADS.num_hung == 1
    finally:
        release.set()
        task.cancel()
    await wait_until(lambda: THREADS.num_hung == 0)


async def test_a_slow_filter_keeps_its_groups_from_being_taken_over(run: Run) -> None:
    judged: list[int] = []
    release = asyncio.Event()

    async def slow(group: GroupView) -> Keep:
        judged.append(group.group_index)
        await release.wait()
        return Keep()

    options: dict[str, Any] = {"filters": (a_filter(slow),), "claim_idle_s": 0.8}
    first = await full(run, 3, **options)
    second = run.worker(**options)
    tasks = [asyncio.create_task(p.aggregator.run()) for p in (first, second)]
    await wait_until(lambda: len(judged) == 3)
    await asyncio.sleep(2.0)  # more than two idle times
    release.set()
    await run.ready(3)
    for task in tasks:
        task.cancel()
    assert sorted(judged) == [0, 1, 2]


@pytest.mark.slow
async def test_a_group_that_waits_to_be_judged_alone_is_not_taken_over(run: Run) -> None:
    alone = ""
    release, others = asyncio.Event(), asyncio.Event()

    async def slow(group: GroupView) -> Keep:
        if str(group.group_index) != alone:
            others.set()
            await release.wait()
        return Keep()

    options: dict[str, Any] = {"filters": (a_filter(slow),), "claim_idle_s": 0.6}
    first = await full(run, 2, **options)
    second = run.worker(**options)
    # Two aggregators had this one: whoever takes it over judges it with nothing else in hand.
    (left,) = await run.queue.read_full(CONSUMER, count=1, block_s=0)
    (left,) = await run.queue.claim_full(CONSUMER, idle_s=0, count=1)
    alone = left.group_index
    tasks = [asyncio.create_task(first.aggregator.run())]
    await others.wait()

    async def is_taken_over() -> bool:
        key, message = f"{run.queue.prefix}full", left.message_id
        (at,) = await run.queue.client.xpending_range(key, "aggregators", message, message, 1)
        return bool(at["times_delivered"] == TRIES)

    await wait_until(is_taken_over, what="a takeover")
    tasks.append(asyncio.create_task(second.aggregator.run()))
    await asyncio.sleep(1.5)  # more than two idle times
    release.set()

    async def is_over() -> bool:
        return (await run.queue.depths())["full"] == 0

    await wait_until(is_over, what="verdicts")
    for task in tasks:
        task.cancel()
    assert await run.drops() == {}
    assert (await run.queue.depths())["ready"] == 2


async def test_aggregators_at_once_judge_each_group_once(run: Run) -> None:
    judged: list[int] = []

    def counts(group: GroupView) -> Keep:
        judged.append(group.group_index)
        return Keep()

    parts = await full(run, 60, filters=(a_filter(counts),))
    others = [run.worker(filters=(a_filter(counts),)) for _ in range(3)]
    tasks = [asyncio.create_task(p.aggregator.run()) for p in (parts, *others)]
    await run.ready(60)
    for task in tasks:
        task.cancel()
    assert sorted(judged) == list(range(60))
    await run.audit()


async def test_the_idle_time_of_a_takeover_follows_the_lease(
    valkey_url: str, run_name: str
) -> None:
    async with a_run(valkey_url, run_name, lease_ms=15_000) as run:
        parts = run.worker(claim_idle_s=None)
        info = await run.queue.info()
        assert info is not None
        parts.view.opened(info)
        assert parts.aggregator.idle_s == 30.0


async def test_a_group_that_ended_meanwhile_only_loses_its_entry(run: Run) -> None:
    parts = await full(run, 1)
    entries = await run.queue.read_full(CONSUMER, count=1, block_s=0)
    await run.queue.client.delete(f"{run.queue.prefix}g:0", f"{run.queue.prefix}b:0")

    await parts.aggregator.judge_entries(entries)

    assert (await run.queue.depths())["full"] == 0


async def test_an_aggregator_outlives_an_emptied_redis(run: Run) -> None:
    parts = await full(run, 1)
    task = asyncio.create_task(parts.aggregator.run())
    await run.ready(1)
    for key in await run.queue.client.keys(f"{run.queue.prefix}*"):
        await run.queue.client.delete(key)
    await run.open()
    await run.enqueue(5, 2)
    parts.heart.nudge()

    await run.ready(1)
    assert not task.done()
    task.cancel()


async def test_an_aggregator_that_is_stopped_judges_what_it_has_in_hand(run: Run) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(group: GroupView) -> Keep:
        entered.set()
        await release.wait()
        return Keep()

    parts = await full(run, 1, filters=(a_filter(slow),))
    judging = asyncio.create_task(parts.aggregator.run())
    await entered.wait()
    parts.aggregator.stop()
    release.set()

    await asyncio.wait_for(judging, 10)
    assert (await run.queue.depths())["ready"] == 1
