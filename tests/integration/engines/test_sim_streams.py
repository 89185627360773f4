"""The simulated engine's streams: their events, their pace, and whoever leaves one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_pool import a_pool
from tests.sim_server import SimServer, eventually, sim_server
from tests.streams import Sink
from tests.vocabulary_once import tokenizer_of
from worker.engines.protocol.stream import interval_of
from worker.engines.protocol.streams import STREAM_FACTOR
from worker.engines.sim.policy import Policy, expected_log_probs
from worker.engines.sim.script import PolicyConfig
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

PROMPT = [151644, 872, 198, 3838, 151645, 198, 151644, 77091, 198]
IDS = RequestIds([b",".join(b"%d" % one for one in PROMPT)], len(PROMPT))
PATHS = {
    "sglang": "/generate",
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
}
forms = pytest.mark.parametrize("form", list(PATHS))
kinds = pytest.mark.parametrize("kind", ["sglang", "vllm"])


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    """One that says long things."""
    config = PolicyConfig(max_sentences=40, think_rate=1.0)
    return Policy(tokenizer_of(str(vocabulary)), {}, config)


def body_of(form: str, *, num: int = 40, interval: int | None = 8, **more: Any) -> dict[str, Any]:
    pace = {} if interval is None else {"stream_interval": interval}
    if form == "sglang":
        sampling = {"max_new_tokens": num, "sampling_seed": 4, **pace}
        asked: dict[str, Any] = {"input_ids": PROMPT, "return_logprob": True}
    else:
        sampling = {"max_tokens": num, "seed": 4, "logprobs": 1, **pace}
        asked = {"token_ids": PROMPT}
    if form == "completions":
        return {"prompt": PROMPT, "return_token_ids": True, **sampling, "stream": True, **more}
    return {**asked, "sampling_params": sampling, "stream": True, **more}


def events_in(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream, which must end as both servers end theirs."""
    *events, done, rest = raw.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def ids_of(event: dict[str, Any]) -> list[int]:
    if "meta_info" in event:
        ids: list[int] = event["output_ids"]
        return ids
    return [token for choice in event["choices"] for token in choice["token_ids"]]


async def stream(sim: SimServer, form: str, **how: Any) -> list[dict[str, Any]]:
    answer = await sim.post(PATHS[form], body_of(form, **how))
    assert answer.headers["content-type"] == "text/event-stream"
    assert (answer.status_code, "content-length" in answer.headers) == (200, False)
    return events_in(answer.content)


# --- events --------------------------------------------------------------------------------------
async def test_sglang_says_all_so_far_or_what_is_new_and_counts_all_in_both(policy: Policy) -> None:
    for incremental in (False, True):
        async with sim_server(policy, incremental=incremental, version="3") as sim:
            whole = (await sim.post("/generate", body_of("sglang", stream=False))).json()
            events = await stream(sim, "sglang")
        ends = [event["meta_info"]["completion_tokens"] for event in events]
        assert ends == [1, 9, 17, 25, 33, 40]
        starts = [0, *ends[:-1]] if incremental else [0] * len(ends)
        for event, start, end in zip(events, starts, ends, strict=True):
            meta = event["meta_info"]
            assert event["output_ids"] == whole["output_ids"][start:end]
            want = whole["meta_info"]["output_token_logprobs"][start:end]
            assert meta["output_token_logprobs"] == want
            is_last = end == ends[-1]
            assert (meta["finish_reason"] is not None, "weight_versions" in meta) == (
                is_last,
                is_last,
            )
        if not incremental:
            for said in (whole, events[-1]):
                del said["meta_info"]["e2e_latency"], said["meta_info"]["id"]
            assert events[-1] == whole, "the last event is the reply without a stream"


@pytest.mark.parametrize("form", ["generate", "completions"])
async def test_vllm_says_what_is_new_and_its_counts_where_they_are_asked_for(
    form: str, policy: Policy
) -> None:
    async with sim_server(policy, version="3") as sim:
        whole = (await sim.post(PATHS[form], body_of(form, stream=False))).json()
        silent = await stream(sim, form, return_weight_versions=True)
        events = await stream(sim, form, stream_options={"include_usage": True})
    assert [len(ids_of(event)) for event in events] == [1, 8, 8, 8, 8, 7, 0]
    said = [token for event in events for token in ids_of(event)]
    assert said == whole["choices"][0]["token_ids"]
    assert [event for event in silent if not event["choices"]] == []
    last, counts = events[-2], events[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert silent[-1]["choices"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 40}]
    assert [event["choices"][0].get("weight_versions") for event in silent[:-1]] == [None] * 5
    assert counts["usage"] == {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}


