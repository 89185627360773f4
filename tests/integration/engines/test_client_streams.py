"""Each protocol's client with somebody who reads along, over real HTTP, one try at a time."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engines.test_clients import (
    PROMPT,
    QUICK,
    RID,
    ask,
    both,
    engine_and_client,
    fault_of,
    is_abort,
    until,
)
from tests.scripted_engine import Step, a_reply, a_vllm_completion, a_vllm_reply, scripted
from tests.streams import DONE, Sink, events_of, sse, streams
from worker.engines.client import EngineClient
from worker.engines.protocol import streams as protocol_streams
from worker.engines.protocol.factory import new_client
from worker.engines.protocol.http_base import new_transport
from worker.engines.protocol.replay import ReplayShape, RowShape
from worker.engines.protocol.request import RequestWriter, body_bytes
from worker.engines.protocol.vllm_request import Route, VllmWriter
from worker.engines.protocol.wire_log import WireLog
from worker.engines.sim.http import Exchange
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

IDS = list(range(300, 340))
LONG = Sampling(max_new_tokens=64, seed=5)
WHOLE = {
    "sglang": a_reply(IDS, prompt_tokens=7, id=RID, cached_tokens=5),
    "vllm": a_vllm_reply(IDS, prompt_tokens=7),
}
CUTS = [1, 17, 33]


def told(kind: str, **how: Any) -> list[dict[str, Any]]:
    return events_of(kind, WHOLE[kind], CUTS, **how)


def read_along(sink: Sink, **changes: Any) -> RequestIds:
    return replace(PROMPT, sink=sink, **changes)


async def ask_along(client: EngineClient, sink: Sink, **options: Any) -> Completion:
    return await ask(client, prompt=read_along(sink), sampling=LONG, **options)


def assert_same(got: Completion, want: Completion) -> None:
    for name in want.__slots__:
        ours, theirs = getattr(got, name), getattr(want, name)
        if isinstance(theirs, np.ndarray):
            assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes()), name
        else:
            assert ours == theirs, name


class Held:
    """A step that keeps its exchange, for a test that sends the events itself."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        exchange.begin()
        self.exchanges.append(exchange)

    def send(self, *events: Any) -> None:
        for event in events:
            self.exchanges[-1].write(sse(event))

    def end(self) -> None:
        self.exchanges[-1].write(DONE)
        self.exchanges[-1].end()


# --- what is asked -------------------------------------------------------------------------------
BEFORE = {
    "sglang": b'{"sampling_params":{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,'
    b'"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,'
    b'"skip_special_tokens":false,"spaces_between_special_tokens":false,"no_stop_trim":true,'
    b'"max_new_tokens":16,"sampling_seed":5},"return_logprob":true,"return_routed_experts":false,'
    b'"return_indexer_topk":false,"stream":false,"rid":"0123456789abcdef0123456789abcdef",'
    b'"routing_key":"g1","extra_key":"v2","input_ids":[3838,374,220,16,10,22,30]}',
    "vllm": b'{"sampling_params":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0,'
    b'"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"min_tokens":0,'
    b'"logprobs":1,"skip_special_tokens":false,"watermarking":false,"detokenize":false,'
    b'"max_tokens":16,"seed":5},"stream":false,"request_id":"0123456789abcdef0123456789abcdef",'
    b'"cache_salt":"v2","token_ids":[3838,374,220,16,10,22,30]}',
    "completions": b'{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0,"frequency_penalty":0.0,'
    b'"presence_penalty":0.0,"repetition_penalty":1.0,"min_tokens":0,"logprobs":1,'
    b'"skip_special_tokens":false,"watermarking":false,"return_token_ids":true,'
    b'"return_tokens_as_token_ids":true,"return_weight_versions":true,"max_tokens":16,"seed":5,'
    b'"stream":false,"request_id":"0123456789abcdef0123456789abcdef","cache_salt":"v2",'
    b'"prompt":[3838,374,220,16,10,22,30]}',
}
"""Request bodies as they were before anything was streamed."""


