"""Engines in the midst of an update that calls go on through: their label means no version."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine_pool import a_pool, ask, wait_until
from tests.integration.engines.test_pool_pauses import spans, state, states, two
from tests.scripted_engine import a_reply, scripted
from worker.engines.fleet.states import State
from worker.tito.turns import TurnRecord

IDS = [59, 79075, 90]


@pytest.mark.parametrize(
    ("said", "recorded"),
    [
        ((("5", 0, 1), ("5~6", 1, 2), ("6", 2, 3)), [(5, 0, 1), (-1, 1, 2), (6, 2, 3)]),
        ((("5", 0, 2), ("5~6", 2, 3)), [(5, 0, 2), (-1, 2, 3)]),
        ((("5~6", 0, 2), ("6", 2, 3)), [(5, 0, 0), (-1, 0, 2), (6, 2, 3)]),
        ((("5~6", 0, 3),), [(5, 0, 0), (-1, 0, 3)]),
    ],
)
async def test_tokens_that_an_update_made_unknown_are_kept_and_recorded_as_unknown(
    said: tuple[tuple[str, int, int], ...], recorded: list[tuple[int, int, int]]
) -> None:
    known = a_reply(weight_version="5")
    async with scripted(known, a_reply(IDS, weight_versions=spans(*said))) as engine:
        engine.weight_version = "5"
        async with a_pool(engine.url, probe_interval_s=60.0) as pool:
            assert await pool.probe()
            pool.set_version(5, {})
            await ask(pool, "a")  # an engine whose replies name their weights
            completion = await ask(pool, "b")
            assert pool.counters.retries == 0
    assert completion.versions == recorded
    record = TurnRecord.of([1], completion, dispatched_version=5, current_version=6)
    assert record.versions == recorded


async def test_reply_of_an_engine_that_began_anew_is_refused_through_an_update_too() -> None:
    known, fine = a_reply(weight_version="5"), a_reply(IDS, weight_versions=spans(("6", 0, 3)))
    anew = a_reply(IDS, weight_versions=spans(("default", 0, 1), ("5~6", 1, 2), ("6", 2, 3)))
    async with scripted(known, anew, fine) as engine:
        engine.weight_version = "5"
        async with a_pool(engine.url, probe_interval_s=0.1) as pool:
            assert await pool.probe()
            pool.set_version(5, {})
            await ask(pool, "a")
            asked = asyncio.create_task(ask(pool, "b"))
            await wait_until(lambda: pool.counters.retries == 1)
            assert (await asked).versions == [(6, 0, 3)]


async def test_engine_in_an_update_is_behind_until_it_has_a_versions_name() -> None:
    async with two("5", "5") as (a, b, pool):
        pool.set_version(5, {})
        a.weight_version = "5~6"
        assert await pool.probe()
        assert states(pool) == {a.url: "behind", b.url: "up"}
        assert [(e.version, e.lag) for e in pool.counters.engines] == [(-2, 5), (5, 0)]
        assert [engine.version for engine in pool.states()] == [-1, 5]
        for _ in range(4):
            await ask(pool, "x")
        assert a.requests == []
        a.weight_version = "6"
        pool.set_version(6, {})
        await wait_until(lambda: states(pool)[a.url] == "up")


async def test_engine_whose_first_update_broke_off_is_behind_though_no_version_was_ever_named(
) -> None:  # fmt: skip
    async with scripted() as engine:
        engine.weight_version = "0~1"
        async with a_pool(engine.url, probe_interval_s=60.0) as pool:
            assert await pool.probe()
            assert state(pool) is State.BEHIND
            pool.set_version(1, {})
            engine.weight_version = "default"  # a restart: nobody names weights here
            assert await pool.probe()
            assert state(pool) is State.UP
        async with a_pool(engine.url, probe_interval_s=60.0, require_version=False) as pool:
            engine.weight_version = "0~1"
            assert await pool.probe()
            assert state(pool) is State.UP
