"""Routed experts from an engine over HTTP to a finished sample, row by row (conformance 11 to 69).

The rows are a function of all tokens up to a position, so that one row that is missing, shifted or
of another try is another row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault, StopReason
from rollstream.sample import Sample
from tests.contract.test_cases_a import FirstCalls, f
from tests.generate_stage import given
from tests.scripted_engine import ScriptedEngine, Step, a_reply, scripted
from tests.toy import A1, A2, HI, O1, P0, toy_renderer
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.protocol import http_base
from worker.engines.protocol.replay import ReplayShape, RowShape
from worker.engines.sim.http import Exchange
from worker.engines.sim.numbers import ReplayConfig, routed_experts
from worker.generate import multi_turn, single_turn
from worker.tools import FunctionTool
from worker.types import GenerateInput

CONFIG = ReplayConfig(layers=2, top_k=4)
SHAPE = ReplayShape(experts=RowShape(2, 4))
FIXTURE_A = [3838, 374, 220, 16, 10, 22, 30]
REPLY_A = [59, 79075, 90, 23, 92]
ABORT = {"type": "abort", "message": "paused", "status_code": None}


def says(ids: Sequence[int], **fields: Any) -> Callable[[Exchange], None]:
    """Answer `ids` with the experts of whatever was sent, as SGLang serves them."""

    def answer(exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        if asked["return_routed_experts"]:
            fed = np.array([*asked["input_ids"], *ids], dtype=np.int32)
            rows = routed_experts(fed, asked["routed_experts_start_len"], CONFIG)
            fields["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        exchange.answer(200, a_reply(ids, **fields))

    return answer


@asynccontextmanager
async def staged(
    *steps: Step, renderer: Any = None, prompt: Any = HI, replay: bool = True,
    shape: ReplayShape | None = SHAPE, retries: int = 0,
) -> AsyncIterator[tuple[GenerateInput, ScriptedEngine]]:  # fmt: skip
    async with scripted(*steps) as engine:
        policy = RetryPolicy(max_retries=retries, backoff_s=0.001)
        pool = EnginePool([engine.url], max_token_id=151668, policy=policy, replay=shape)
        try:
            yield (
                given(
                    pool, renderer or FirstCalls(A1), prompt, tools={"f": FunctionTool(f)},
                    replay=replay,
                ),
                engine,
            )  # fmt: skip
        finally:
            await pool.aclose()


def starts_of(engine: ScriptedEngine) -> list[int | None]:
    return [body.get("routed_experts_start_len") for body in engine.requests]


def check_rows(sample: Sample, *, fed: int | None = None) -> None:
    """Assert that every row is the engine's for these tokens, and -1 where nothing was fed in."""
    rows = sample.rollout_routed_experts
    assert rows is not None
    assert rows.shape == (len(sample.tokens) - 1, 2, 4)
    assert rows.dtype == np.int32
    fed = len(rows) if fed is None else fed
    assert np.array_equal(rows[:fed], routed_experts(sample.tokens, 0, CONFIG)[:fed])
    assert (rows[fed:] == -1).all()


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_11_twelve_tokens_have_eleven_rows_of_the_served_buffer(
    generate: Any, qwen3: Any
) -> None:
    async with staged(says(REPLY_A), renderer=qwen3, prompt="What is 1+7?") as (stage, engine):
        stage.tools = {}
        sample = (await generate(stage)).samples
    assert engine.requests[0]["input_ids"] == FIXTURE_A
    assert engine.requests[0]["return_routed_experts"] is True
    assert engine.requests[0]["return_indexer_topk"] is False
    assert len(sample.tokens) == 12
    check_rows(sample)