@pytest.mark.parametrize("form", list(BEFORE))
async def test_without_a_reader_not_a_byte_of_a_request_changes(form: str) -> None:
    kind = "sglang" if form == "sglang" else "vllm"
    route = "completions" if form == "completions" else "generate"
    step = a_vllm_completion() if form == "completions" else None
    async with engine_and_client(kind, *([step] if step else []), vllm_route=route) as (
        engine,
        client,
    ):
        await ask(client)
        assert engine.raw[0].body == BEFORE[form]
        head = engine.raw[0].head.decode().replace(engine.url.removeprefix("http://"), "HOST")
    named = {
        "sglang": ["x-smg-routing-key: g1"],
        "vllm": ["x-session-id: g1", f"x-request-id: {RID}"],
    }[kind]
    lines = sorted(line.lower() for line in head.split("\r\n")[1:])
    assert [line for line in lines if not line.startswith(("accept", "user-agent"))] == sorted(
        [
            *named,
            "content-type: application/json",
            f"content-length: {len(BEFORE[form])}",
            "host: host",
        ]
    )


@pytest.mark.parametrize(
    ("num", "interval"), [(1, 16), (512, 16), (528, 16), (1024, 32), (8192, 256), (131072, 4096)]
)
async def test_with_a_reader_sglang_is_asked_for_a_stream_at_a_pace_of_32_events(
    num: int, interval: int
) -> None:
    sampling = Sampling(max_new_tokens=num, seed=5)
    async with engine_and_client("sglang", a_reply([59])) as (engine, client):
        await ask(client, sampling=sampling)
        await ask(client, prompt=read_along(Sink()), sampling=sampling)
    plain, along = engine.requests
    assert along["sampling_params"].pop("stream_interval") == interval
    assert along.pop("stream") is True
    assert plain.pop("stream") is False
    assert along == plain


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_with_a_reader_vllm_is_asked_for_a_stream_and_its_counts(route: str) -> None:
    reply = a_vllm_reply() if route == "generate" else a_vllm_completion()
    async with engine_and_client("vllm", reply, vllm_route=route) as (engine, client):
        await ask(client)
        await ask(client, prompt=read_along(Sink()))
    plain, along = engine.requests
    assert along.get("sampling_params", along).pop("stream_interval") == 16
    assert along.pop("stream_options") == {"include_usage": True}
    assert along.pop("stream") is True
    assert plain.pop("stream") is False
    assert along == plain


def test_a_request_for_a_stream_is_whole_json_with_every_option_set() -> None:
    from tests.contract.test_engine_fields import ASKED, EVERYTHING

    for head in (
        RequestWriter(lora_path="a").head(
            EVERYTHING, rid=RID, routing_key="g", salt=3, replay=ASKED, interval=16
        ),
        VllmWriter(Route.GENERATE, model="m").head(
            EVERYTHING, rid=RID, salt=3, replay=ASKED, interval=16
        ),
        VllmWriter(Route.COMPLETIONS).head(EVERYTHING, rid=RID, replay=ASKED, interval=16),
    ):
        assert json.loads(body_bytes(head, PROMPT))["stream"] is True


# --- the same completion -------------------------------------------------------------------------
async def test_completion_is_the_one_of_a_call_without_a_reader_and_ids_come_as_they_are_told() -> (
    None
):
    completion = a_vllm_completion(IDS)
    for kind, whole, options, how in (
        ("sglang", WHOLE["sglang"], {}, {}),
        ("sglang", WHOLE["sglang"], {}, {"incremental": True}),
        ("vllm", WHOLE["vllm"], {}, {}),
        ("vllm", completion, {"vllm_route": "completions"}, {}),
    ):
        sink, step = Sink(), Held()
        events = events_of(kind, whole, CUTS, **how)
        async with engine_and_client(kind, whole, step, **options) as (engine, client):
            want = await ask(client, sampling=LONG)
            call = asyncio.create_task(ask_along(client, sink))
            await until(lambda step=step: bool(step.exchanges))  # type: ignore[misc]
            for event, num in zip(events, CUTS, strict=False):
                step.send(event)
                await until(lambda num=num, sink=sink: sink.ids == IDS[:num])  # type: ignore[misc]
            assert not call.done()
            step.send(*events[len(CUTS) :])
            step.end()
            assert_same(await call, want)
            assert (client.aborts, len(engine.requests)) == (0, 2)
        assert [len(ids) for ids in sink.added] == [1, 16, 16, 7]
        assert sink.ids == IDS


