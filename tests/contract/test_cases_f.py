"""Cases 79 to 90 of the public reports: what is too long, too short or empty, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollstream.errors import EngineFault, EnvFault, RolloutFault, Status, StopReason
from rollstream.group import judge_member
from rollstream.wire import decode_header, encode_header
from tests.contract.rolls import Recorder, Rolled, call_of, rolled
from tests.contract.test_cases_e import Calling, f
from tests.generate_stage import Says, engine_of, given
from tests.integration.worker.parts import a_run, wait_until
from tests.scripted_engine import a_reply, a_vllm_reply
from tests.toy import A1, A2, CLOSE, HI, O1, P0, toy_renderer
from tests.unit.worker.works import a_book, a_work, an_env, leased
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling
from worker.tito.ids import prompt_ids
from worker.tito.load import render_prompt
from worker.tools import FunctionTool

pytestmark = pytest.mark.usefixtures("protocol")
variants = pytest.mark.parametrize("generate", [single_turn, multi_turn])
DONE = "Done.<|im_end|>"


async def base(tool: Any = f, *replies: Says, **limits: Any) -> Rolled:
    """Run BASE (or other replies) within limits."""
    steps = replies or (Says(A1, matched=CLOSE), Says(A2, matched=CLOSE))
    return await rolled(
        Calling(), *steps, prompt=HI, tools=[FunctionTool(tool) if tool is f else tool],
        limits=limits, debug_messages=True,
    )  # fmt: skip


def _mask(run: Rolled) -> list[int]:
    assert run.sample.loss_mask is not None
    mask: list[int] = run.sample.loss_mask.tolist()
    return mask


def _roles(run: Rolled) -> list[str]:
    return [message["role"] for message in run.sample.metadata["messages"]]


async def test_case_79_a_result_that_fits_exactly_is_kept_and_no_call_follows() -> None:
    run = await base(max_response=14)
    assert run.sample.tokens.tolist() == P0 + A1 + O1
    assert (_mask(run), run.sample.response_length) == ([1, 1, 1] + [0] * 11, 14)
    assert run.sample.status is Status.TRUNCATED
    assert (len(run.requests), _roles(run)) == (1, ["user", "assistant", "tool"])


async def test_case_80_a_result_one_token_too_long_is_dropped_whole_everywhere() -> None:
    run = await base(max_response=13)
    assert run.sample.tokens.tolist() == P0 + A1
    assert (_mask(run), run.sample.response_length) == ([1, 1, 1], 3)
    assert run.sample.rollout_log_probs is not None
    assert len(run.sample.rollout_log_probs) == 3
    assert run.sample.response == toy_renderer().decode(run.sample.tokens[len(P0) :])
    assert run.sample.status is Status.TRUNCATED
    assert (len(run.requests), _roles(run)) == (1, ["user", "assistant"])


async def test_case_81_a_huge_result_ends_its_sample_without_a_request_and_no_other() -> None:
    huge, small = Recorder("f", "x" * 5000), Recorder("f", "ok")
    tools = [small, huge, small, small]
    runs = await asyncio.gather(*(base(tool, max_context=64) for tool in tools))
    assert [len(run.requests) for run in runs] == [2, 1, 2, 2]
    assert [run.sample.status for run in runs] == [
        Status.COMPLETED, Status.TRUNCATED, Status.COMPLETED, Status.COMPLETED,
    ]  # fmt: skip
    assert (runs[1].sample.tokens.tolist(), _mask(runs[1])) == (P0 + A1, [1, 1, 1])
    assert runs[1].sample.stop_reason is StopReason.CONTEXT_LENGTH


@pytest.mark.parametrize("context", [24, 30, 46, 47, 48])
async def test_case_82_no_request_asks_for_less_than_one_token(context: int) -> None:
    replies = [Says(A1, matched=CLOSE), Says([30], "length")]
    tool = Recorder("f", "x" * 25)  # the next prompt: 47 ids
    run = await base(tool, *replies, max_context=context)
    asked = [body["sampling_params"]["max_new_tokens"] for body in run.requests]
    assert min(asked) >= 1
    assert len(run.requests) == (2 if context == 48 else 1)
    assert len(run.sample.tokens) <= context
    assert (run.sample.status, run.sample.stop_reason) == (
        Status.TRUNCATED,
        StopReason.CONTEXT_LENGTH,
    )


async def test_case_83_a_prompt_that_the_engine_cut_is_a_fault_and_not_trained(
    protocol: str,
) -> None:
    cut = {"sglang": a_reply, "vllm": a_vllm_reply}[protocol]([30, 2], prompt_tokens=6)
    async with engine_of("http", (200, cut)) as engine:
        with pytest.raises(EngineFault, match="saw 6 prompt tokens of the 10") as caught:
            await multi_turn(given(engine, toy_renderer(), HI))
    assert (caught.value.detail, caught.value.retryable) == ("prompt_mismatch", False)


async def test_case_83_our_own_limit_comes_first() -> None:
    run = await base(max_context=9)
    assert (run.requests, run.sample.stop_reason) == ([], StopReason.PROMPT_TOO_LONG)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
async def test_case_85_a_cut_result_has_its_marker_its_side_and_whole_characters(
    side: str, renderer: Any
) -> None:
    tool = Recorder("t", "x" * 100 + " Final: 7")
    limits = {"tool_output_chars": 40, "tool_output_side": side}
    run = await rolled(renderer, call_of("t"), DONE, tools=[tool], limits=limits)
    seen = run.observed()
    assert ("Final: 7" in seen) is (side != "right")
    assert ("xxxxx[..." in seen) is (side == "right")
    assert "characters cut ...]" in seen

    faces = Recorder("t", "\U0001f642" * 100)
    run = await rolled(renderer, call_of("t"), DONE, tools=[faces], limits=limits)
    assert "�" not in run.observed()
    kept = run.observed().count("\U0001f642")
    assert kept == 40 - len(f"[... {100 - kept} characters cut ...]") or kept == 12


async def test_case_86_the_turn_cap_does_not_cut_what_the_turns_add_up_to() -> None:
    run = await rolled(
        Calling(), Says(A1, matched=CLOSE), Says(A2, matched=CLOSE), prompt=HI,
        tools=[FunctionTool(f)], sampling=Sampling(max_new_tokens=8),
    )  # fmt: skip
    assert run.sample.response_length == 16
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [8, 8]
    assert run.sample.status is Status.COMPLETED


@variants
async def test_case_87_a_prompt_that_is_too_long_is_an_ended_member_without_a_token(
    generate: Any,
) -> None:
    run = await rolled(Calling(), prompt=HI, tools=[], limits={"max_context": 8}, generate=generate)
    assert run.requests == []
    assert run.sample.response_length == 0
    assert (run.sample.status, run.sample.stop_reason) == (
        Status.TRUNCATED,
        StopReason.PROMPT_TOO_LONG,
    )
    view = judge_member(0, decode_header(encode_header(run.sample)), None)
    assert not view.usable
    assert view.missing is not None
    assert view.missing.reason == "prompt_too_long"


async def test_case_87_a_member_that_sampled_nothing_says_that_no_model_was_heard() -> None:
    run = await rolled(Calling(), Says([], "stop"), prompt=HI)
    view = judge_member(0, decode_header(encode_header(run.sample)), None)
    assert view.missing is not None
    assert (view.missing.reason, run.sample.status) == ("no_model_call", Status.COMPLETED)


@pytest.mark.parametrize(
    "message",
    [
        "This endpoint's maximum context length is 64 tokens",
        "Input length (70) exceeds model's maximum context length (64)",
        "max_tokens must be at least 1",
    ],
)
async def test_case_88_an_overflow_in_any_words_truncates_and_is_asked_once(message: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    async with engine_of("http", Says(A1, matched=CLOSE), (400, body)) as engine:
        stage = given(engine, Calling(), HI, tools={"f": FunctionTool(f)})
        sample = (await multi_turn(stage)).samples
        assert len(engine.asked) == 2
    assert not isinstance(sample, list)
    assert sample.tokens.tolist() == P0 + A1 + O1
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_LENGTH)


async def test_case_88_another_refusal_is_an_error_and_is_not_sent_again() -> None:
    body = json.dumps({"error": {"message": "Unexpected message role"}}).encode()
    async with engine_of("http", (400, body)) as engine:
        with pytest.raises(EngineFault, match="Unexpected message role") as caught:
            await multi_turn(given(engine, toy_renderer(), HI))
        assert len(engine.asked) == 1
    assert (caught.value.detail, caught.value.retryable) == ("refused", False)


@pytest.mark.parametrize("prompt", [[], ""], ids=["no-messages", "no-text"])
async def test_case_90_an_empty_prompt_is_refused_by_the_worker_with_the_reason(
    prompt: Any, renderer: Any
) -> None:
    book = a_book(an_env(), lambda given, tools: render_prompt(renderer, given, tools))
    work = a_work(book, leased(prompt=prompt))
    for _ in range(2):  # each member is told
        with pytest.raises(EnvFault, match=r"empty|at least one message") as caught:
            await book.prompt_of(work.group)
        assert not caught.value.retryable


@variants
async def test_case_90_no_request_without_ids_is_ever_sent(generate: Any) -> None:
    async with engine_of("http") as engine:
        stage = given(engine, toy_renderer(), HI)
        stage.prompt = prompt_ids([])
        with pytest.raises(ValueError, match="the prompt is empty"):
            await generate(stage)
        assert engine.asked == []


@variants
async def test_case_90_an_empty_user_message_is_a_prompt(generate: Any) -> None:
    run = await rolled(
        toy_renderer(), "hello", prompt=[{"role": "user", "content": ""}], generate=generate
    )
    assert run.prompts == [[1, 21, 10, 2, 10, 1, 22, 10]]
    assert run.sample.status is Status.COMPLETED


async def test_case_90_a_group_without_a_prompt_ends_and_the_worker_goes_on(
    valkey_url: str, run_name: str
) -> None:
    def render(prompt: Any, tools: Any) -> Any:
        return render_prompt(toy_renderer(), prompt, tools)

    async with a_run(valkey_url, run_name) as run:
        await run.enqueue(0, 2, prompt="")
        await run.enqueue(1, 2, prompt=[])
        await run.enqueue(2, 2, prompt=HI)
        run.worker(render=render).start()
        await run.ready(1)

        async def both_dropped() -> bool:
            return await run.drops() == {"short_group": 2}

        await wait_until(both_dropped, what="two dropped groups")
        assert await run.state_of(2, 2) == "ready"
        await run.audit()


async def test_an_empty_prompt_is_a_fault_of_its_own_kind(qwen3: Any) -> None:
    book = a_book(an_env(), lambda given, tools: render_prompt(qwen3, given, tools))
    with pytest.raises(RolloutFault) as caught:
        await book.prompt_of(a_work(book, leased(prompt="")).group)
    assert caught.value.detail == "empty_prompt"
