"""Engines that join and leave at run time, what is asked of them first, and how much they get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.errors import ConfigError, EngineFault
from rollstream.settings import EngineTable, EnvTable, SamplingTable, Settings
from tests.engine_pool import LOOKS, a_pool, ask, chosen, key_of, one_token, wait_until
from tests.scripted_engine import ScriptedEngine, a_reply, hang, reset, scripted
from worker.engines import create_engine, samples_scaled
from worker.engines.fleet.pool import EnginePool
from worker.engines.fleet.retry_budget import IN_HAND
from worker.engines.sim.http import Exchange, port_of, serve

FULL = (503, b'{"error":{"message":"The request queue is full."}}')


def urls(pool: EnginePool) -> list[str]:
    return [engine.url for engine in pool.states()]


def up(pool: EnginePool) -> set[str]:
    return {engine.url for engine in pool.states() if engine.state == "up"}


async def fault_of(pool: EnginePool, key: str = "g1", **options: Any) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await ask(pool, key, **options)
    return caught.value


@contextlib.asynccontextmanager
async def a_router(answer: dict[str, Any], path: str = "/workers") -> AsyncIterator[str]:
    """Yield the URL of a router that answers this, as it is then."""

    def handle(exchange: Exchange) -> None:
        if exchange.path == path:
            exchange.answer(200, json.dumps(answer).encode())
        else:
            exchange.answer(404, b"{}")

    server = await serve(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port_of(server)}"
    finally:
        server.close()


# --- membership ----------------------------------------------------------------------------------
async def test_engine_that_leaves_ends_its_calls_and_gets_no_other() -> None:
    async with scripted(hang) as a, scripted() as b, a_pool(a.url, b.url) as pool:
        assert await pool.probe()
        key = key_of(pool, a.url)
        task = asyncio.create_task(ask(pool, key))
        await wait_until(lambda: len(a.requests) == 1)
        pool.set_members([b.url])
        assert urls(pool) == [b.url]
        assert (await ask(pool, key)).engine == b.url
        a.raw[0].answer(200, a_reply([7]))
        assert (await task).engine == a.url
        seen = len(a.log)
        pool.set_members(None)
        await wait_until(lambda: a.url in up(pool))
        assert len(a.log) > seen  # it was asked before it got anything
        a.steps[:] = [a_reply()]
        assert (await ask(pool, key)).engine == a.url


async def test_engine_that_comes_back_before_its_calls_ended_is_the_same_one() -> None:
    async with scripted(hang) as a, scripted() as b, a_pool(a.url, b.url) as pool:
        assert await pool.probe()
        task = asyncio.create_task(ask(pool, key_of(pool, a.url)))
        await wait_until(lambda: len(a.requests) == 1)
        pool.set_members([b.url])
        pool.set_members([a.url, b.url])
        assert [engine.in_flight for engine in pool.states()] == [1, 0]
        a.raw[0].answer(200, a_reply([7]))
        await task
        assert [engine.in_flight for engine in pool.states()] == [0, 0]


async def test_engine_that_joins_takes_calls_only_after_it_answered() -> None:
    async with scripted() as a, scripted() as b, a_pool(a.url) as pool:
        await ask(pool)
        b.info_status = 500
        pool.set_members([a.url, b.url])
        assert [engine.state for engine in pool.states()] == ["up", "down"]
        await wait_until(lambda: "/model_info" in b.paths())
        for i in range(10):
            await ask(pool, f"x{i}")
        assert b.requests == []
        b.info_status = 200
        await wait_until(lambda: b.url in up(pool))
        assert (await ask(pool, key_of(pool, b.url))).engine == b.url
        assert pool.counters.ejections == 0  # it had never been away


async def test_engine_that_joins_with_older_weights_is_behind() -> None:
    async with scripted() as a, scripted() as b, a_pool(a.url) as pool:
        a.weight_version, b.weight_version = "3", "2"
        pool.set_version(3, {})
        await ask(pool)
        pool.set_members([a.url, b.url])
        await wait_until(lambda: pool.states()[1].state == "behind")
        b.weight_version = "3"
        await wait_until(lambda: b.url in up(pool))


async def test_pool_without_members_says_so_and_serves_as_soon_as_there_is_one() -> None:
    async with scripted() as a, a_pool(a.url, backoff_s=60.0, backoff_max_s=60.0) as pool:
        pool.set_members([])
        assert not pool.healthy()
        assert not pool.alive()
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: pool.counters.waits == 1)
        pool.set_members(None)
        assert (await task).engine == a.url
        pool.set_members([])
        assert "no address has named any" in (await fault_of(pool, deadline_s=0.05)).message


async def test_urls_of_the_trainer_that_are_none_are_left_out() -> None:
    async with scripted() as a, scripted() as b, a_pool(a.url) as pool:
        none = ["ftp://x", "http://", f"http://{'a' * 64}.com", "http://a..b", "http://xn--a:1"]
        pool.set_members(
            [*none, b.url + "/", b.url, f"{b.url}?a=b", *(f"dns+{url}" for url in none)]
        )
        assert urls(pool) == [b.url]
        await wait_until(lambda: up(pool) == {b.url})
        pool.set_members(None)
        assert urls(pool) == [a.url]


async def test_engine_that_is_down_says_why_to_whoever_waits_for_it() -> None:
    async with scripted() as engine, a_pool(engine.url, kind="vllm") as pool:
        engine.off = ["/inference/v1/generate"]
        assert not await pool.probe()
        for text in (pool.said(), (await fault_of(pool, deadline_s=0.05)).message):
            assert "is down (" in text
            assert "--enable-scale-out" in text
        engine.off = []
        await wait_until(pool.healthy)
        assert pool.said() == f"{engine.url} is up"


async def test_slots_of_metrics_are_given_again_lowest_first() -> None:
    async with scripted() as a, scripted() as b, scripted() as c, a_pool(a.url, b.url) as pool:
        pool.set_members([b.url])
        pool.set_members([b.url, c.url])
        assert [(e.url, e.slot) for e in pool.counters.engines] == [(b.url, 1), (c.url, 0)]


async def test_router_names_the_engines_and_what_it_says_later_counts() -> None:
    async with scripted() as a, scripted() as b:
        answer = {"workers": [{"url": a.url + "@0"}, {"url": a.url + "@1"}]}
        async with a_router(answer) as router, a_pool(f"router+{router}") as pool:
            assert await pool.probe()
            assert urls(pool) == [a.url]
            answer["workers"] = [{"url": b.url}]
            await wait_until(lambda: up(pool) == {b.url})
            assert (await ask(pool)).engine == b.url
            answer["workers"] = []
            await asyncio.sleep(0.1)
            assert up(pool) == {b.url}  # an empty list removes nobody


async def test_older_router_and_a_name_are_addresses_as_well() -> None:
    async with scripted() as a:
        answer = {"urls": [a.url]}
        async with a_router(answer, "/list_workers") as router:
            name = f"dns+http://localhost:{a.port}"
            async with a_pool(f"router+{router}", name) as pool:
                assert await pool.probe()
                assert a.url in up(pool)
                assert set(urls(pool)) <= {a.url, f"http://[::1]:{a.port}"}


async def test_addresses_that_answer_nothing_are_asked_again_by_the_probe() -> None:
    async with scripted() as a:
        answer: dict[str, Any] = {"workers": []}
        async with a_router(answer) as router, a_pool(f"router+{router}") as pool:
            assert not await pool.probe()
            answer["workers"] = [{"url": a.url}]
            await wait_until(lambda: pool.healthy())


# --- what log-probs are --------------------------------------------------------------------------
async def test_log_probs_are_asked_for_before_calls_and_recorded_with_them() -> None:
    async with (
        scripted(one_token("temperature", a_reply())) as scaled,
        scripted(one_token("raw", a_reply())) as raw,
        a_pool(scaled.url, raw.url, check_logprobs=True) as pool,
    ):
        assert not pool.healthy()
        assert await pool.probe()
        modes = [
            (await ask(pool, key_of(pool, engine.url))).logprob_mode for engine in (scaled, raw)
        ]
        assert modes == ["temperature", "raw"]
        # A row of another temperature goes where its log-probs are right.
        for i in range(10):
            assert (await ask(pool, f"x{i}", temperature=0.7)).engine == scaled.url
        pool.set_members([raw.url])
        error = await fault_of(pool, temperature=0.7)
    assert (error.detail, error.retryable) == ("refused", False)
    assert "--logprobs-mode processed_logprobs" in error.message


async def test_raw_log_probs_where_temperatures_are_not_one_are_a_wrong_configuration() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True, scaled=True) as pool,
    ):
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            await pool.probe()


async def test_raw_engine_that_joins_later_is_refused_and_the_others_go_on() -> None:
    async with (
        scripted(one_token("temperature", a_reply())) as good,
        scripted(one_token("raw", a_reply())) as raw,
        a_pool(good.url, check_logprobs=True, scaled=True) as pool,
    ):
        assert await pool.probe()
        pool.set_members([good.url, raw.url])
        await wait_until(lambda: pool.states()[1].state == "refused")
        asked = len(raw.requests)
        for i in range(10):
            assert (await ask(pool, f"x{i}")).engine == good.url
        assert len(raw.requests) == asked
        pool.set_members([raw.url])
        assert (pool.healthy(), pool.alive()) == (False, False)


async def test_call_that_no_raw_engine_may_have_holds_up_none_that_they_may() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as raw,
        scripted(one_token("temperature", hang)) as scaled,
        a_pool(raw.url, scaled.url, check_logprobs=True, max_in_flight=1) as pool,
    ):
        assert await pool.probe()
        warm = [asyncio.create_task(ask(pool, temperature=0.6)) for _ in range(3)]
        await wait_until(lambda: len(pool._entrance._line) == 2)
        assert (await ask(pool)).engine == raw.url
        pool._fleet.looks.eject(pool._fleet.members[1])  # it comes back as another
        scaled.steps[:] = [one_token("raw", a_reply())]
        for task in warm[1:]:
            with pytest.raises(EngineFault, match="raw log-probs"):
                await task
        assert not pool._entrance._line
        warm[0].cancel()


async def test_engine_that_was_away_is_asked_again() -> None:
    async with (
        scripted(one_token("temperature", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True) as pool,
    ):
        assert await pool.probe()
        engine.steps[:], engine.info_status = [reset], 500
        assert (await fault_of(pool)).detail in ("no_engine", "reset")
        engine.steps[:], engine.info_status = [one_token("raw", a_reply())], 200
        await wait_until(lambda: pool.healthy())
        assert (await ask(pool)).logprob_mode == "raw"


async def test_engine_that_is_paused_is_asked_when_the_pause_is_over() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True) as pool,
    ):
        engine.pause()
        assert await pool.probe()
        assert pool.states()[0].state == "paused"
        assert engine.requests == []
        engine.go_on()
        await wait_until(lambda: pool.healthy())
        assert (await ask(pool)).logprob_mode == "raw"


async def test_engine_that_is_new_in_a_pause_of_the_run_is_asked_when_that_is_over() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True) as pool,
    ):
        pool.hold(True)
        assert await pool.probe()
        assert (pool.states()[0].state, pool.healthy(), pool.alive()) == ("paused", False, True)
        await wait_until(lambda: len(engine.paths()) > 8)  # looks go on
        assert engine.requests == []
        pool.hold(False)
        pool.set_version(0, {})
        await wait_until(pool.healthy)
        assert (await ask(pool)).logprob_mode == "raw"


async def test_engine_that_changes_while_it_is_asked_is_known_as_it_is_behind_that() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True, probe_interval_s=60.0) as pool,
    ):
        engine.weight_version = "5"
        pool.set_version(5, {})
        answers = engine.steps[0]

        def restarts(exchange: Exchange) -> None:
            engine.weight_version = "4"
            answers(exchange)  # type: ignore[operator]

        engine.steps[:] = [restarts]
        assert await pool.probe()
        assert (pool.states()[0].state, pool.states()[0].version) == ("behind", 4)


async def test_pause_that_begins_among_the_questions_is_a_pause_and_no_outage() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(
            engine.url,
            check_logprobs=True,
            request_timeout_s=0.3,
            abort_wait_s=0.1,
        ) as pool,
    ):
        engine.held = []  # it keeps the questions, and says only then that it is paused
        probing = asyncio.create_task(pool.probe())
        await wait_until(lambda: len(engine.requests) > 0)
        engine.paused = True
        await wait_until(lambda: pool.states()[0].state == "paused")
        await probing
        assert pool.counters.ejections == 0
        engine.go_on()
        await wait_until(lambda: pool.healthy())
        assert (await ask(pool)).logprob_mode == "raw"


async def test_engine_that_is_too_busy_for_questions_is_used() -> None:
    async with (
        scripted(hang) as engine,
        a_pool(engine.url, check_logprobs=True, request_timeout_s=0.3, abort_wait_s=0.1) as pool,
    ):
        assert await pool.probe()  # it says that it is there and not paused: its queue is long
        assert pool.healthy()
        engine.steps[:] = [a_reply()]
        assert (await ask(pool)).logprob_mode == "temperature"


async def test_engine_that_says_nothing_of_its_log_probs_is_used() -> None:
    sure = one_token("none", a_reply())

    def silent(exchange: Exchange) -> None:
        if json.loads(exchange.body)["sampling_params"]["max_new_tokens"] == 1:
            exchange.answer(200, a_reply([7], log_probs=[-0.001]))
        elif callable(sure):
            sure(exchange)

    async with scripted(silent) as engine, a_pool(engine.url, check_logprobs=True) as pool:
        assert await pool.probe()
        assert (await ask(pool)).logprob_mode == "temperature"  # what its protocol promises


@pytest.mark.parametrize(
    ("flat", "own", "scaled"),
    [(1.0, {}, False), (0.0, {}, False), (0.7, {}, True), (1.0, {"temperature": 0.6}, True),
     (0.7, {"temperature": 1.0}, False)],
)  # fmt: skip
def test_temperatures_of_the_environments_decide_whether_raw_is_wrong(
    flat: float, own: dict[str, Any], scaled: bool
) -> None:
    settings = Settings(sampling=SamplingTable(temperature=flat), env={"a": EnvTable(sampling=own)})
    assert samples_scaled(settings) is scaled


async def test_pool_of_the_configuration_asks_for_log_probs_and_knows_its_bounds() -> None:
    async with scripted(one_token("raw", hang)) as engine:
        table = EngineTable(urls=(engine.url,), max_in_flight=3)
        pool = create_engine(
            Settings(engine=table, sampling=SamplingTable(temperature=0.5)), max_token_id=151668
        )
        assert pool.states()[0].limit == 3
        with pytest.raises(ConfigError, match="raw log-probs"):
            await pool.probe()
        await pool.aclose()


# --- limits --------------------------------------------------------------------------------------
def answer(engine: ScriptedEngine, num: int) -> None:
    """Answer the oldest `num` requests that are open."""
    for exchange in engine.raw[:num]:
        exchange.answer(200, a_reply([7]))
    del engine.raw[:num]


async def test_engine_has_no_more_calls_than_its_limit_and_others_come_in_order() -> None:
    async with scripted(hang) as engine, a_pool(engine.url, max_in_flight=4) as pool:
        tasks = []
        for i in range(12):
            tasks.append(asyncio.create_task(ask(pool, f"g{i}")))
            await asyncio.sleep(0)
        await wait_until(lambda: len(engine.requests) == 4)
        await asyncio.sleep(0.05)
        assert (len(engine.requests), pool.counters.engines[0].in_flight) == (4, 4)
        tasks[5].cancel()
        while not all(task.done() for task in tasks):
            seen = len(engine.requests)
            answer(engine, 2)
            await wait_until(
                lambda seen=seen: (
                    len(engine.requests) == min(11, seen + 2)  # type: ignore[misc]
                    and pool.counters.engines[0].in_flight <= 4
                )
            )
            if seen == 11:
                await asyncio.sleep(0.01)
        keys = [body["routing_key"] for body in engine.requests]
        assert keys == [f"g{i}" for i in range(12) if i != 5]
        assert pool.counters.engines[0].in_flight == 0


async def test_home_that_is_full_lets_its_calls_go_to_the_least_loaded() -> None:
    async with (
        scripted(hang) as a,
        scripted(hang) as b,
        a_pool(a.url, b.url, max_in_flight=2) as pool,
    ):
        key = key_of(pool, a.url)
        tasks = [asyncio.create_task(ask(pool, key)) for _ in range(5)]
        await wait_until(lambda: len(a.requests) == 2 and len(b.requests) == 2)
        answer(b, 1)
        await wait_until(lambda: len(b.requests) == 3)
        answer(a, 2)
        answer(b, 2)
        await asyncio.gather(*tasks)


async def test_engine_that_is_full_gets_half_and_more_again_as_it_answers() -> None:
    async with (
        scripted(hang) as engine,
        a_pool(engine.url, backoff_s=0.001, backoff_max_s=0.001) as pool,
    ):
        tasks = [asyncio.create_task(ask(pool, f"g{i}")) for i in range(16)]
        await wait_until(lambda: len(engine.raw) == 16)
        assert pool.states()[0].limit == 0
        for exchange in engine.raw[:5]:  # four are too many; one round trip's count once
            exchange.answer(*FULL)
        del engine.raw[:5]
        await wait_until(lambda: pool.counters.retries == 5)
        assert pool.states()[0].limit == 8
        assert pool.counters.engines[0].limit == 8
        answer(engine, 6)
        await wait_until(lambda: pool.counters.engines[0].in_flight == 8)
        await asyncio.sleep(0.02)
        # Three were sent again at once, before it was clear; two wait until there is room.
        assert len(engine.requests) == 16 + 3
        answer(engine, 1)
        await wait_until(lambda: len(engine.requests) == 16 + 3 + 1)
        engine.steps[:] = [a_reply([7])]
        while not all(task.done() for task in tasks):
            answer(engine, 1)
            await asyncio.sleep(0.005)
        for _ in range(12):
            await asyncio.gather(*(ask(pool, f"h{i}") for i in range(20)))
        assert pool.states()[0].limit >= 12


async def test_call_that_waits_for_room_ends_by_its_deadline() -> None:
    async with scripted(hang) as engine, a_pool(engine.url, max_in_flight=1) as pool:
        first = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        error = await fault_of(pool, deadline_s=0.05)
        assert error.detail == "timeout"
        answer(engine, 1)
        await first
        assert pool.counters.engines[0].in_flight == 0
    assert len(engine.requests) == 1


# --- the budget of retries -----------------------------------------------------------------------
async def test_fleet_in_trouble_gets_little_more_than_the_load_that_troubles_it() -> None:
    async with (
        scripted(a_reply([10**6])) as engine,
        a_pool(engine.url, retry_budget=0.1, backoff_s=0.001) as pool,
    ):
        errors = await asyncio.gather(
            *(fault_of(pool, f"g{i}") for i in range(200)), return_exceptions=True
        )
        counters = pool.counters
    assert {error.detail for error in errors if isinstance(error, EngineFault)} == {"bad_token"}
    assert (counters.retries, len(engine.requests)) == (20, 220)
    assert counters.retries_denied > 0


async def test_waits_for_an_engine_take_nothing_from_the_budget() -> None:
    async with scripted() as engine, a_pool(engine.url, retry_budget=0.0) as pool:
        pool.set_members([])
        for _ in range(2 * IN_HAND):
            assert (await fault_of(pool)).detail == "no_engine"
        pool.set_members(None)
        await wait_until(lambda: pool.healthy())
        engine.steps[:] = [(500, b""), a_reply([7])]
        assert (await ask(pool)).ids.tolist() == [7]


# --- stale connections ---------------------------------------------------------------------------
def closes_when_used_again(exchange: Exchange) -> None:
    """Close a connection that is written to a second time, as a server that gave it up does."""
    connection = exchange._connection
    if getattr(connection, "was_used", False):
        exchange.drop()
    else:
        connection.was_used = True  # type: ignore[union-attr]
        exchange.answer(200, a_reply([7]))


async def test_connection_that_the_engine_gave_up_costs_a_call_nothing() -> None:
    async with (
        scripted(closes_when_used_again) as engine,
        a_pool(engine.url, max_retries=0, probe_interval_s=60.0) as pool,
    ):
        for _ in range(5):
            assert (await ask(pool)).ids.tolist() == [7]
        counters = pool.counters
        assert counters.stale_connections == 4
        assert (counters.retries, counters.engines[0].requests["reset"]) == (0, 0)
        assert counters.ejections == 0
    calls = [entry for entry in engine.log if entry[0] not in LOOKS]
    stale = [body["rid"] for body in engine.requests][1::2]
    assert [rid for path, rid in calls if path == "/abort_request"] == stale
    assert len({body["rid"] for body in engine.requests}) == 9


async def test_engine_that_breaks_fresh_connections_is_at_fault_as_ever() -> None:
    async with (
        scripted(a_reply([7]), reset) as engine,
        a_pool(engine.url, max_retries=0, probe_interval_s=60.0) as pool,
    ):
        await ask(pool)
        assert (await fault_of(pool)).detail == "reset"
        counters = pool.counters
    assert (counters.stale_connections, counters.engines[0].requests["reset"]) == (1, 1)
    assert len(engine.requests) == 3


async def test_half_an_answer_on_a_used_connection_is_the_engines_fault() -> None:
    def half(exchange: Exchange) -> None:
        connection = exchange._connection
        assert connection is not None
        assert connection._transport is not None
        connection._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
        connection._transport.close()

    async with (
        scripted(a_reply([7]), half, a_reply([8])) as engine,
        a_pool(engine.url, probe_interval_s=60.0) as pool,
    ):
        await ask(pool)
        assert (await ask(pool)).ids.tolist() == [8]
        counters = pool.counters
    assert (counters.stale_connections, counters.engines[0].requests["reset"]) == (0, 1)


# --- affinity ------------------------------------------------------------------------------------
async def test_engine_that_joins_takes_the_keys_that_become_its_own_and_no_others() -> None:
    async with scripted() as a, scripted() as b, scripted() as c, a_pool(a.url, b.url) as pool:
        assert await pool.probe()
        before = {f"g{i}": chosen(pool, f"g{i}") for i in range(200)}
        pool.set_members([a.url, b.url, c.url])
        await wait_until(lambda: c.url in up(pool))
        after = {key: chosen(pool, key) for key in before}
        assert {after[key] for key in before if after[key] != before[key]} == {c.url}