@both
async def test_connections_of_streams_are_used_again(kind: str) -> None:
    peers: set[int] = set()

    def ends_later(exchange: Exchange) -> None:
        """End the body a moment behind its last event, as a web server does."""
        exchange.write(DONE)
        asyncio.get_running_loop().call_later(0.02, exchange.end)

    def step(exchange: Exchange) -> None:
        peers.add(id(exchange._connection))
        streams(*told(kind), then=ends_later)(exchange)

    async with engine_and_client(kind, step) as (_, client):
        for _ in range(5):
            assert (await ask_along(client, Sink())).ids.tolist() == IDS
    assert len(peers) == 1


@both
async def test_a_server_that_hangs_behind_its_last_event_keeps_nobody(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_streams, "DRAIN_S", 0.05)

    def step(exchange: Exchange) -> None:
        streams(*told(kind), done=False, then=lambda exchange: exchange.write(DONE))(exchange)

    sink = Sink()
    async with engine_and_client(kind, step, abort_wait_s=0.05) as (engine, client):
        assert (await ask_along(client, sink, timeout_s=60.0)).ids.tolist() == IDS
        await until(lambda: engine.raw[0].closed)
        assert client.aborts == 0
    assert sink.ids == IDS


@both
async def test_a_server_that_answers_as_a_whole_is_believed_and_passed_on_at_once(
    kind: str,
) -> None:
    sink = Sink()
    async with engine_and_client(kind, WHOLE[kind]) as (engine, client):
        got = await ask_along(client, sink)
    assert engine.requests[0]["stream"] is True
    assert [len(ids) for ids in sink.added] == [len(IDS)]
    assert sink.ids == got.ids.tolist() == IDS


async def test_the_engine_over_transformers_is_asked_for_the_whole_and_it_is_passed_on() -> None:
    sink = Sink()
    transport = new_transport()
    async with scripted(a_reply(IDS, prompt_tokens=7)) as engine:
        client = new_client("hf", engine.url, transport, QUICK)
        assert (await ask_along(client, sink)).ids.tolist() == IDS
        await client.aclose()
    await transport.aclose()
    assert engine.requests[0]["stream"] is False
    assert "stream_interval" not in engine.requests[0]["sampling_params"]
    assert [len(ids) for ids in sink.added] == [len(IDS)]


async def test_completions_of_vllm_are_no_stream_where_experts_are_asked_for() -> None:
    sink = Sink()
    shape = ReplayShape(RowShape(2, 3))
    reply = (503, b"full")
    async with engine_and_client("vllm", reply, vllm_route="completions", replay=shape) as (
        engine,
        client,
    ):
        await fault_of(client, prompt=read_along(sink, replay_start=0))
    assert engine.requests[0]["stream"] is False


@both
async def test_witness_and_wire_log_get_the_whole_reply(kind: str, tmp_path: Path) -> None:
    seen: list[tuple[tuple[bytes, ...], Completion]] = []

    class Seer:
        def add(self, pieces: tuple[bytes, ...], completion: Completion) -> None:
            seen.append((pieces, completion))

    log = WireLog(tmp_path)
    async with engine_and_client(kind, streams(*told(kind)), wire_log=log) as (engine, client):
        prompt = read_along(Sink(), witness=Seer())
        got = await ask(client, prompt=prompt, sampling=LONG)
    log.close()
    assert seen == [((b"3838,374,220,16", b"10,22,30"), got)]
    assert (tmp_path / f"{RID}.req").read_bytes() == engine.raw[0].body
    kept = json.loads((tmp_path / f"{RID}.rep").read_bytes())
    if kind == "sglang":
        assert kept == json.loads(WHOLE[kind])
    else:
        assert kept["choices"][0]["token_ids"] == IDS
        assert len(kept["choices"][0]["logprobs"]["content"]) == len(IDS)


