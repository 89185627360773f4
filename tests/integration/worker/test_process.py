"""The whole worker as processes: a real server, a real engine over HTTP, real signals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from examples.devserver import DevServer
from rollstream.queue import calls
from tests.engine_pool import one_token
from tests.scripted_engine import a_reply, hang, scripted
from tests.unit.tito.families import toyvocab

from .parts import Run, a_run, wait_until
from .processes import Sim, workers

N = 4
USER = [{"role": "user", "content": "What is 1+7?"}]
Options = Callable[..., dict[str, str]]
# A worker starts in two seconds; where the machine does much else, in many more.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = Sim(tmp_path_factory.mktemp("sim"), vocabulary)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def options(sim: Sim, vocabulary: Path, run_name: str) -> Options:
    def given(url: str, **changes: str) -> dict[str, str]:
        known = {
            "redis.url": url,
            "run.name": run_name,
            "model.tokenizer": str(vocabulary),
            "engine.urls": sim.url,
            "engine.probe_interval_s": "0.1",
            "worker.generate": "single_turn",
            "worker.drain_s": "0",
            "aggregator.filters": "no_aborted",
            "sampling.max_new_tokens": "32",
        }
        return known | {key.replace("__", "."): value for key, value in changes.items()}

    return given


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, lease_ms=1_000) as opened:
        yield opened


async def enqueue(run: Run, groups: int) -> None:
    for g in range(groups):
        await run.enqueue(g, N, prompt=USER, label="8")


async def leased(run: Run, members: int) -> None:
    async def enough() -> bool:
        return (await run.queue.depths())["l"] >= members

    await wait_until(enough, what=f"{members} leases")


async def all_ready(run: Run, groups: int) -> None:
    await run.ready(groups)
    assert await run.counter("completed") == groups * N
    assert await run.drops() == {}
    await run.audit()


@pytest.mark.slow
async def test_members_of_a_killed_worker_are_run_again_and_every_group_lands_once(
    run: Run, options: Options, tmp_path: Path
) -> None:
    slots = {"worker__concurrency": "12"}
    with workers(tmp_path, 2, options(run.url, **slots)) as (first, second):
        await enqueue(run, 8)
        await leased(run, 24)
        first.process.kill()

        await all_ready(run, 8)
        assert await run.counter("crashes") > 0
        assert second.get("/healthz")[0] == 200
        status, text = second.get("/metrics")
    assert status == 200
    assert 'rollout_build_info{version="' in text
    assert "rollout_concurrency_limit 12.0" in text


@pytest.fixture
def slow_sim(tmp_path: Path, vocabulary: Path) -> Iterator[Sim]:
    """An engine that ends no turn while a test lasts, but answers one-token questions."""
    engine = Sim(tmp_path, vocabulary, latency_s=0, options=("--token-s", "4"))
    engine.start()
    yield engine
    engine.kill()


@pytest.mark.slow
async def test_sigterm_gives_back_what_runs_without_charging_it_and_says_goodbye(
    run: Run, options: Options, slow_sim: Sim, tmp_path: Path
) -> None:
    with workers(tmp_path, 1, options(run.url, engine__urls=slow_sim.url)) as (one,):
        await enqueue(run, 4)
        await leased(run, 16)
        one.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(one.process.wait, 45)

        assert code == 0, one.log.read_text()
        assert await run.counter("given_back") == 16
        assert await run.counter("attempts") == 0
        assert await run.counter("crashes") == 0
        depths = await run.queue.depths()
        assert (depths["q"], depths["l"]) == (16, 0)
        assert await run.queue.presence() == {"workers": 0, "producers": 0, "aggregators": 0}
        await run.audit()


@pytest.mark.slow
async def test_sigterm_parks_what_runs_where_samples_may_go_on_elsewhere(
    run: Run, options: Options, tmp_path: Path, vocabulary: Path
) -> None:
    engine = Sim(tmp_path, vocabulary, latency_s=0, options=("--token-s", "0.25"))
    engine.start()
    try:
        given = options(run.url, engine__urls=engine.url, weights__partial="true")
        with workers(tmp_path, 1, given) as (one,):
            await enqueue(run, 4)
            await leased(run, 16)
            await asyncio.sleep(1.0)  # four tokens
            one.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(one.process.wait, 45)
    finally:
        engine.kill()
    assert code == 0, one.log.read_text()
    assert (await run.counter("parked"), await run.counter("given_back")) == (16, 0)
    assert await run.counter("attempts") == await run.counter("crashes") == 0
    depths = await run.queue.depths()
    assert (depths["q"], depths["l"]) == (16, 0)
    assert await run.queue.presence() == {"workers": 0, "producers": 0, "aggregators": 0}
    await run.audit()


@pytest.mark.slow
async def test_a_worker_outlives_a_restart_of_redis_in_the_middle_of_its_samples(
    run_name: str, options: Options, tmp_path: Path
) -> None:
    with DevServer("--appendfsync", "always", aof=True) as server:
        async with a_run(server.url, run_name, lease_ms=2_000) as run:
            with workers(tmp_path, 1, options(server.url)) as (one,):
                await enqueue(run, 6)
                await leased(run, 20)
                server.kill()
                await asyncio.sleep(0.3)
                server.start()

                await all_ready(run, 6)
                assert one.process.poll() is None
                said = [event["event"] for event in one.events()]
    assert (said.count("redis_away"), said.count("redis_back")) == (1, 1)


@pytest.mark.slow
async def test_a_worker_charges_nobody_for_an_engine_that_is_away(
    run: Run, options: Options, tmp_path: Path, vocabulary: Path
) -> None:
    own = Sim(tmp_path, vocabulary)
    own.start()
    settings = {
        "engine__urls": own.url,
        "engine__max_retries": "1",
        "engine__retry_backoff_s": "0.05",
    }
    try:
        with workers(tmp_path, 1, options(run.url, **settings)) as (one,):
            await enqueue(run, 2)
            await leased(run, 8)
            own.kill()
            status = await wait_until(lambda: one.get("/readyz")[0] == 503)
            assert status

            async def given_back() -> bool:
                return await run.counter("given_back") >= 8

            await wait_until(given_back)
            own.start()
            await all_ready(run, 2)
    finally:
        own.kill()
    assert await run.counter("attempts") == 0


@pytest.mark.slow
async def test_a_worker_waits_for_its_run_and_ends_with_it(
    valkey_url: str, run_name: str, options: Options, tmp_path: Path
) -> None:
    with workers(tmp_path, 1, options(valkey_url)) as (one,):
        await wait_until(lambda: "waiting_for_run" in one.log.read_text())
        async with a_run(valkey_url, run_name) as run:
            await run.queue.call(calls.abort_run("enough"))
            code = await asyncio.to_thread(one.process.wait, 45)
    assert code == 0, one.log.read_text()


@pytest.mark.slow
async def test_a_worker_that_waits_for_its_run_ends_at_sigterm_while_redis_is_away(
    options: Options, tmp_path: Path
) -> None:
    with DevServer() as server, workers(tmp_path, 1, options(server.url)) as (one,):
        await wait_until(lambda: "waiting_for_run" in one.log.read_text())
        server.kill()
        await wait_until(lambda: "redis_away" in one.log.read_text())
        one.process.terminate()
        code = await asyncio.to_thread(one.process.wait, 15)
    assert code == 0, one.log.read_text()


@pytest.mark.slow
async def test_a_worker_that_starts_in_a_pause_asks_the_runs_engines_for_no_token_before_its_end(
    run: Run, valkey_url: str, options: Options, tmp_path: Path, vocabulary: Path
) -> None:
    engine = Sim(tmp_path, vocabulary)
    engine.start()
    await run.queue.call(calls.set_engines([engine.url]))
    paused = await run.queue.call(calls.pause("abort"))
    await enqueue(run, 1)

    async def confirmed() -> bool:
        told = await run.queue.confirmations()
        return any(c.control_seq >= paused.control_seq for c in told)

    def generations() -> int:
        with urllib.request.urlopen(f"{engine.url}/sim", timeout=10) as answer:
            return int(json.loads(answer.read())["paths"].get("/generate", 0))

    try:
        given = options(valkey_url, engine__urls="http://127.0.0.1:9")
        with workers(tmp_path, 1, given):
            await wait_until(confirmed, what="a confirmation")
            assert await asyncio.to_thread(generations) == 0
            await run.queue.call(calls.resume())
            await all_ready(run, 1)
            assert await asyncio.to_thread(generations) > N, "its questions, and the members"
    finally:
        engine.kill()


@pytest.mark.slow
async def test_questions_to_an_engine_that_joins_are_stopped_by_a_pause_as_calls_are(
    run: Run, options: Options, tmp_path: Path
) -> None:
    def aborted(rid: str) -> None:
        for body, exchange in zip(engine.requests, engine.raw, strict=True):
            if body["rid"] == rid:
                exchange.answer(200, a_reply([], finish={"type": "abort"}))

    async def in_flight() -> int:
        [told] = await run.queue.confirmations()
        return told.in_flight

    async def confirmed() -> bool:
        [told] = await run.queue.confirmations()
        return told.control_seq >= paused.control_seq

    async with scripted(hang) as engine:
        engine.aborted = aborted
        with workers(tmp_path, 1, options(run.url)):
            await run.queue.call(calls.set_engines([engine.url]))
            await wait_until(lambda: _is(len(engine.requests) == 24), what="its questions")
            paused = await run.queue.call(calls.pause("abort"))
            await wait_until(confirmed, what="a confirmation")
            assert engine.paths().count("/abort_request") >= 24
            assert await in_flight() == 0
            engine.steps[:] = [one_token("temperature", a_reply([59]))]
            looks = len(engine.paths()) + 6
            await wait_until(lambda: _is(len(engine.paths()) > looks), what="looks")
            assert len(engine.requests) == 24
            await run.queue.call(calls.resume())
            await enqueue(run, 1)
            await wait_until(lambda: _is(len(engine.requests) >= 48 + N), what="its calls")


async def _is(true: bool) -> bool:
    return true


async def test_a_worker_says_once_at_start_which_tools_its_model_is_not_told_of(
    run: Run, options: Options, tmp_path: Path
) -> None:
    toyvocab.vocabulary("deepseek-v3").save(str(tmp_path / "tokenizer.json"))
    given = options(
        run.url,
        model__tokenizer=str(tmp_path),
        model__renderer="deepseek-v3",
        worker__tools="calculator",
    )
    with workers(tmp_path, 1, given) as (one,):
        lines = [x for x in one.log.read_text().splitlines() if "tools_not_shown" in x]
    assert len(lines) == 1
    assert "deepseek-v3" in lines[0]
    assert "calculator" in lines[0]


@pytest.mark.slow
async def test_a_worker_that_is_told_to_end_while_it_starts_has_not_failed(
    run: Run, options: Options, tmp_path: Path
) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until the worker gives up on it
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        given = options(run.url, engine__urls=f"http://127.0.0.1:{port}")
        with workers(tmp_path, 1, given, ready=False) as (one,):
            async with asyncio.timeout(45):
                await asked.wait()
            one.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(one.process.wait, 15)
    assert code == 0, one.log.read_text()


@pytest.mark.slow
async def test_a_worker_ends_with_the_reason_of_a_run_that_failed(
    run: Run, options: Options, tmp_path: Path
) -> None:
    await run.queue.call(calls.fail_run("the engine speaks Klingon"))
    with workers(tmp_path, 1, options(run.url), ready=False) as (one,):
        code = await asyncio.to_thread(one.process.wait, 45)
    assert code == 1
    assert "the run failed: the engine speaks Klingon" in one.log.read_text()


async def test_an_aggregator_of_its_own_needs_neither_engine_nor_tokenizer(
    run: Run, tmp_path: Path
) -> None:
    given = {"redis.url": run.url, "run.name": run.queue.run, "worker.role": "aggregator"}
    rollouts = run.worker()
    rollouts.start(aggregate=False)
    for g in range(3):
        await run.enqueue(g, N)
    with workers(tmp_path, 1, given) as (one,):
        await all_ready(run, 3)
        one.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(one.process.wait, 45)
    assert code == 0, one.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["reject", "fork", "keep_prefix"])
async def test_a_client_that_rewrites_its_history_is_counted_and_never_a_crash(
    run: Run, options: Options, tmp_path: Path, policy: str
) -> None:
    given = options(
        run.url,
        worker__generate="examples.generate_compacting:generate",
        worker__on_divergence=policy,
        worker__max_turns="4",
        sampling__max_new_tokens="256",
        aggregator__min_samples="1",
    )
    await enqueue(run, 1)
    with workers(tmp_path, 1, given) as (worker,):

        def counted() -> float:
            _, page = worker.get("/metrics")
            pattern = r'^rollout_divergences_total\{policy="(\w+)"\} (\S+)$'
            found = re.findall(pattern, page, re.MULTILINE)
            assert {name for name, count in found if float(count)} <= {policy}
            return sum(float(count) for _, count in found)

        async def everybody_diverged() -> bool:
            return await asyncio.to_thread(counted) == N

        await wait_until(everybody_diverged, what=f"{N} divergences")
        _, page = worker.get("/metrics")
        mismatches = re.findall(r"^rollout_token_mismatch_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert mismatches == ["0.0"] * 3
        assert worker.process.poll() is None
    assert bool(await run.drops()) is (policy == "reject")
