"""Budgets at their edges: what fits exactly, what is one token too long, and what is never sent.

Over the toy vocabulary, so that every length is spelled out: P0 10 ids, A1 3, O1 11, A2 2.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.errors import EngineFault, Status, StopReason
from rollstream.sample import Sample, TokenIds
from tests.generate_stage import InProcess, Says, check, engine_of, given
from tests.toy import A1, A2, CLOSE, HI, O1, P0, toy_renderer
from worker.generate import multi_turn
from worker.generate.budget import Room, effective, room_left
from worker.sampling import Sampling
from worker.tools import FunctionTool
from worker.types import AssistantMessage, Limits, ToolCall

REPLIES = [Says(A1, matched=CLOSE), Says(A2, matched=CLOSE)]


class Calling:
    """A renderer that reads a call of `f` in A1, and an answer in everything else."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(
        self, completion: TokenIds, prompt_tail: TokenIds, tools: Any = None
    ) -> AssistantMessage:
        message: AssistantMessage = self._inner.parse(completion, prompt_tail, tools)
        if completion.tolist() == A1:
            message.tool_calls = [ToolCall("call_1", "f", {})]
        return message


def f() -> str:
    """Say ok."""
    return "ok"


async def base(
    *steps: Any, sampling: Sampling | None = None, tool: Any = f, **limits: Any
) -> tuple[Sample, InProcess]:
    """Run the BASE conversation under these limits."""
    async with engine_of("process", *(steps or REPLIES)) as engine:
        assert isinstance(engine, InProcess)
        tools = {"f": FunctionTool(tool)}
        stage = given(
            engine, Calling(toy_renderer()), HI, tools=tools, limits=limits, sampling=sampling
        )
        assert stage.prompt.ids.tolist() == P0
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    replies = [step for step in (steps or REPLIES) if isinstance(step, Says)]
    check(sample, engine.asked, replies[: len(engine.asked)])
    return sample, engine


async def test_base_runs_to_its_end_where_nothing_is_short() -> None:
    sample, engine = await base()
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert sample.response_length == 16
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]
    assert [asked.ids for asked in engine.asked] == [P0, P0 + A1 + O1]


async def test_an_observation_that_fits_exactly_is_kept_and_no_call_follows() -> None:
    sample, engine = await base(max_response=14)
    assert sample.tokens.tolist() == P0 + A1 + O1
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.RESPONSE_LENGTH)
    assert len(engine.asked) == 1


async def test_an_observation_one_token_too_long_is_dropped_whole() -> None:
    sample, engine = await base(max_response=13)
    assert sample.tokens.tolist() == P0 + A1
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.RESPONSE_LENGTH)
    assert sample.metadata["dropped_observation"] == {"turn": 0, "num_tokens": 11}
    assert len(engine.asked) == 1


@pytest.mark.parametrize(("context", "kept"), [(24, 14), (23, 3)])
async def test_the_context_bounds_an_observation_too(context: int, kept: int) -> None:
    sample, engine = await base(max_context=context)
    assert sample.response_length == kept
    assert sample.stop_reason is StopReason.CONTEXT_LENGTH
    assert len(engine.asked) == 1


async def test_a_huge_observation_ends_the_trajectory_without_a_request() -> None:
    def huge() -> str:
        """Say much."""
        return "x" * 5000

    sample, engine = await base(tool=huge, max_context=64)
    assert sample.tokens.tolist() == P0 + A1
    assert sample.status is Status.TRUNCATED
    assert len(engine.asked) == 1


async def test_a_prompt_that_fills_the_context_is_never_sent() -> None:
    sample, engine = await base(max_context=8)
    assert sample.response_length == 0
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.PROMPT_TOO_LONG)
    assert engine.asked == []


async def test_the_turn_cap_is_per_turn_and_the_response_may_be_longer() -> None:
    sample, engine = await base(sampling=Sampling(max_new_tokens=8))
    assert sample.response_length == 16
    assert [asked.max_new_tokens for asked in engine.asked] == [8, 8]


async def test_each_request_is_capped_by_the_least_that_is_left() -> None:
    sample, engine = await base(
        sampling=Sampling(max_new_tokens=8), max_response=20, max_context=27
    )
    # Turn 1: 8 of the turn. Turn 2, behind 24 held: 6 of the response, 3 of the context.
    assert [asked.max_new_tokens for asked in engine.asked] == [8, 3]
    assert sample.stop_reason is StopReason.STOP