@forms
async def test_events_end_where_the_interval_says_whatever_the_clock_does(
    form: str, policy: Policy
) -> None:
    async with sim_server(policy, incremental=True) as sim:
        for num, interval, want in (
            (1, 8, [1]), (2, 8, [1, 1]), (9, 8, [1, 8]), (10, 8, [1, 8, 1]), (5, None, [1] * 5),
            (5, 100, [1, 4]),
        ):  # fmt: skip
            events = await stream(sim, form, num=num, interval=interval)
            assert [len(ids_of(event)) for event in events] == want


@forms
async def test_an_abort_tells_what_was_not_told_yet_in_events_of_the_same_ends(
    form: str, policy: Policy
) -> None:
    async with sim_server(policy, incremental=True, latency_s=3600.0) as sim:
        call = asyncio.create_task(stream(sim, form))
        await sim.flying(1)
        sim.now_s = 3600.0 * 20 / 40
        await sim.post("/abort_request", {"abort_all": True})
        assert [len(ids_of(event)) for event in await call] == [1, 8, 8, 3]


async def test_what_sglang_refuses_in_a_stream_is_an_event_but_for_its_contract(
    policy: Policy,
) -> None:
    async with sim_server(policy, context_tokens=20) as sim:
        answer = await sim.post("/generate", body_of("sglang", num=12))
        assert answer.status_code == 200
        (event,) = events_in(answer.content)
        assert event["error"]["code"] == 400
        assert "context length" in event["error"]["message"]
        wrong = body_of("sglang")
        wrong["sampling_params"]["seed"] = 1
        assert (await sim.post("/generate", wrong)).status_code == 400
        assert (
            await sim.post("/v1/completions", body_of("completions", num=99))
        ).status_code == 400
        assert sim.engine.counts["refused"] == 3
        options = {"stream": False, "stream_options": {"include_usage": True}}
        answer = await sim.post("/v1/completions", body_of("completions", num=2, **options))
        assert answer.status_code == 400


# --- bytes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("num", [1024, pytest.param(8192, marks=pytest.mark.slow)])
async def test_a_cumulative_stream_at_our_pace_is_at_most_20_times_its_reply(
    num: int, vocabulary: Path
) -> None:
    config = PolicyConfig(max_sentences=num // 4, think_rate=1.0, tool_rate=0.0)
    wordy = Policy(tokenizer_of(str(vocabulary)), {}, config)
    async with sim_server(wordy) as sim:
        found: dict[int, int] = {}
        for seed in range(40):
            body = body_of("sglang", num=num, interval=interval_of(num))
            body["sampling_params"]["sampling_seed"] = seed
            whole = await sim.post("/generate", body | {"stream": False})
            if len(whole.json()["output_ids"]) == num:
                told = await sim.post("/generate", body)
                events = events_in(told.content)
                found = {len(events): len(told.content)}
                break
        ((num_events, num_bytes),) = found.items()
    assert num_events == 33
    assert ids_of(events[-1]) == whole.json()["output_ids"]
    assert 10 < num_bytes / len(whole.content) < STREAM_FACTOR


# --- while it lasts ------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def paced(
    policy: Policy, kind: str, seconds: float, **dialect: Any
) -> AsyncIterator[tuple[SimServer, Any]]:
    """Yield an engine whose replies take so long, of real time, and a way to ask it along."""
    async with sim_server(policy, latency_s=seconds, version="3", **dialect) as sim:
        sim.engine.core.clock = time.monotonic
        async with a_pool(sim.url, kind=kind, max_retries=0) as pool:

            async def ask(sink: Sink | None) -> Completion:
                sampling = Sampling(max_new_tokens=1024, seed=4)
                prompt = replace(IDS, sink=sink)
                return await pool.generate(prompt, sampling, routing_key="g", version=3)

            yield sim, ask


@kinds
async def test_ids_are_told_while_the_rest_is_sampled(kind: str, policy: Policy) -> None:
    sink = Sink()
    async with paced(policy, kind, 0.4) as (sim, ask):
        call = asyncio.create_task(ask(sink))
        await eventually(lambda: len(sink.added) >= 3)
        assert len(sim.engine.core.flights) == 1, "it samples on"
        got = await call
    assert len(sink.added) > 10
    assert sink.ids == got.ids.tolist()


@kinds
async def test_an_abort_in_the_middle_brings_the_rest_of_what_was_sampled(
    kind: str, policy: Policy
) -> None:
    sink = Sink()
    async with paced(policy, kind, 60.0) as (sim, ask):
        (flight,) = [await _flight_at(sim, ask, sink, calls := [], tokens=40)]
        told = flight.sent
        for path, body in (("/abort_request", {"abort_all": True}), ("/abort_requests", {})):
            if (path == "/abort_request") == (kind == "sglang"):
                await sim.post(path, body)
        got = await calls[0]
        assert sim.engine.counts["aborted"] == 1
    assert got.finish is Finish.ABORT
    assert len(got.ids) >= told >= 17
    assert sink.ids == got.ids.tolist()


