"""The openai SDK's responses and the openai-agents SDK: real HTTP, and one sample, id for id."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import agents
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.integration.gateway.stage import gateway_stage, text
from tests.integration.gateway.toys import (
    RENDERER,
    WAIT_S,
    Says,
    Toy,
    call_text,
    engine_fault,
    said,
    spans_of,
    toy_gateway,
    until,
)
from tests.toy import A1, A1_LOG_PROBS, A2, HI, NO, P0, U1
from worker.gateway.dialects.responses import OpenAIResponses
from worker.types import DivergencePolicy

CALC: Any = {
    "type": "function",
    "name": "calc",
    "description": "adds",
    "strict": False,
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
THOUGHT = "<think>\nhm\n</think>\n\n"


@asynccontextmanager
async def toy_and_client(*steps: Any, **more: Any) -> AsyncIterator[tuple[Toy, AsyncOpenAI]]:
    retries = more.pop("retries", 0)
    async with toy_gateway(*steps, dialects=[OpenAIResponses()], **more) as toy:
        yield toy, toy.client(retries=retries)


async def ask(client: AsyncOpenAI, given: Any = "hi", **fields: Any) -> Any:
    return await client.responses.create(model="m", input=given, **fields)


async def streamed(client: AsyncOpenAI, given: Any = "hi", **fields: Any) -> Any:
    async with client.responses.stream(model="m", input=given, **fields) as stream:
        return await stream.get_final_response()


async def told(client: AsyncOpenAI, given: Any = "hi", **fields: Any) -> list[Any]:
    stream = await client.responses.create(model="m", input=given, stream=True, **fields)
    return [event async for event in stream]


def between(*spoken: tuple[int, str]) -> list[int]:
    """Return what stands between two turns where (role's id, text) were added."""
    ids = [10]
    for role, one in spoken:
        ids += [1, role, 10, *RENDERER.encode(one).tolist(), 2, 10]
    return [*ids, 1, 22, 10]


SYSTEM, USER, TOOL = 20, 21, 23


# One turn.


async def test_a_response_is_the_ids_and_log_probs_of_the_engine() -> None:
    async with toy_and_client(Says(A1, A1_LOG_PROBS)) as (toy, client):
        reply = await ask(client)
        sample = await toy.sample()
    assert toy.engine.prompts == [P0]
    assert (reply.output_text, reply.status, reply.model) == ("hello", "completed", "m")
    assert reply.id.startswith("resp_")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(P0), 3)
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert sample.tokens.tolist() == [*P0, *A1]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == A1_LOG_PROBS


async def test_case_120_a_stream_leaves_the_same_sample_and_ends_with_the_response() -> None:
    ids = said(THOUGHT + "hello" + call_text("calc", {"x": 1}))
    async with toy_and_client(Says(ids), Says(ids), Says(ids)) as (toy, client):
        whole = await ask(client, tools=[CALC])
        events = await told(client, tools=[CALC])
        helped = await streamed(client, tools=[CALC])
        samples = await toy.sample()
    assert toy.engine.asked[1].streams
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    for other in (last.response, helped):
        assert [item.type for item in other.output] == ["reasoning", "message", "function_call"]
        assert other.output_text == whole.output_text == "hello"
        assert other.output[0].content[0].text == whole.output[0].content[0].text == "hm"
        assert other.output[2].arguments == whole.output[2].arguments == '{"x":1}'
        assert other.usage == whole.usage
    pieces = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == "hm"
    assert spans_of(samples) == [(ids, 1)]


async def test_a_stream_is_told_while_the_engine_samples() -> None:
    rest = asyncio.Event()
    async with toy_and_client(Says([30, 30, 2], slow=rest)) as (_, client):
        stream = await client.responses.create(model="m", input="hi", stream=True)
        async with asyncio.timeout(WAIT_S):
            async for event in stream:
                if event.type == "response.output_text.delta":
                    assert not rest.is_set()
                    break
            rest.set()
            last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "hellohello"


async def test_a_reply_that_was_cut_is_incomplete_in_both_ways() -> None:
    async with toy_and_client([30] * 9, [30] * 9) as (toy, client):
        whole = await ask(client, max_output_tokens=2)
        events = await told(client, max_output_tokens=2)
        assert [asked.sampling.max_new_tokens for asked in toy.engine.asked] == [2, 2]
    assert events[-1].type == "response.incomplete"
    for reply in (whole, events[-1].response):
        assert reply.status == "incomplete"
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert reply.output[-1].status == "incomplete"


async def test_log_probs_are_told_where_they_were_asked_for() -> None:
    asked = {"include": ["message.output_text.logprobs"]}
    async with toy_and_client(Says(A1, A1_LOG_PROBS), Says(A1, A1_LOG_PROBS)) as (_, client):
        whole = await ask(client, **asked)
        events = await told(client, **asked)
    for reply in (whole, events[-1].response):
        entries = reply.output[0].content[0].logprobs
        assert [entry.logprob for entry in entries] == A1_LOG_PROBS
        assert [entry.token for entry in entries] == ["he", "llo", "<|im_end|>"]