async def test_one_token_of_room_is_one_turn_and_then_the_end() -> None:
    one = Says([31], "length")
    sample, engine = await base(Says(A1, matched=CLOSE), one, max_context=25)
    assert [asked.max_new_tokens for asked in engine.asked] == [15, 1]
    assert sample.tokens.tolist() == [*P0, *A1, *O1, 31]
    assert sample.stop_reason is StopReason.CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({}, StopReason.TURN_LENGTH),
        ({"max_response": 4}, StopReason.RESPONSE_LENGTH),
        ({"max_context": 14}, StopReason.CONTEXT_LENGTH),
        ({"max_seq_len": 14}, StopReason.CONTEXT_LENGTH),
    ],
)
async def test_a_cut_turn_is_named_after_the_limit_that_cut_it(
    limits: dict[str, int], reason: StopReason
) -> None:
    cut = Says([1104, 1101, 1108, 1108], "length")
    sample, _ = await base(cut, sampling=Sampling(max_new_tokens=4), **limits)
    # Four ids spell "hell", whose canonical encoding has three: lengths come from ids.
    assert sample.response_length == 4
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, reason)


async def test_a_reply_cut_before_our_own_cap_met_the_engines_context() -> None:
    sample, _ = await base(Says([31, 32], "length"))
    assert sample.stop_reason is StopReason.CONTEXT_LENGTH


async def test_a_stop_at_the_cap_without_an_end_is_a_cut() -> None:
    sample, engine = await base(Says(A1[:2]), sampling=Sampling(max_new_tokens=2))
    assert sample.stop_reason is StopReason.TURN_LENGTH
    assert len(engine.asked) == 1


async def test_a_stop_at_the_cap_with_its_end_token_is_complete() -> None:
    sample, _ = await base(Says(A2, matched=CLOSE), sampling=Sampling(max_new_tokens=2))
    assert sample.stop_reason is StopReason.STOP


async def test_turns_never_end_beyond_max_seq_len() -> None:
    sample, engine = await base(max_seq_len=26)
    assert [asked.max_new_tokens for asked in engine.asked] == [16, 2]
    assert len(sample.tokens) == 26


async def test_an_engine_that_calls_the_request_too_long_truncates() -> None:
    fault = EngineFault("maximum context length is 64", detail="context_overflow")
    sample, _ = await _with_fault(fault)
    assert sample.tokens.tolist() == P0 + A1 + O1
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_LENGTH)


async def test_any_other_engine_fault_goes_to_the_caller() -> None:
    with pytest.raises(EngineFault, match="Unexpected message role"):
        await _with_fault(EngineFault("Unexpected message role", detail="refused"))


async def _with_fault(fault: EngineFault) -> tuple[Sample, InProcess]:
    engine = InProcess([Says(A1, matched=CLOSE), fault])
    stage = given(engine, Calling(toy_renderer()), HI, tools={"f": FunctionTool(f)})
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    return sample, engine


@pytest.mark.parametrize(
    "message",
    [
        "This endpoint's maximum context length is 64 tokens",
        "Input length (70) exceeds model's maximum context length (64)",
        "max_tokens must be at least 1",
    ],
)
async def test_every_wording_of_an_overflow_truncates(message: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    async with engine_of("http", (400, body)) as engine:
        output = await multi_turn(given(engine, toy_renderer(), HI))
    assert isinstance(output.samples, Sample)
    assert output.samples.status is Status.TRUNCATED


async def test_another_refusal_is_an_error_and_not_a_truncation() -> None:
    async with engine_of("http", (400, b'{"error": "Unexpected message role"}')) as engine:
        with pytest.raises(EngineFault, match="Unexpected message role") as caught:
            await multi_turn(given(engine, toy_renderer(), HI))
    assert not caught.value.retryable
    assert len(engine.asked) == 1


def test_room_takes_the_least_and_names_the_widest_of_equals() -> None:
    assert Room(4, 4, 4).bound is StopReason.CONTEXT_LENGTH
    assert Room(4, 4, 5).bound is StopReason.RESPONSE_LENGTH
    assert Room(4, None, 5).bound is StopReason.TURN_LENGTH
    assert Room(1, 7, 9).fits == 7


def test_room_of_a_resumed_turn_counts_what_it_sampled_already() -> None:
    room = room_left(
        Limits(max_turns=1, max_context=64, max_response=10),
        Sampling(max_new_tokens=10),
        held=14,
        response=4,
        turn=4,
    )
    assert room.tokens == 6


def test_effective_never_asks_for_a_minimum_above_the_maximum() -> None:
    sampling = effective(Sampling(max_new_tokens=64, min_new_tokens=8), Room(64, None, 3), seed=9)
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.seed) == (3, 3, 9)