@pytest.mark.parametrize("shape", [SHAPE, None])
async def test_11_off_is_none_and_asks_for_nothing(shape: ReplayShape | None) -> None:
    async with staged(says(A2), replay=False, shape=shape) as (stage, engine):
        sample = (await single_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert sample.rollout_routed_experts is None
    assert engine.requests[0]["return_routed_experts"] is False
    assert "routed_experts_start_len" not in engine.requests[0]


async def test_24_and_69_two_turns_ask_for_deltas_and_make_the_rows_of_the_whole() -> None:
    async with staged(says(A1), says(A2)) as (stage, engine):
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert sample.tokens.tolist() == [*P0, *A1, *O1, *A2]
    assert starts_of(engine) == [0, len(P0) + len(A1) - 1]
    check_rows(sample)


async def test_69_a_retry_of_the_second_turn_asks_from_the_same_row() -> None:
    lost = (503, b"{}")
    nan = says(A1, finish={"type": "stop", "matched": "NaN happened"})
    async with staged(says(A1), lost, nan, says(A2), retries=4) as (stage, engine):
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert starts_of(engine) == [0, 12, 12, 12]
    check_rows(sample)


async def test_a_try_whose_rows_are_wrong_is_made_again_and_leaves_no_row() -> None:
    short = a_reply(A2, routed_experts=base64.b64encode(bytes(64)).decode())
    async with staged(says(A1), short, says(A2), retries=1) as (stage, engine):
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert starts_of(engine) == [0, 12, 12]
    check_rows(sample)


async def test_a_server_without_rows_refuses_the_run_rather_than_train_without() -> None:
    async with staged(a_reply(A2)) as (stage, _):
        with pytest.raises(EngineFault, match="--enable-return-routed-experts") as caught:
            await single_turn(stage)
    assert not caught.value.retryable


async def test_rows_without_a_known_shape_are_asked_of_nobody() -> None:
    async with staged(says(A2), shape=None) as (stage, engine):
        with pytest.raises(EngineFault, match=r"set engine\.routed_experts"):
            await single_turn(stage)
    assert engine.requests == []


async def test_an_aborted_and_resumed_turn_has_the_rows_of_both_halves() -> None:
    async with staged(says([31], finish=ABORT), renderer=toy_renderer()) as (stage, _):
        begun = (await single_turn(stage)).samples
    assert isinstance(begun, Sample)
    assert begun.stop_reason is StopReason.ABORT_WEIGHTS
    check_rows(begun)
    async with staged(says([32, 2]), renderer=toy_renderer()) as (stage, engine):
        stage.sample = begun
        sample = (await single_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert starts_of(engine) == [len(P0)]
    check_rows(sample)


async def test_an_abort_in_the_queue_brings_no_row_and_what_follows_asks_for_all_of_them() -> None:
    async with staged(a_reply([], finish=ABORT), renderer=toy_renderer()) as (stage, _):
        begun = (await single_turn(stage)).samples
    assert isinstance(begun, Sample)
    async with staged(says(A2), renderer=toy_renderer()) as (stage, engine):
        stage.sample = begun
        sample = (await single_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert starts_of(engine) == [0]
    check_rows(sample)


async def test_rows_may_be_larger_than_any_reply_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """48 layers of 8 experts are 2 kB a token as base64: 32k tokens fill what other replies may."""
    monkeypatch.setattr(http_base, "MAX_REPLY_BYTES", 700)
    async with staged(says(A1), says(A2)) as (stage, _):
        check_rows((await multi_turn(stage)).samples)  # type: ignore[arg-type]
    long = a_reply(A2, text=" " * 700)
    async with staged(long, replay=False) as (stage, _):
        with pytest.raises(EngineFault, match="larger than 700 bytes"):
            await single_turn(stage)


async def test_a_last_observation_that_was_never_fed_in_has_rows_of_minus_one() -> None:
    async with staged(says(A1)) as (stage, _):
        limits = {"max_turns": 1, "execute_last_turn": True}
        stage.limits = given(None, toy_renderer(), HI, limits=limits).limits
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert len(sample.tokens) > len(P0) + len(A1)
    check_rows(sample, fed=len(P0) + len(A1) - 1)