# --- ends other than a reply ---------------------------------------------------------------------
ABORT: dict[str, dict[str, Any]] = {
    "sglang": {"finish": {"type": "abort", "message": "x", "status_code": None}},
    "vllm": {"finish": "abort"},
}


def stopped(kind: str, num: int) -> list[dict[str, Any]]:
    """Return the events of a reply that was aborted behind so many tokens."""
    make = {"sglang": a_reply, "vllm": a_vllm_reply}[kind]
    whole = make(IDS[:num], prompt_tokens=7, **ABORT[kind])
    return events_of(kind, whole, [cut for cut in CUTS if cut < num])


@both
async def test_a_stream_out_of_time_is_aborted_and_what_it_brings_then_is_no_reply(
    kind: str,
) -> None:
    sink, step = Sink(), Held()
    events = stopped(kind, 20)
    async with engine_and_client(kind, step) as (engine, client):
        engine.aborted = lambda rid: (step.send(*events[2:]), step.end())  # type: ignore[func-returns-value]
        call = asyncio.create_task(fault_of_along(client, sink, timeout_s=0.3))
        await until(lambda: bool(step.exchanges))
        step.send(*events[:2])
        assert await call == "timeout"
        assert is_abort(kind, engine)
    assert sink.ids == IDS[:17]


async def fault_of_along(client: EngineClient, sink: Sink, **options: Any) -> str:
    fault = await fault_of(client, prompt=read_along(sink), sampling=LONG, **options)
    return fault.detail


@both
async def test_a_stream_that_is_whole_when_its_abort_crosses_it_is_used(kind: str) -> None:
    sink, step = Sink(), Held()
    async with engine_and_client(kind, step) as (engine, client):
        engine.aborted = lambda rid: (step.send(*told(kind)), step.end())  # type: ignore[func-returns-value]
        assert (await ask_along(client, sink, timeout_s=0.3)).finish is Finish.STOP
    assert sink.ids == IDS


@both
async def test_a_stream_that_is_silent_after_its_abort_is_not_awaited_for_ever(kind: str) -> None:
    sink, step = Sink(), Held()
    async with engine_and_client(kind, step, abort_wait_s=0.05) as (engine, client):
        call = asyncio.create_task(fault_of_along(client, sink, timeout_s=0.3))
        await until(lambda: bool(step.exchanges))
        step.send(told(kind)[0])
        assert await call == "timeout"
        await until(lambda: step.exchanges[0].closed)
        assert is_abort(kind, engine)
    assert sink.ids == IDS[:1]


@both
async def test_a_pause_extends_the_time_of_a_stream(kind: str) -> None:
    asked: list[int] = []
    sink, step = Sink(), Held()

    async def extend() -> float:
        asked.append(1)
        if len(asked) == 3:
            step.send(*told(kind))
            step.end()
        return 0.02 if len(asked) < 3 else 20.0

    async with engine_and_client(kind, step) as (_, client):
        got = await ask_along(client, sink, timeout_s=0.3, extend=extend)
        assert (got.finish, len(asked), client.aborts) == (Finish.STOP, 3, 0)
    assert sink.ids == IDS


@both
async def test_an_abort_by_somebody_else_brings_the_rest_of_a_stream(kind: str) -> None:
    sink, step = Sink(), Held()
    events = stopped(kind, 20)
    async with engine_and_client(kind, step) as (engine, client):
        engine.aborted = lambda rid: (step.send(*events[2:]), step.end())  # type: ignore[func-returns-value]
        call = asyncio.create_task(ask_along(client, sink))
        await until(lambda: bool(step.exchanges))
        step.send(*events[:2])
        await until(lambda: sink.ids == IDS[:17])
        assert await client.abort(RID)
        got = await call
        assert (got.finish, got.ids.tolist()) == (Finish.ABORT, IDS[:20])
    assert sink.ids == IDS[:20]