async def test_the_sync_client_works_from_a_thread() -> None:
    async with toy_and_client(A1, A2) as (toy, _):
        url = toy.url

        def talk() -> list[str]:
            with OpenAI(
                base_url=f"{url}/v1", api_key="none", timeout=WAIT_S, max_retries=0
            ) as client:
                first = client.responses.create(model="m", input="hi")
                history: Any = [*HI, *first.output, *NO]
                with client.responses.stream(model="m", input=history) as stream:
                    return [first.output_text, stream.get_final_response().output_text]

        assert await asyncio.to_thread(talk) == ["hello", "hello"]
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, [*P0, *A1, *U1]]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


# Going on from a response.


async def test_a_response_is_gone_on_from_by_its_id() -> None:
    async with toy_and_client(A1, A2, on_divergence=DivergencePolicy.REJECT) as (toy, client):
        first = await ask(client)
        second = await ask(client, "no", previous_response_id=first.id)
        sample = await toy.sample()
    assert second.previous_response_id == first.id
    assert toy.engine.prompts == [P0, [*P0, *A1, *U1]]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


async def test_an_earlier_response_can_be_gone_on_from_and_an_unknown_one_not() -> None:
    async with toy_and_client(A1, A2, A1, kind="tree") as (toy, client):
        first = await ask(client)
        await ask(client, "no", previous_response_id=first.id)
        await ask(client, "he", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError, match="gave no reply"):
            await ask(client, previous_response_id="resp_" + "0" * 32)
        with pytest.raises(openai.NotFoundError, match="gave no reply"):
            await ask(client, previous_response_id="x")
        samples = await toy.collected()
    assert [spans_of(sample)[-1][0] for sample in samples] == [A1, A2]


async def test_instructions_are_rendered_once_and_others_are_added() -> None:
    async with toy_and_client(A1, A2, A1, A2) as (toy, client):
        first = await ask(client, instructions="he")
        second = await ask(client, "no", previous_response_id=first.id, instructions="he")
        third = await ask(client, "no", previous_response_id=second.id)
        await ask(client, "no", previous_response_id=third.id, instructions="llo")
        sample = await toy.sample()
    start = [1, SYSTEM, 10, 31, 2, 10, *P0]
    assert toy.engine.prompts[0] == start
    assert spans_of(sample) == [
        (A1, 1), (U1, 0), (A2, 1), (U1, 0), (A1, 1),
        (between((SYSTEM, "llo"), (USER, "no")), 0), (A2, 1),
    ]  # fmt: skip


# Tools.


