"""A pool's call with somebody who reads along: what is tried again, and what no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollstream.errors import EngineFault, Withheld
from tests.engine_pool import PROMPT, a_pool, wait_until
from tests.scripted_engine import (
    ABORTS,
    ScriptedEngine,
    Step,
    a_reply,
    a_vllm_reply,
    hang,
    reset,
    scripted,
)
from tests.streams import DONE, Sink, events_of, sse, streams
from worker.engines.fleet.pool import EnginePool
from worker.engines.sim.http import Exchange
from worker.members.gate import Gate, GatedEngine, Position
from worker.sampling import Sampling
from worker.types import Completion, Finish

IDS = list(range(300, 340))
KINDS = ("sglang", "vllm")
both = pytest.mark.parametrize("kind", KINDS)
GOOD = {"sglang": a_reply(IDS, prompt_tokens=7), "vllm": a_vllm_reply(IDS, prompt_tokens=7)}
TOLD = {kind: events_of(kind, GOOD[kind], [1, 17, 33]) for kind in KINDS}
FULL: Step = (503, b'{"error":{"message":"The request queue is full."}}')


async def ask(engine: EnginePool | GatedEngine, sink: Sink, **options: Any) -> Completion:
    prompt = replace(PROMPT, sink=sink)
    sampling = Sampling(max_new_tokens=64, seed=5)
    got = await engine.generate(prompt, sampling, routing_key="g1", version=3, **options)
    assert prompt.sink is sink, "the caller's own record stays as it is"
    return got


async def fault_of(pool: EnginePool, sink: Sink) -> str:
    with pytest.raises(EngineFault) as caught:
        await ask(pool, sink)
    return caught.value.detail


def rids_of(engine: ScriptedEngine) -> list[str]:
    return [body.get("rid") or body["request_id"] for body in engine.requests]


def aborted(engine: ScriptedEngine) -> list[str]:
    return [rid.rpartition("-")[2] for path, rid in engine.log if path in ABORTS]


def good(kind: str) -> Step:
    return streams(*TOLD[kind])


# --- what is tried again -------------------------------------------------------------------------
@both
@pytest.mark.parametrize(
    "first",
    [
        FULL,
        (500, b"{}"),
        reset,
        b"<html>",
        streams(then=lambda exchange: exchange.drop()),
        streams({"error": {"message": "Internal server error", "code": 500}}),
        streams({"error": {"message": "busy", "code": 503}}),
        streams(b"<html>\n\n"),
        streams(),
    ],
)
async def test_a_try_of_which_nothing_was_passed_on_is_made_again_as_ever(
    kind: str, first: Step
) -> None:
    sink = Sink()
    async with scripted(first, good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        got = await ask(pool, sink)
        assert (pool.counters.retries, pool.counters.engines[0].in_flight) == (1, 0)
    assert sink.begun == rids_of(engine), "each try is announced by the id that it is sent with"
    assert len(set(sink.begun)) == 2
    assert sink.ids == got.ids.tolist() == IDS


@both
async def test_a_try_is_announced_before_it_is_sent(kind: str) -> None:
    order: list[str] = []

    class Seer(Sink):
        def begin(self, rid: str) -> bool:
            order.append(f"begin {rid}")
            return super().begin(rid)

    def step(exchange: Exchange) -> None:
        order.append(f"sent {rids_of(engine)[-1]}")
        good(kind)(exchange)  # type: ignore[operator]

    async with scripted(step) as engine, a_pool(engine.url, kind=kind) as pool:
        got = await ask(pool, Seer())
    assert order == [f"begin {got.rid}", f"sent {got.rid}"]


@both
async def test_a_connection_that_was_given_up_costs_a_reader_nothing(kind: str) -> None:
    def given_up(exchange: Exchange) -> None:
        exchange.drop()

    sink = Sink()
    async with (
        scripted(good(kind), given_up, good(kind)) as engine,
        a_pool(engine.url, kind=kind) as pool,
    ):
        await ask(pool, Sink())
        assert (await ask(pool, sink)).ids.tolist() == IDS
        assert (pool.counters.retries, pool.counters.stale_connections) == (0, 1)
    assert sink.begun == rids_of(engine)[1:]
    assert sink.ids == IDS


async def test_a_call_that_a_paused_vllm_refuses_waits_for_the_end_of_the_pause() -> None:
    sink = Sink()
    async with scripted(FULL, good("vllm")) as engine, a_pool(engine.url, kind="vllm") as pool:
        engine.paused = True
        call = asyncio.create_task(ask(pool, sink))
        await wait_until(lambda: pool.states()[0].state.value == "paused")
        assert not call.done()
        engine.paused = False
        assert (await call).ids.tolist() == IDS
        assert pool.counters.retries == 0
    assert len(sink.begun) == 2
    assert sink.ids == IDS


# --- and what is not -----------------------------------------------------------------------------
def dropped(exchange: Exchange) -> None:
    exchange.drop()


def event_of(code: int) -> Any:
    return {"error": {"message": "broken", "code": code}}


@both
@pytest.mark.parametrize(
    ("last", "then", "detail", "num_aborts"),
    [
        ((), dropped, "reset", 1),
        ((event_of(503),), None, "unavailable", 1),
        ((event_of(500),), None, "server_error", 1),
        ((event_of(400),), None, "refused", 1),
        ((sse(b"{"),), None, "bad_reply", 1),
        ((DONE,), dropped, "unknown_finish", 0),
    ],
)
async def test_a_try_of_which_something_was_passed_on_is_the_last_one(
    kind: str, last: Any, then: Callable[[Exchange], None] | None, detail: str, num_aborts: int
) -> None:
    sink = Sink()
    step = streams(*TOLD[kind][:2], *last, then=then)
    async with scripted(step, good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        assert await fault_of(pool, sink) == detail
        assert pool.counters.retries == 0
        counted = pool.counters.engines[0].requests
        assert {name: num for name, num in counted.items() if num} == {detail: 1}
        assert pool.counters.engines[0].in_flight == 0
    assert len(engine.requests) == 1
    assert aborted(engine) == sink.begun * num_aborts, "nobody samples on"
    assert (sink.ids, sink.refused) == (IDS[:17], [])


@both
async def test_a_stream_that_is_out_of_time_is_the_last_try(kind: str) -> None:
    sink = Sink()
    held = streams(*TOLD[kind][:2], then=lambda exchange: None)
    async with (
        scripted(held, good(kind)) as engine,
        a_pool(engine.url, kind=kind, request_timeout_s=0.2, abort_wait_s=0.05) as pool,
    ):
        assert await fault_of(pool, sink) == "timeout"
    assert (len(engine.requests), aborted(engine)) == (1, sink.begun)
    assert sink.ids == IDS[:17]


async def test_an_engine_that_is_paused_and_had_passed_something_on_is_not_waited_for() -> None:
    sink = Sink()
    step = streams(*TOLD["vllm"][:2], event_of(503))
    async with scripted(step, good("vllm")) as engine, a_pool(engine.url, kind="vllm") as pool:
        engine.paused = True
        assert await fault_of(pool, sink) == "unavailable"
    assert len(engine.requests) == 1


@both
async def test_a_whole_reply_that_is_wrong_leaves_its_last_event_to_another_try(kind: str) -> None:
    """A reply of one event is believed before a token of it is passed on."""
    bad = {
        "sglang": a_reply(IDS, log_probs=[0.5] * len(IDS)),
        "vllm": a_vllm_reply(IDS, log_probs=[0.5] * len(IDS)),
    }[kind]
    sink = Sink()
    first = streams(*events_of(kind, bad, []))
    async with scripted(first, good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        assert (await ask(pool, sink)).ids.tolist() == IDS
        assert pool.counters.engines[0].requests["bad_logprob"] == 1
    assert len(sink.begun) == 2
    assert sink.ids == IDS


@both
async def test_streams_that_break_put_an_engine_aside_like_other_calls(kind: str) -> None:
    step = streams(*TOLD[kind][:2], then=dropped)
    async with scripted(step) as engine, a_pool(engine.url, kind=kind) as pool:
        for _ in range(3):
            assert await fault_of(pool, Sink()) == "reset"
        assert pool.counters.ejections == 1
    assert len(engine.requests) == 3


# --- who reads decides ---------------------------------------------------------------------------
@both
async def test_a_reader_that_refuses_another_try_gets_the_fault_of_the_last_one(kind: str) -> None:
    sink = Sink(takes=1)
    async with scripted(FULL, good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        assert await fault_of(pool, sink) == "unavailable"
        assert pool.counters.engines[0].in_flight == 0
    assert (len(engine.requests), len(sink.refused)) == (1, 1)


@both
async def test_a_reader_that_refuses_the_first_try_has_nothing_sent(kind: str) -> None:
    sink = Sink(takes=0)
    async with scripted(good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        assert await fault_of(pool, sink) == "refused"
        assert pool.counters.engines[0].in_flight == 0
        assert (await ask(pool, Sink())).ids.tolist() == IDS
    assert len(engine.requests) == 1


# --- pauses and gates ----------------------------------------------------------------------------
class Held:
    """A step that sends the first events, and the rest of a reply when it is aborted."""

    def __init__(self, kind: str, num: int) -> None:
        make = {"sglang": a_reply, "vllm": a_vllm_reply}[kind]
        finish: Any = "abort" if kind == "vllm" else {"type": "abort", "message": "x"}
        self._events = events_of(kind, make(IDS[:num], finish=finish), [1, 17])
        self.exchanges: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        streams(*self._events[:2], then=lambda exchange: None)(exchange)

    def stop(self, _: str) -> None:
        for event in self._events[2:]:
            self.exchanges[-1].write(sse(event))
        self.exchanges[-1].write(DONE)
        self.exchanges[-1].end()


@both
async def test_streams_that_are_aborted_with_all_others_bring_what_there_is(kind: str) -> None:
    sink, held = Sink(), Held(kind, 20)
    async with scripted(held) as engine, a_pool(engine.url, kind=kind) as pool:
        engine.aborted = held.stop
        call = asyncio.create_task(ask(pool, sink))
        await wait_until(lambda: sink.ids == IDS[:17])
        assert pool.abort_all() == 1
        got = await call
    assert (got.finish, got.ids.tolist()) == (Finish.ABORT, IDS[:20])
    assert sink.ids == IDS[:20]


@both
async def test_streams_that_do_not_stop_in_time_are_withheld(kind: str) -> None:
    sink, held = Sink(), Held(kind, 20)
    async with scripted(held) as engine, a_pool(engine.url, kind=kind, abort_wait_s=0.05) as pool:
        call = asyncio.create_task(ask(pool, sink))
        await wait_until(lambda: sink.ids == IDS[:17])
        pool.abort_all()
        with pytest.raises(Withheld):
            await call
        await wait_until(lambda: held.exchanges[0].closed)
    assert len(engine.requests) == 1


@both
async def test_a_gate_passes_on_what_is_read_along(kind: str) -> None:
    sink, gate = Sink(), Gate()
    async with scripted(good(kind)) as engine, a_pool(engine.url, kind=kind) as pool:
        gated = GatedEngine(pool, gate)
        assert (await ask(gated, sink, deadline_s=30.0)).ids.tolist() == IDS
        gate.move(Position.ABORT)
        with pytest.raises(Withheld):
            await ask(gated, Sink(takes=0))
    assert (len(engine.requests), sink.ids) == (1, IDS)


@both
async def test_a_gates_deadline_ends_a_stream_and_the_engine_is_told(kind: str) -> None:
    sink, gate = Sink(), Gate()
    held = streams(*TOLD[kind][:2], then=lambda exchange: None)
    async with scripted(held) as engine, a_pool(engine.url, kind=kind) as pool:
        with pytest.raises(EngineFault) as caught:
            await ask(GatedEngine(pool, gate), sink, deadline_s=0.2)
        assert caught.value.detail == "timeout"
        await wait_until(lambda: aborted(engine) == sink.begun and engine.raw[0].closed)
    assert sink.ids == IDS[:17]
    assert gate.in_flight == 0


@both
async def test_a_silent_engine_is_left_by_who_reads_no_more(kind: str) -> None:
    sink = Sink()
    async with scripted(hang) as engine, a_pool(engine.url, kind=kind) as pool:
        call = asyncio.create_task(ask(pool, sink))
        await wait_until(lambda: len(engine.requests) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until(lambda: aborted(engine) == sink.begun)
        assert pool.counters.engines[0].in_flight == 0
