"""Each protocol's client over real HTTP, one try at a time, against engines of exact bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollstream.errors import ConfigError, ContractError, EngineFault
from rollstream.sample import UNKNOWN_VERSION
from tests.scripted_engine import (
    ScriptedEngine,
    Step,
    a_reply,
    a_vllm_completion,
    a_vllm_reply,
    hang,
    reset,
    scripted,
)
from worker.engines.client import EngineClient, Look
from worker.engines.protocol.factory import new_client
from worker.engines.protocol.http_base import ClientOptions, new_transport
from worker.engines.protocol.replay import ReplayShape, RowShape
from worker.engines.protocol.versions import VersionMap
from worker.engines.sim.http import Exchange
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

RID = "0123456789abcdef" * 2
PROMPT = RequestIds([b"3838,374,220,16", b"10,22,30"], 7)
IDS = [3838, 374, 220, 16, 10, 22, 30]
QUICK = ClientOptions(max_token_id=151668, connect_timeout_s=2.0, abort_wait_s=5.0)
ABORTED = {
    "sglang": a_reply([59], finish={"type": "abort", "message": "x", "status_code": None}),
    "vllm": a_vllm_reply([59], finish="abort"),
}
GOOD = {"sglang": a_reply(prompt_tokens=7), "vllm": a_vllm_reply(prompt_tokens=7)}
TOO_LONG = (
    b'{"error":{"message":"The decoder prompt (length 70) is longer than the maximum model length '
    b'of 64."}}'
)
TOO_MANY = b'{"error":{"message":"max_tokens=99 cannot be greater than max_model_len=64."}}'
both = pytest.mark.parametrize("kind", ["sglang", "vllm"])


@contextlib.asynccontextmanager
async def engine_and_client(
    kind: str, *steps: Step, **options: Any
) -> AsyncIterator[tuple[ScriptedEngine, EngineClient]]:
    transport = new_transport()
    async with scripted(*steps or (GOOD[kind],)) as engine:
        client = new_client(kind, engine.url, transport, replace(QUICK, **options))
        try:
            yield engine, client
        finally:
            await client.aclose()
            await transport.aclose()


async def ask(client: EngineClient, *, prompt: RequestIds = PROMPT, **options: Any) -> Completion:
    sampling = options.pop("sampling", Sampling(max_new_tokens=16, seed=5))
    given: dict[str, Any] = {
        "rid": RID,
        "routing_key": "g1",
        "version": 3,
        "timeout_s": 20.0,
        "salt": 2,
    } | options
    return await client.generate(prompt, sampling, **given)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(45):
        while not true():
            await asyncio.sleep(0.005)


async def fault_of(client: EngineClient, **options: Any) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        await ask(client, **options)
    return caught.value


# --- what is asked -------------------------------------------------------------------------------
async def test_vllm_is_asked_in_its_own_words_where_token_ids_go_in_and_out() -> None:
    async with engine_and_client("vllm", model="adapter-1") as (engine, client):
        got = await ask(client)
    [body] = engine.requests
    assert body == {
        "request_id": RID,
        "token_ids": IDS,
        "model": "adapter-1",
        "cache_salt": "v2",
        "stream": False,
        "sampling_params": {
            "max_tokens": 16,
            "seed": 5,
            "logprobs": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "skip_special_tokens": False,
            "watermarking": False,
            "detokenize": False,
        },
    }
    head = engine.raw[0].head.lower()
    assert b"x-session-id: g1\r\n" in head
    assert b"x-request-id: " + RID.encode() in head
    assert b"transfer-encoding" not in head
    assert (got.ids.tolist(), got.engine, got.rid) == ([59, 79075, 90, 23, 92], engine.url, RID)
    assert got.log_probs.tolist() == [-i / 128 for i in range(5)]
    assert got.json == b"59,79075,90,23,92"
    assert (got.finish, got.matched, got.dispatched_version) == (Finish.STOP, 92, 3)


async def test_vllms_completions_are_asked_for_ids_their_names_and_their_weights() -> None:
    async with engine_and_client("vllm", a_vllm_completion(), vllm_route="completions") as (
        engine,
        client,
    ):
        got = await ask(client)
        await client.abort(RID)
    [body] = engine.requests
    assert (body["prompt"], body["max_tokens"], body["request_id"]) == (IDS, 16, RID)
    for flag in ("return_token_ids", "return_tokens_as_token_ids", "return_weight_versions"):
        assert body[flag] is True
    # Left out, a server would take them from the model's generation_config.json.
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert not {"sampling_params", "token_ids", "detokenize", "priority"} & set(body)
    assert got.ids.tolist() == [59, 79075, 90, 23, 92]
    assert got.log_probs.tolist() == [-i / 128 for i in range(5)]
    assert engine.log[-1] == ("/inference/v1/abort_requests", f"cmpl-{RID}-0")


async def test_vllm_makes_text_only_where_a_text_may_end_the_reply() -> None:
    sampling = Sampling(
        top_k=40, stop=("</s>",), stop_token_ids=(2,), logit_bias=((5, 1.5),), regex="a+", seed=1
    )
    async with engine_and_client("vllm") as (engine, client):
        await ask(client, sampling=sampling, salt=UNKNOWN_VERSION)
    [body] = engine.requests
    asked = body["sampling_params"]
    assert (asked["top_k"], asked["stop"], asked["stop_token_ids"]) == (40, ["</s>"], [2])
    assert (asked["detokenize"], asked["logit_bias"]) == (True, {"5": 1.5})
    assert asked["structured_outputs"] == {"regex": "a+"}
    assert not {"cache_salt", "model"} & set(body)


async def test_sglang_is_told_the_adapter_of_the_run() -> None:
    async with engine_and_client("sglang", lora_path="adapters/7") as (engine, client):
        await ask(client)
    assert engine.requests[0]["lora_path"] == "adapters/7"


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_vllm_is_asked_for_rows_from_the_first_that_is_not_held(route: str) -> None:
    shape = ReplayShape(RowShape(2, 3))
    full = (503, b"full")
    async with engine_and_client("vllm", full, vllm_route=route, replay=shape) as (engine, client):
        for start in (0, 4):
            await fault_of(client, prompt=replace(PROMPT, replay_start=start))
    asked = [body.get("sampling_params", body) for body in engine.requests]
    assert [body.get("routed_experts_prompt_start") for body in asked] == [None, 4]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("vllm", {"lora_path": "adapters/7"}, "give engine.model"),
        ("vllm", {"replay": ReplayShape(None, RowShape(3))}, "no indexer rows"),
        ("vllm", {"vllm_route": "chat"}, "none of generate, completions"),
        ("grpc", {}, "none of hf, sglang, sim, vllm"),
    ],
)
async def test_an_option_without_words_in_the_protocol_is_refused_at_once(
    kind: str, options: dict[str, Any], words: str
) -> None:
    transport = new_transport()
    with pytest.raises(ConfigError, match=words):
        new_client(kind, "http://e", transport, replace(QUICK, **options))
    await transport.aclose()


@both
@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [(PROMPT, Sampling(max_new_tokens=0)), (RequestIds([], 0), Sampling(max_new_tokens=4))],
)
async def test_82_90_nothing_is_asked_without_a_budget_or_a_prompt(
    kind: str, prompt: RequestIds, sampling: Sampling
) -> None:
    async with engine_and_client(kind) as (engine, client):
        with pytest.raises(ContractError, match="is never sent"):
            await ask(client, prompt=prompt, sampling=sampling)
        assert engine.log == []


# --- whose weights -------------------------------------------------------------------------------
@both
async def test_56_labels_that_the_trainer_gave_are_versions(kind: str) -> None:
    spans = [{"version": "step-7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 5}]
    versions = VersionMap()
    versions.set({"step-7": 7})
    reply = (a_reply if kind == "sglang" else a_vllm_reply)(weight_versions=spans)
    async with engine_and_client(kind, reply, versions=versions) as (_, client):
        got = await ask(client)
        assert got.versions == [(7, 0, 2), (8, 2, 5)]
        versions.set({"step-7": 70})  # the pool's own map, not a copy of it
        assert (await ask(client)).versions[0] == (70, 0, 2)


# --- ends other than a reply ---------------------------------------------------------------------
def is_abort(kind: str, engine: ScriptedEngine) -> bool:
    wanted = {
        "sglang": ("/abort_request", RID),
        "vllm": ("/inference/v1/abort_requests", f"generate-tokens-{RID}"),
    }
    return wanted[kind] in engine.log


@both
async def test_a_call_out_of_time_is_aborted_by_its_id_and_its_reply_awaited(kind: str) -> None:
    waiting: list[Exchange] = []
    async with engine_and_client(kind, waiting.append) as (engine, client):
        engine.aborted = lambda rid: waiting[0].answer(200, ABORTED[kind])
        fault = await fault_of(client, timeout_s=0.3)
        assert (fault.detail, "aborted after" in str(fault)) == ("timeout", True)
        assert is_abort(kind, engine)
        assert not waiting[0].closed, "the connection was kept until the reply was there"


@both
async def test_a_whole_reply_that_crosses_the_abort_is_used(kind: str) -> None:
    waiting: list[Exchange] = []
    async with engine_and_client(kind, waiting.append) as (engine, client):
        engine.aborted = lambda rid: waiting[0].answer(200, GOOD[kind])
        assert (await ask(client, timeout_s=0.3)).finish is Finish.STOP


@both
async def test_an_abort_by_somebody_else_brings_the_tokens_that_there_are(kind: str) -> None:
    waiting: list[Exchange] = []
    async with engine_and_client(kind, waiting.append) as (engine, client):
        engine.aborted = lambda rid: waiting[0].answer(200, ABORTED[kind])
        call = asyncio.create_task(ask(client))
        await until(lambda: bool(waiting))
        assert await client.abort(RID)
        got = await call
        assert (got.finish, got.ids.tolist()) == (Finish.ABORT, [59])
        assert (client.aborts, client.failed_aborts) == (1, 0)


@both
async def test_an_abort_is_not_awaited_for_ever_and_never_beyond_the_deadline(kind: str) -> None:
    async with engine_and_client(kind, hang, abort_wait_s=0.05) as (engine, client):
        assert (await fault_of(client, timeout_s=0.05)).detail == "timeout"
        assert (await fault_of(client, timeout_s=20.0, limit_s=0.05)).detail == "timeout"
        await until(lambda: client.aborts == 2)
        assert is_abort(kind, engine)


@both
async def test_a_cancelled_call_is_aborted_in_the_background(kind: str) -> None:
    async with engine_and_client(kind, hang) as (engine, client):
        call = asyncio.create_task(ask(client))
        await until(lambda: bool(engine.raw))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: is_abort(kind, engine))


@both
async def test_76_a_call_whose_time_runs_out_while_its_engine_is_paused_is_not_aborted(
    kind: str,
) -> None:
    waiting: list[Exchange] = []
    asked: list[int] = []

    async def extend() -> float:
        asked.append(1)
        if len(asked) == 3:
            await until(lambda: bool(waiting))
            waiting[0].answer(200, GOOD[kind])
        return 0.02 if len(asked) < 3 else 20.0

    async with engine_and_client(kind, waiting.append) as (engine, client):
        got = await ask(client, timeout_s=0.02, extend=extend)
        assert (got.finish, len(asked), client.aborts) == (Finish.STOP, 3, 0)
        assert len(engine.requests) == 1


@both
async def test_76_patience_ends_when_nobody_extends_it_any_more(kind: str) -> None:
    asked: list[int] = []

    async def extend() -> float:
        asked.append(1)
        return 0.01 if len(asked) < 3 else 0.0

    async with engine_and_client(kind, hang, abort_wait_s=0.05) as (engine, client):
        assert (await fault_of(client, timeout_s=0.01, extend=extend)).detail == "timeout"
        assert len(asked) == 3
        await until(lambda: is_abort(kind, engine))


@both
async def test_76_whoever_extends_patience_cannot_hold_a_call_beyond_its_deadline(
    kind: str,
) -> None:
    async def extend() -> float:
        return 1000.0

    async def never() -> float:
        await asyncio.sleep(1000)
        return 1000.0

    async def failing() -> float:
        raise EngineFault("it did not answer", detail="reset")

    async with engine_and_client(kind, hang, abort_wait_s=0.05, connect_timeout_s=0.05) as (
        _,
        client,
    ):
        for hook in (extend, never, failing):
            fault = await fault_of(client, timeout_s=0.01, limit_s=0.3, extend=hook)
            assert fault.detail == "timeout"
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@both
async def test_a_bug_of_whoever_extends_patience_is_said_and_keeps_no_call(kind: str) -> None:
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told["message"]))

    async def broken() -> float:
        raise LookupError("a bug")

    async with engine_and_client(kind, hang, abort_wait_s=0.05) as (_, client):
        assert (await fault_of(client, timeout_s=0.01, extend=broken)).detail == "timeout"
    assert len(said) == 1
    assert "could not be extended" in said[0]


@both
async def test_76_a_reply_that_arrives_while_it_is_asked_ends_the_asking(kind: str) -> None:
    waiting: list[Exchange] = []
    never = asyncio.Event()

    async def extend() -> float:
        await until(lambda: bool(waiting))
        waiting[0].answer(200, GOOD[kind])
        await never.wait()
        return 0.0

    async with engine_and_client(kind, waiting.append) as (engine, client):
        assert (await ask(client, timeout_s=0.02, extend=extend)).finish is Finish.STOP
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "nobody is asked any more"
    assert not is_abort(kind, engine), "nobody aborts what has ended"


async def test_an_older_vllm_is_aborted_where_it_listens() -> None:
    async with engine_and_client("vllm") as (engine, client):
        engine.absent = ("/inference/v1/abort_requests",)
        assert await client.abort(RID)
        assert engine.log[-1] == ("/abort_requests", f"generate-tokens-{RID}")
        engine.absent = ("/inference/v1/abort_requests", "/abort_requests")
        assert not await client.abort(RID)
        assert client.failed_aborts == 1


@both
@pytest.mark.parametrize(
    ("step", "detail"),
    [
        (reset, "reset"),
        ((503, b'{"error":{"message":"full"}}'), "unavailable"),
        ((429, b"slow down"), "unavailable"),
        ((500, b'{"error":{"message":"sampling failed"}}'), "server_error"),
        ((404, b'{"detail":"Not Found"}'), "refused"),
        ((400, b'{"error":{"message":"Unexpected message role"}}'), "refused"),
        ((400, TOO_LONG), "context_overflow"),
        ((400, TOO_MANY), "context_overflow"),
    ],
)
async def test_what_is_no_reply_has_one_name_in_both_protocols(
    kind: str, step: Step, detail: str
) -> None:
    async with engine_and_client(kind, step) as (_, client):
        assert (await fault_of(client)).detail == detail


# --- looks ---------------------------------------------------------------------------------------
@both
async def test_a_look_says_label_and_pause_and_samples_nothing(kind: str) -> None:
    async with engine_and_client(kind) as (engine, client):
        assert await client.look() == Look("default")
        engine.paused, engine.weight_version = True, "9"
        assert await client.look() == Look("9", paused=True)
        assert engine.requests == []
        assert not [path for path in engine.paths() if "health" in path]
        engine.info_status = 500
        with pytest.raises(EngineFault):
            await client.look()


async def test_a_vllm_outside_dev_mode_is_there_without_saying_what_it_serves() -> None:
    async with engine_and_client("vllm") as (engine, client):
        engine.is_dev = False
        assert await client.look() == Look(None)
        engine.info_status = 503
        with pytest.raises(EngineFault, match="/health"):
            await client.look()


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_a_vllm_that_does_not_serve_the_route_says_which_flag_is_missing(route: str) -> None:
    path = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}[route]
    async with engine_and_client("vllm", vllm_route=route) as (engine, client):
        for engine.off, engine.absent in (((path,), ()), ((), (path,))):
            with pytest.raises(EngineFault, match="--enable-scale-out, or set engine"):
                await client.look()
        engine.absent = ()
        for _ in range(3):
            assert await client.look() == Look("default")
        assert engine.paths().count(path) == 3, "once it is there it is not looked for again"


async def test_completions_are_aborted_in_dev_mode_where_scale_out_is_off() -> None:
    async with engine_and_client("vllm", vllm_route="completions") as (engine, client):
        engine.off = ("/inference/v1/generate", "/inference/v1/abort_requests")
        assert await client.abort(RID)
        assert engine.log[-1] == ("/abort_requests", f"cmpl-{RID}-0")


@both
async def test_a_server_that_lacks_a_path_is_not_taken_for_a_paused_one(kind: str) -> None:
    async with engine_and_client(kind) as (engine, client):
        engine.absent = ("/ready", "/is_paused")
        assert await client.look() == Look("default")


async def test_vllm_scores_nothing_and_says_which_setting_asked() -> None:
    async with engine_and_client("vllm") as (engine, client):
        with pytest.raises(EngineFault, match=r"set telemetry\.rescore_fraction = 0$"):
            await client.score(b"{}", timeout_s=1.0)
        assert engine.log == []


# --- cost ----------------------------------------------------------------------------------------
@both
async def test_a_request_leaves_no_cyclic_objects(kind: str) -> None:
    async def extend() -> float:
        return 1.0

    async with engine_and_client(kind) as (_, client):
        for _ in range(20):
            await ask(client, extend=extend)
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                await ask(client, extend=extend)
            assert gc.collect() < 100
        finally:
            gc.enable()


def test_the_scripted_replies_are_what_the_others_say() -> None:
    sglang, vllm = json.loads(GOOD["sglang"]), json.loads(GOOD["vllm"])
    assert sglang["output_ids"] == vllm["choices"][0]["token_ids"]