async def loop_of_tools(client: AsyncOpenAI, *, stream: bool, by_id: bool) -> Any:
    """Play an agent: run what the model calls, send the results, until it answers."""
    given: list[Any] = [*HI]
    previous: dict[str, Any] = {}
    for _ in range(4):
        asked = {"tools": [CALC], **previous}
        reply = await (streamed if stream else ask)(client, given, **asked)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(json.loads(call.arguments)["x"] + 1),
            }
            for call in reversed(calls)
        ]
        if by_id:
            given, previous = results, {"previous_response_id": reply.id}
        else:
            echoed = [item.to_dict() for item in reply.output]
            given += [{k: v for k, v in i.items() if "parsed" not in k} for i in echoed] + results
    raise AssertionError("no end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_16_17_a_loop_with_tools_is_one_sample(stream: bool, by_id: bool) -> None:
    both = said(THOUGHT + call_text("calc", {"x": 1}) + "\n" + call_text("calc", {"x": 2}))
    one = said("hello" + call_text("calc", {"x": 5}))
    rules: dict[str, Any] = {"on_divergence": DivergencePolicy.REJECT}
    async with toy_and_client(both, one, A2, **rules) as (toy, client):
        reply = await loop_of_tools(client, stream=stream, by_id=by_id)
        sample = await toy.sample()
    assert reply.output_text == "hello"
    assert spans_of(sample) == [
        (both, 1), (between((TOOL, "2"), (TOOL, "3")), 0),
        (one, 1), (between((TOOL, "6")), 0), (A2, 1),
    ]  # fmt: skip


async def test_malformed_calls_and_calls_that_were_not_asked_for_are_text() -> None:
    bad = said("hello<tool_call>\n{bad}\n</tool_call>")
    good = said(call_text("calc", {"x": 1}))
    async with toy_and_client(bad, bad, good) as (_, client):
        for asking in (ask, streamed):
            reply = await asking(client, tools=[CALC])
            assert [item.type for item in reply.output] == ["message"]
            assert "{bad}" in reply.output_text
        none = await ask(client, tools=[CALC], tool_choice="none")
        assert "<tool_call>" in none.output_text


# Retries, errors.


async def test_an_engine_that_failed_is_tried_again_and_a_try_is_answered_once() -> None:
    async with toy_and_client(engine_fault(), A1, retries=2) as (toy, client):
        first = await ask(client)
        again = await ask(client, extra_headers={"x-stainless-retry-count": "1"})
        assert again.to_dict() == first.to_dict()
        assert spans_of(await toy.sample()) == [(A1, 1)]
    assert toy.engine.prompts == [P0, P0]


async def test_a_stream_that_is_left_is_not_committed_and_stopped_at_the_engine() -> None:
    never = asyncio.Event()
    async with toy_and_client(Says([30] * 40, slow=never), A1) as (toy, client):
        stream = await client.responses.create(model="m", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await until(lambda: toy.engine.stopped == [0], "the engine to be told")
        await ask(client)
        assert spans_of(await toy.sample()) == [(A1, 1)]


async def test_errors_are_the_sdks_own_classes() -> None:
    async with toy_and_client(Says([31, 32], finish="length"), engine_fault()) as (toy, client):
        with pytest.raises(openai.BadRequestError) as invalid:
            await ask(client, background=True)
        assert (invalid.value.param, invalid.value.type) == ("background", "invalid_request_error")
        cut = await ask(client)
        with pytest.raises(openai.ConflictError):
            await ask(client, "no", previous_response_id=cut.id)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        await toy.session.close()
        with pytest.raises(openai.APIStatusError) as closed:
            await ask(client)
        assert closed.value.status_code == 410


# The openai-agents SDK.


@agents.function_tool
def calc(x: int) -> str:
    """Add one.

    Args:
        x: the number.
    """
    return str(x + 1)


def an_agent(client: AsyncOpenAI, **more: Any) -> Any:
    agents.set_tracing_disabled(True)
    return agents.Agent(
        name="calculator",
        instructions="Be exact.",
        model=agents.OpenAIResponsesModel(model="m", openai_client=client),
        **{"tools": [calc], **more},
    )


async def run_agent(agent: Any, *, stream: bool, **more: Any) -> Any:
    if not stream:
        return await agents.Runner.run(agent, "What is 1+1 and 2+1?", **more)
    running = agents.Runner.run_streamed(agent, "What is 1+1 and 2+1?", **more)
    kinds = {event.type async for event in running.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    return running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_an_agent_of_the_agents_sdk_is_one_append_only_sample(
    qwen3: Any, stream: bool, by_id: bool
) -> None:
    turns = [
        "<think>\nboth\n</think>\n\n"
        + call_text("calc", {"x": 1})
        + "\n"
        + call_text("calc", {"x": 2}),
        "One more.\n" + call_text("calc", {"x": 5}),
        "<think>\ndone\n</think>\n\n2, 3 and 6.",
    ]
    rules = {"on_divergence": DivergencePolicy.REJECT}
    async with gateway_stage(qwen3, *text(qwen3, *turns), rules=rules) as stage:
        async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
            result = await run_agent(
                an_agent(client), stream=stream, auto_previous_response_id=by_id
            )
        await stage.session.close()
        sample = await stage.session.collect()
    assert result.final_output == "2, 3 and 6."
    prompts = [asked.ids for asked in stage.asked]
    assert len(prompts) == 3
    for before, behind in itertools.pairwise(prompts):
        assert behind[: len(before)] == before
    assert [call.start for call in sample.calls] == [len(prompt) for prompt in prompts]
    sampled = [sample.tokens[call.start : call.end] for call in sample.calls]
    assert [qwen3.decode(ids).removesuffix("<|im_end|>") for ids in sampled] == turns
    whole = qwen3.decode(sample.tokens)
    assert whole.count("Be exact.") == 1
    assert whole.count("<tool_response>") == 3 + whole.count("<tool_response></tool_response>")


async def test_a_handoff_of_the_agents_sdk_is_answered_under_the_new_instructions(
    qwen3: Any,
) -> None:
    turns = [call_text("transfer_to_helper", {}), "Done."]
    rules = {"kind": "tree"}
    async with gateway_stage(qwen3, *text(qwen3, *turns), rules=rules) as stage:
        async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model="m", openai_client=client)
            helper = agents.Agent(name="helper", instructions="Help.", model=model)
            result = await agents.Runner.run(
                an_agent(client, tools=[], handoffs=[helper]), "Help me."
            )
        await stage.session.close()
        samples = await stage.session.collect()
    assert result.final_output == "Done."
    assert [len(sample.calls) for sample in samples] == [1, 1]
    last, first = (qwen3.decode(sample.tokens) for sample in samples)
    assert "Be exact." in first
    assert "Be exact." not in last
    assert "Help." in last