@both
async def test_a_cancelled_stream_is_aborted_and_its_connection_closed(kind: str) -> None:
    sink, step = Sink(), Held()
    async with engine_and_client(kind, step) as (engine, client):
        call = asyncio.create_task(ask_along(client, sink))
        await until(lambda: bool(step.exchanges))
        step.send(told(kind)[0])
        await until(lambda: bool(sink.added))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: is_abort(kind, engine) and step.exchanges[0].closed)
        step.send(*told(kind)[1:])
    assert sink.ids == IDS[:1], "nothing is passed on behind the end of a call"


@both
async def test_a_reader_that_breaks_stops_the_engine_and_is_heard(kind: str) -> None:
    class Broken(Sink):
        def add(self, ids: Any) -> None:
            raise LookupError("a bug")

    step = Held()
    async with engine_and_client(kind, step) as (engine, client):
        call = asyncio.create_task(ask_along(client, Broken()))
        await until(lambda: bool(step.exchanges))
        step.send(told(kind)[0])
        with pytest.raises(LookupError, match="a bug"):
            await call
        await until(lambda: is_abort(kind, engine) and step.exchanges[0].closed)


def closes(exchange: Exchange) -> None:
    exchange.drop()


def breaks(exchange: Exchange) -> None:
    exchange.break_piece(b"x" * 100)


def ends(exchange: Exchange) -> None:
    exchange.end()


@both
@pytest.mark.parametrize("then", [closes, breaks, ends])
@pytest.mark.parametrize("num", [0, 2])
async def test_a_stream_that_is_cut_is_half_a_reply(
    kind: str, then: Callable[[Exchange], None], num: int
) -> None:
    sink = Sink()
    async with engine_and_client(kind, streams(*told(kind)[:num], then=then)) as (_, client):
        assert await fault_of_along(client, sink) == "reset"
    assert sink.ids == IDS[: CUTS[num - 1] if num else 0]


@both
async def test_what_is_wrong_in_a_stream_stops_the_engine_that_samples_on(kind: str) -> None:
    """What the pool does not abort, since its replies have ended elsewhere, the client does."""
    wrong = told(kind)[2]
    if kind == "sglang":
        wrong["output_ids"][-1] = 10**6
    else:
        wrong["choices"][0]["token_ids"][-1] = 10**6
    sink, step = Sink(), Held()
    async with engine_and_client(kind, step) as (engine, client):
        call = asyncio.create_task(fault_of_along(client, sink))
        await until(lambda: bool(step.exchanges))
        step.send(*told(kind)[:2], wrong)
        assert await call == "bad_token"
        await until(lambda: is_abort(kind, engine) and step.exchanges[0].closed)
        assert client.aborts == 1
    assert sink.ids == IDS[:17]


@both
@pytest.mark.parametrize(
    ("step", "detail"),
    [
        ((503, b'{"error":{"message":"full"}}'), "unavailable"),
        ((500, b'{"error":{"message":"sampling failed"}}'), "server_error"),
        ((404, b'{"detail":"Not Found"}'), "refused"),
        ((400, b'{"error":{"message":"longer than the context length"}}'), "context_overflow"),
        (b'{"error": {"message": "out of luck"}}', "bad_reply"),
        (b"<html>", "bad_reply"),
        (streams({"error": {"message": "Internal server error", "code": 500}}), "server_error"),
        (streams({"error": {"message": "longer than the context length", "code": 400}}),
         "context_overflow"),
        (streams(), "unknown_finish"),
        (streams(b"<html>\n\n"), "bad_reply"),
    ],
)  # fmt: skip
async def test_what_is_no_reply_has_the_name_that_it_has_without_a_stream(
    kind: str, step: Step, detail: str
) -> None:
    sink = Sink()
    async with engine_and_client(kind, step) as (_, client):
        assert await fault_of_along(client, sink) == detail
    assert sink.added == []


# --- cost ----------------------------------------------------------------------------------------
@both
async def test_a_streamed_request_leaves_no_cyclic_objects(kind: str) -> None:
    async with engine_and_client(kind, streams(*told(kind))) as (_, client):
        for _ in range(20):
            await ask_along(client, Sink())
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                await ask_along(client, Sink())
            assert gc.collect() < 100
        finally:
            gc.enable()