async def _flight_at(sim: SimServer, ask: Any, sink: Sink, calls: list[Any], *, tokens: int) -> Any:
    """Begin a call, and turn the clock to where so many of its tokens are there."""
    calls.append(asyncio.create_task(ask(sink)))
    await sim.flying(1)
    (flight,) = sim.engine.core.flights.values()
    (key,) = sim.engine.core.flights
    flight.elapsed_s += flight.duration_s * tokens / flight.cut
    flight.timer.cancel()
    sim.engine.core._tell_and_wait(key, flight)
    await eventually(lambda: len(sink.ids) > 1)
    return flight


@kinds
async def test_who_leaves_a_stream_has_its_request_stopped_at_once(
    kind: str, policy: Policy
) -> None:
    sink = Sink()
    async with paced(policy, kind, 3600.0) as (sim, ask):
        calls: list[Any] = []
        await _flight_at(sim, ask, sink, calls, tokens=40)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await eventually(lambda: not sim.engine.core.flights)
        counts = (await sim.get("/sim"))["counts"]
        assert counts["left"] + counts.get("aborted", 0) == 1
        assert (await sim.get("/sim"))["in_flight"] == 0


@forms
async def test_a_connection_that_is_closed_cancels_its_request_and_is_counted(
    form: str, policy: Policy
) -> None:
    async with sim_server(policy, latency_s=3600.0) as sim:
        async with httpx.AsyncClient(base_url=sim.url, timeout=30, verify=False) as client:
            for is_stream in (True, False):
                body = body_of(form, stream=is_stream)
                call = asyncio.create_task(client.post(PATHS[form], json=body))
                await sim.flying(1)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call
                await sim.flying(0)
        assert sim.engine.counts["left"] == 2
        assert sim.engine.counts["aborted"] == 0


@kinds
async def test_a_pause_holds_a_stream_and_its_end_lets_it_go_on(kind: str, policy: Policy) -> None:
    sink = Sink()
    pause = {
        "sglang": ("/pause_generation", {"mode": "in_place"}),
        "vllm": ("/pause?mode=keep", {}),
    }
    async with paced(policy, kind, 60.0) as (sim, ask):
        calls: list[Any] = []
        flight = await _flight_at(sim, ask, sink, calls, tokens=40)
        assert (await sim.post(*pause[kind])).status_code == 200
        told, elapsed_s = flight.sent, sim.engine.core.elapsed_s(flight)
        assert flight.timer is None
        assert (flight.sent, sim.engine.core.elapsed_s(flight)) == (told, elapsed_s)
        flight.elapsed_s = flight.duration_s
        await sim.post("/continue_generation" if kind == "sglang" else "/resume")
        got = await calls[0]
    assert got.finish is Finish.STOP
    assert sink.ids == got.ids.tolist()


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_that_is_retracted_and_aborted_brings_what_it_had_told(
    incremental: bool, policy: Policy
) -> None:
    """SGLang answers it from the queue: with one id and all log-probs, where it is incremental."""
    sink = Sink()
    async with paced(policy, "sglang", 60.0, incremental=incremental) as (sim, ask):
        calls: list[Any] = []
        flight = await _flight_at(sim, ask, sink, calls, tokens=40)
        told = flight.sent
        await sim.post("/pause_generation", {"mode": "retract"})
        await sim.post("/abort_request", {"abort_all": True})
        got = await calls[0]
    assert got.finish is Finish.ABORT
    assert (len(got.ids), sink.ids) == (told, got.ids.tolist())
    assert got.log_probs.tolist() == expected_log_probs([*PROMPT, *sink.ids], 9).tolist()


@kinds
async def test_new_weights_in_the_middle_are_in_the_spans_and_in_the_log_probs(
    kind: str, policy: Policy
) -> None:
    sink = Sink()
    async with paced(policy, kind, 60.0, versioned=True, incremental=True) as (sim, ask):
        calls: list[Any] = []
        flight = await _flight_at(sim, ask, sink, calls, tokens=40)
        body = {"new_version": "4", "abort_all_requests": False}
        await sim.post("/update_weight_version", body)
        flight.elapsed_s = flight.duration_s
        flight.timer.cancel()
        (key,) = sim.engine.core.flights
        sim.engine.core._land(key, flight)
        got = await calls[0]
    (old, _, change), (new, _, end) = got.versions
    assert (old, new, end) == (3, 4, len(got.ids))
    assert 40 <= change < end
    labels = ["3"] * change + ["4"] * (end - change)
    want = expected_log_probs([*PROMPT, *got.ids.tolist()], 9, version=labels)
    assert got.log_probs.tolist() == want.tolist()
    assert sink.ids == got.ids.tolist()


@forms
async def test_a_restart_cuts_streams(form: str, policy: Policy) -> None:
    async with sim_server(policy, latency_s=3600.0) as sim:
        call = asyncio.create_task(sim.post(PATHS[form], body_of(form)))
        await sim.flying(1)
        await sim.post("/sim/restart")
        with pytest.raises(httpx.RemoteProtocolError):
            await call
        assert sim.engine.counts["left"] == 0
