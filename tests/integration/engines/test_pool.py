"""The client and the pool over real HTTP, against engines that answer exact bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError, EngineFault
from rollstream.settings import DebugTable, EngineTable, Settings, TelemetryTable
from tests.engine_pool import LOOKS, a_pool, ask, chosen, key_of, one_token, wait_until
from tests.scripted_engine import ScriptedEngine, a_reply, hang, reset, scripted
from worker.engines import create_engine
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.http import Exchange
from worker.sampling import Sampling
from worker.types import Finish, RequestIds

FULL = (503, b'{"error":{"message":"The request queue is full."}}')


async def fault_of(pool: EnginePool, **options: Any) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await ask(pool, **options)
    return caught.value


def calls_of(engine: ScriptedEngine) -> list[tuple[str, str]]:
    """Return (path, rid) of everything but looks."""
    return [entry for entry in engine.log if entry[0] not in LOOKS]


async def test_client_sends_one_request_with_the_keys_of_the_protocol() -> None:
    async with scripted(a_reply(prompt_tokens=7)) as engine, a_pool(engine.url) as pool:
        completion = await ask(pool, "кey\n1")
    [body] = engine.requests
    assert body == {
        "rid": completion.rid,
        "input_ids": [3838, 374, 220, 16, 10, 22, 30],
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": 16,
            "sampling_seed": 5,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "stream": False,
        "routing_key": "кey\n1",
        "extra_key": "v3",
    }
    head = engine.raw[0].head.lower()
    assert b"x-smg-routing-key: \\u043aey\\n1" in head
    assert b"content-type: application/json" in head
    assert b"transfer-encoding" not in head
    assert completion.ids.tolist() == [59, 79075, 90, 23, 92]
    assert completion.engine == engine.url


async def test_client_salts_the_prefix_cache_by_the_trajectorys_first_version() -> None:
    async with scripted() as engine, a_pool(engine.url) as pool:
        await ask(pool, salt=1)
        await ask(pool)
    assert [body["extra_key"] for body in engine.requests] == ["v1", "v3"]


async def test_client_reads_a_reply_that_comes_in_pieces() -> None:
    ids = list(range(20_000))
    async with scripted(a_reply(ids)) as engine, a_pool(engine.url) as pool:
        completion = await ask(pool, max_new_tokens=len(ids))
    assert completion.ids.tolist() == ids


async def test_client_takes_no_reply_that_is_longer_than_what_it_permitted() -> None:
    async with scripted(a_reply(range(17))) as engine, a_pool(engine.url) as pool:
        fault = await fault_of(pool)
        whole = await ask(pool, max_new_tokens=17)
    assert fault.detail == "bad_reply"
    assert "sampled 17 tokens where 16 were permitted" in str(fault)
    assert whole.ids.tolist() == list(range(17))


async def test_client_leaves_no_reference_cycle_behind_a_request() -> None:
    async with scripted() as engine, a_pool(engine.url) as pool:
        for _ in range(20):
            await ask(pool)
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                await ask(pool)
            found = gc.collect()
        finally:
            gc.enable()
    # httpx alone leaves 37.7 a request; the server runs in this process too.
    assert found < 20, f"{found / 100:.2f} cyclic objects a request"


@pytest.mark.slow
async def test_client_holds_no_copy_of_a_body_while_the_request_is_in_flight() -> None:
    waiting: list[Exchange] = []

    def forget(exchange: Exchange) -> None:
        exchange.body = b""
        waiting.append(exchange)

    prompt = RequestIds([b",".join([b"12345"] * 200_000)], 200_000)  # 1.2 MB
    async with scripted(forget) as engine, a_pool(engine.url) as pool:
        tracemalloc.start()
        try:
            tasks = [
                asyncio.create_task(
                    pool.generate(prompt, Sampling(), routing_key=f"g{i}", version=0)
                )
                for i in range(20)
            ]
            await wait_until(lambda: len(waiting) == 20)
            engine.requests.clear()  # the engine's own copies
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert held < 5_000_000, f"{held / 20 / 1e6:.2f} MB a request"


async def test_client_keeps_exact_bytes_of_request_and_reply_for_the_auditor(
    tmp_path: Path,
) -> None:
    reply = a_reply()
    async with scripted(FULL, reply) as engine, a_pool(engine.url, wire_dir=tmp_path) as pool:
        completion = await ask(pool)
    assert (tmp_path / f"{completion.rid}.rep").read_bytes() == reply
    assert (tmp_path / f"{completion.rid}.req").read_bytes() == engine.raw[1].body
    assert len(list(tmp_path.iterdir())) == 4  # the try that failed has its two as well


@pytest.mark.parametrize(
    ("first", "detail", "aborts"),
    [
        (FULL, "unavailable", 1),
        *[((status, b""), "unavailable", 1) for status in (408, 429, 502, 504)],
        *[((status, b"{}"), "server_error", 1) for status in (500, 501, 520)],
        (reset, "reset", 1),
        (a_reply(finish={"type": "stop", "matched": "NaN happened"}), "nan", 0),
        (a_reply(finish={"type": "abort", "status_code": 500}), "abort_error", 0),
        (a_reply([10**6]), "bad_token", 0),
        (b'{"half', "bad_reply", 1),
        (a_reply([1, 2, 3], id="e" * 32), "bad_reply", 1),
    ],
)
async def test_pool_tries_again_with_a_new_rid_and_takes_tokens_of_the_second_try_only(
    first: Any, detail: str, aborts: int
) -> None:
    async with scripted(first, a_reply([59, 79075])) as engine, a_pool(engine.url) as pool:
        completion = await ask(pool)
        counters = pool.counters.engines[0]
    assert completion.ids.tolist() == [59, 79075]
    rids = [body["rid"] for body in engine.requests]
    assert len(set(rids)) == 2
    assert completion.rid == rids[1]
    seeds = {body["sampling_params"]["sampling_seed"] for body in engine.requests}
    assert seeds == {5}
    assert [rid for path, rid in engine.log if path == "/abort_request"] == rids[:aborts]
    assert (counters.requests[detail], counters.requests["stop"], pool.counters.retries) == (
        1,
        1,
        1,
    )
    assert counters.in_flight == 0


async def test_body_without_end_is_given_up_at_its_bound_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.engines.protocol.http_base.MAX_REPLY_BYTES", 10_000)
    endless = a_reply(text="x" * 20_000)
    async with scripted(endless, a_reply([59, 79075])) as engine, a_pool(engine.url) as pool:
        completion = await ask(pool)
        counters = pool.counters.engines[0]
    assert completion.ids.tolist() == [59, 79075]
    assert counters.requests["bad_reply"] == 1
    assert calls_of(engine)[1:2] == [("/abort_request", engine.requests[0]["rid"])]


async def test_half_a_body_is_never_parsed_as_a_turn() -> None:
    def half(exchange: Exchange) -> None:
        connection = exchange._connection
        assert connection is not None
        assert connection._transport is not None
        reply = a_reply([1, 2, 3])
        connection._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply[:-30])
        )
        connection._transport.close()

    async with scripted(half, a_reply([59])) as engine, a_pool(engine.url) as pool:
        completion = await ask(pool)
        assert completion.ids.tolist() == [59]
        assert pool.counters.engines[0].requests["reset"] == 1
    assert [path for path, _ in calls_of(engine)] == [
        "/generate",
        "/abort_request",
        "/generate",
    ]


@pytest.mark.parametrize(
    ("step", "detail"),
    [
        ((400, b'{"error":{"message":"maximum context length is 64"}}'), "context_overflow"),
        ((400, b'{"error":"Unexpected message role"}'), "refused"),
        (a_reply(prompt_tokens=6), "prompt_mismatch"),
    ],
)
async def test_pool_never_repeats_a_refusal(step: Any, detail: str) -> None:
    async with scripted(step) as engine, a_pool(engine.url) as pool:
        error = await fault_of(pool)
        assert pool.healthy()
    assert (error.detail, error.retryable, len(engine.requests)) == (detail, False, 1)


async def test_pool_gives_up_after_its_retries_with_the_last_fault() -> None:
    async with scripted(a_reply([10**6])) as engine, a_pool(engine.url) as pool:
        error = await fault_of(pool)
    assert (error.detail, error.retryable, len(engine.requests)) == ("bad_token", True, 4)
    assert "outside 0..151668" in error.message


async def test_pool_waits_longer_before_every_retry_with_jitter_and_a_cap() -> None:
    pool = EnginePool(
        ["http://e"], max_token_id=9, policy=RetryPolicy(backoff_max_s=1.0), uniform=lambda: 0.5
    )
    assert [round(pool._backoff_s(i), 3) for i in range(5)] == [0.25, 0.5, 1.0, 1.25, 1.25]
    await pool.aclose()


async def test_timeout_aborts_the_call_waits_for_its_partial_reply_and_drops_it() -> None:
    async with scripted(hang, a_reply([59])) as engine:

        def partial(rid: str) -> None:
            engine.raw[0].answer(200, a_reply([1, 2, 3], finish={"type": "abort"}))

        engine.aborted = partial
        async with a_pool(engine.url, request_timeout_s=0.1) as pool:
            completion = await ask(pool)
            assert pool.counters.engines[0].requests["timeout"] == 1
    assert completion.ids.tolist() == [59]
    first, second = engine.requests
    assert calls_of(engine) == [
        ("/generate", first["rid"]),
        ("/abort_request", first["rid"]),
        ("/generate", second["rid"]),
    ]


async def test_timeout_takes_a_whole_reply_that_crossed_the_abort() -> None:
    async with scripted(hang) as engine:
        engine.aborted = lambda rid: engine.raw[0].answer(200, a_reply([7, 8]))
        async with a_pool(engine.url, request_timeout_s=0.1) as pool:
            completion = await ask(pool)
    assert (completion.ids.tolist(), completion.finish) == ([7, 8], Finish.STOP)
    assert len(engine.requests) == 1


async def test_timeout_wait_is_bounded_and_an_abort_that_failed_is_counted() -> None:
    async with scripted(hang) as engine:
        engine.abort_status = 404
        async with a_pool(
            engine.url, request_timeout_s=0.05, abort_wait_s=0.05, max_retries=1
        ) as pool:
            error = await fault_of(pool)
            client = pool._fleet.members[0].client
            await client.aclose()
            assert (client.aborts, client.failed_aborts) == (2, 2)
    assert error.detail == "timeout"
    assert len(engine.requests) == 2


async def test_cancelled_call_tells_the_engine_to_stop() -> None:
    async with scripted(hang) as engine, a_pool(engine.url) as pool:
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: ("/abort_request", engine.requests[0]["rid"]) in engine.log)
        assert pool.counters.engines[0].in_flight == 0


async def test_deadline_bounds_all_tries_and_waits_together() -> None:
    async with scripted(hang) as engine, a_pool(engine.url) as pool:
        for _ in range(4):
            error = await fault_of(pool, deadline_s=0.03)
            assert error.detail == "timeout"
        await wait_until(lambda: "/abort_request" in engine.paths())
        assert pool.counters.ejections == 0  # the caller's haste is not its fault
    async with (
        scripted(FULL) as engine,
        a_pool(engine.url, backoff_s=30.0, backoff_max_s=30.0) as pool,
    ):
        assert (await fault_of(pool, deadline_s=5.0)).detail == "unavailable"
        assert len(engine.requests) == 1
        assert (await fault_of(pool, deadline_s=-1.0)).detail == "timeout"
        assert len(engine.requests) == 1


async def test_calls_of_one_key_go_to_one_engine_and_keys_spread_over_all() -> None:
    async with (
        scripted() as a,
        scripted() as b,
        scripted() as c,
        a_pool(a.url, b.url, c.url) as pool,
    ):
        for key in range(30):
            for _ in range(2):
                await ask(pool, f"g{key}")
    seen = [{body["routing_key"] for body in engine.requests} for engine in (a, b, c)]
    assert sum(map(len, seen)) == 30
    assert all(len(keys) >= 4 for keys in seen)


async def test_engine_that_leaves_moves_its_own_keys_only() -> None:
    three = ["http://a", "http://b", "http://c"]
    pool = EnginePool(three, max_token_id=9)

    before = {f"g{i}": chosen(pool, f"g{i}") for i in range(200)}
    for counters in pool.counters.engines:
        counters.in_flight = 99  # a busy home is still the home
        assert {key: chosen(pool, key) for key in before} == before
        counters.in_flight = 0
    pool.counters.engines[1].up = False
    pool._fleet.refresh()
    after = {key: chosen(pool, key) for key in before}
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if before[key] == "http://b"}
    pool.counters.engines[0].in_flight = 5
    assert {chosen(pool, key) for key in moved} == {"http://c"}  # the least loaded takes them
    await pool.aclose()


async def test_retry_goes_to_another_engine_where_there_is_one() -> None:
    async with (
        scripted((500, b"")) as bad,
        scripted(a_reply([59])) as good,
        a_pool(bad.url, good.url) as pool,
    ):
        completion = await ask(pool, key_of(pool, bad.url))
    assert completion.engine == good.url
    assert (len(bad.requests), len(good.requests)) == (1, 1)


async def test_refused_connection_ejects_at_once_and_the_engine_returns_by_itself() -> None:
    async with scripted() as a, scripted() as b, a_pool(a.url, b.url) as pool:
        key, port = key_of(pool, a.url), a.port
        await a.stop()
        assert (await ask(pool, key)).engine == b.url
        [down, _] = pool.counters.engines
        assert (down.up, pool.counters.ejections, down.requests["connect"]) == (False, 1, 1)
        assert (await ask(pool, key)).engine == b.url
        assert down.requests["connect"] == 1  # nobody tried it again
        a.weight_version = "12"
        await a.start(port)
        await wait_until(lambda: down.up)
        assert (down.version, pool.counters.ejections) == (12, 1)
        assert (await ask(pool, key)).engine == a.url


async def test_engine_is_ejected_by_a_row_of_503_but_not_by_single_ones() -> None:
    async with scripted(FULL, a_reply(), FULL, a_reply(), FULL, FULL, a_reply()) as engine:
        async with a_pool(engine.url) as pool:
            counters = pool.counters.engines[0]
            for _ in range(3):
                await ask(pool)
            assert (pool.counters.ejections, counters.requests["unavailable"]) == (0, 4)
        engine.steps[:] = [FULL]
        engine.info_status = 503
        async with a_pool(engine.url, probe_interval_s=60.0) as pool:
            error = await fault_of(pool)
            counters = pool.counters.engines[0]
            assert (pool.counters.ejections, counters.requests["unavailable"]) == (1, 3)
            assert not pool.healthy()
            assert (error.detail, error.retryable) == ("no_engine", True)


async def test_call_without_an_engine_waits_bounded_for_one_to_return() -> None:
    async with (
        scripted(a_reply([59])) as engine,
        a_pool(engine.url, backoff_s=60.0, backoff_max_s=60.0) as pool,
    ):
        port = engine.port
        await engine.stop()
        assert not await pool.probe()
        assert not pool.healthy()
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: pool.counters.waits == 1)
        await engine.start(port)
        assert (await task).ids.tolist() == [59]  # the return wakes it, not the back-off
        assert pool.healthy()


async def test_outage_of_503_ends_normally_without_duplicate_turns() -> None:
    async with scripted(*[FULL] * 3, a_reply([59])) as engine, a_pool(engine.url) as pool:
        assert (await ask(pool)).ids.tolist() == [59]
        assert pool.counters.retries == 3
    assert len({body["rid"] for body in engine.requests}) == 4


async def test_probe_says_whether_any_engine_answers() -> None:
    async with scripted() as a, scripted() as b:
        b.info_status = 500
        async with a_pool(a.url, b.url) as pool:
            assert await pool.probe()
            assert [engine.up for engine in pool.counters.engines] == [True, False]


async def test_unknown_host_is_a_refused_connection_not_a_crash() -> None:
    async with a_pool("http://no-such-host.invalid:1", max_retries=0) as pool:
        error = await fault_of(pool)
    assert error.detail == "connect"
    assert "no-such-host.invalid" in error.message


@pytest.mark.parametrize(
    ("urls", "text"),
    [
        ((), "engine.urls is empty"),
        (("127.0.0.1:30000",), "is not http://host:port"),
        (("ftp://host",), "is not http://host:port"),
        (("http://a", "http://a"), "names one engine twice"),
    ],
)
async def test_engine_urls_that_cannot_work_are_refused_by_name(
    urls: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        EnginePool(urls, max_token_id=9)


async def test_engine_of_the_configuration_takes_its_bounds(tmp_path: Path) -> None:
    async with scripted(one_token("temperature", FULL)) as engine:
        table = EngineTable(urls=(engine.url + "/",), max_retries=1, retry_backoff_s=0.001)
        settings = Settings(engine=table, debug=DebugTable(wire_dir=tmp_path / "wire"))
        pool = create_engine(settings, max_token_id=151668)
        assert await pool.probe()
        questions = len(engine.requests)
        error = await fault_of(pool)
        await pool.aclose()
    assert (error.detail, len(engine.requests) - questions) == ("unavailable", 2)
    assert len(list((tmp_path / "wire").glob("*.req"))) == len(engine.requests)


async def test_vllm_scores_no_samples_and_the_start_says_which_setting_asks_for_it() -> None:
    table = EngineTable(urls=("http://127.0.0.1:1",), kind="vllm")
    settings = Settings(engine=table, telemetry=TelemetryTable(rescore_fraction=0.01))
    with pytest.raises(ConfigError, match=r"'vllm'.* set telemetry\.rescore_fraction = 0$"):
        create_engine(settings, max_token_id=9)
    await create_engine(Settings(engine=table), max_token_id=9).aclose()


async def test_many_calls_at_once_are_all_in_flight() -> None:
    waiting: list[Exchange] = []

    async with scripted(waiting.append) as engine, a_pool(engine.url) as pool:
        tasks = [asyncio.create_task(ask(pool, f"g{i}")) for i in range(300)]
        await wait_until(lambda: len(waiting) == 300)
        assert pool.counters.engines[0].in_flight == 300
        for exchange in reversed(waiting):
            rid_byte = int(json.loads(exchange.body)["rid"][:2], 16)
            exchange.answer(200, a_reply([rid_byte]))
        for completion in await asyncio.gather(*tasks):
            assert completion.ids.tolist() == [int(completion.rid[:2], 16)]


async def test_closed_pool_answers_with_a_fault_and_sends_nothing() -> None:
    async with scripted(hang) as engine, a_pool(engine.url) as pool:
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        await pool.aclose()
        with pytest.raises(EngineFault):
            await task
        assert (await fault_of(pool)).detail == "no_engine"
    assert len(engine.requests) == 1
