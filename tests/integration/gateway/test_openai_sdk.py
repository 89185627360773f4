"""The openai SDK as agents use it: real HTTP, and what it does is the sample, id for id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

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

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}


async def told(stream: Any) -> tuple[str, list[Any]]:
    """Return the content of a whole stream, and its chunks."""
    chunks = [chunk async for chunk in stream]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), chunks


# One turn.


async def test_a_chat_is_the_ids_and_log_probs_of_the_engine() -> None:
    async with toy_gateway(Says(A1, A1_LOG_PROBS)) as toy:
        reply = await toy.chat()
        sample = await toy.sample()
    assert toy.engine.prompts == [P0]
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "m"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(P0), 3)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert sample.tokens.tolist() == [*P0, *A1]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == A1_LOG_PROBS
    assert spans_of(sample) == [(A1, 1)]


async def test_case_120_a_stream_leaves_the_same_sample_and_ends_with_usage() -> None:
    async with toy_gateway(Says(A1, A1_LOG_PROBS)) as toy:
        options = {"include_usage": True}
        text, chunks = await told(await toy.chat(stream=True, stream_options=options))
        sample = await toy.sample()
    assert text == "hello"
    assert toy.engine.asked[0].streams
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len(P0) + 3
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert sample.tokens.tolist() == [*P0, *A1]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == A1_LOG_PROBS


async def test_a_stream_is_told_while_the_engine_samples() -> None:
    rest = asyncio.Event()
    async with toy_gateway(Says([30, 30, 2], slow=rest)) as toy:
        stream = await toy.chat(stream=True)
        async with asyncio.timeout(WAIT_S):
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    assert not rest.is_set()
                    break
        rest.set()
        text, _ = await told(stream)
        assert text == "hello"
        assert spans_of(await toy.sample()) == [([30, 30, 2], 1)]


async def test_log_probs_are_told_for_every_sampled_id_in_both_ways() -> None:
    async with toy_gateway(Says(A1, A1_LOG_PROBS), Says(A1, A1_LOG_PROBS)) as toy:
        reply = await toy.chat(logprobs=True)
        _, chunks = await told(await toy.chat(logprobs=True, stream=True))
    entries = reply.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["he", "llo", "<|im_end|>"]
    assert [entry.logprob for entry in entries] == A1_LOG_PROBS
    assert [bytes(entry.bytes) for entry in entries] == [b"he", b"llo", b"<|im_end|>"]
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == entries


async def test_the_sync_client_works_from_a_thread() -> None:
    async with toy_gateway(A1, A2) as toy:
        url = toy.url

        def talk() -> tuple[str | None, str]:
            with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S) as client:
                create = client.chat.completions.create
                first = create(model="m", messages=HI)
                history = [*HI, first.choices[0].message, *NO]
                with create(model="m", messages=history, stream=True) as stream:
                    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
                return first.choices[0].message.content, "".join(pieces)

        assert await asyncio.to_thread(talk) == ("hello", "hello")
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, [*P0, *A1, *U1]]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


async def test_the_path_without_a_version_is_the_same() -> None:
    async with toy_gateway(A1) as toy:
        client = AsyncOpenAI(base_url=toy.url, api_key="none", max_retries=0)
        toy.clients.append(client)
        assert (await toy.chat()).choices[0].message.content == "hello"
        names = [model.id async for model in client.models.list()]
        assert len(names) == 1


async def test_the_helper_for_streams_builds_the_same_message() -> None:
    text = "hello" + call_text("calc", {"x": 1, "y": "a" * 1000})
    async with toy_gateway(said(text), said(text)) as toy:
        client = toy.client()
        whole = await client.chat.completions.create(model="m", messages=HI, tools=[CALC])
        async with client.chat.completions.stream(
            model="m",
            messages=HI,
            tools=[CALC],
            stream_options={"include_usage": True},
            logprobs=True,
        ) as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_completion()
    message, other = final.choices[0].message, whole.choices[0].message
    assert message.content == other.content == "hello"
    (call,), (other_call,) = message.tool_calls, other.tool_calls
    assert call.function.name == "calc"
    assert call.function.arguments == other_call.function.arguments
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert final.usage == whole.usage
    assert {"content.delta", "tool_calls.function.arguments.done", "logprobs.content.done"} <= set(
        types
    )
    assert len(final.choices[0].logprobs.content) == final.usage.completion_tokens


async def test_raw_responses_say_what_was_pinned() -> None:
    async with toy_gateway(A1, A1) as toy:
        create = toy.client().chat.completions.with_raw_response.create
        response = await create(model="m", messages=HI, temperature=0.0, seed=1)
        plain = await create(model="m", messages=HI)
    assert sorted(response.headers["x-rollstream-pinned"].split(", ")) == ["seed", "temperature"]
    assert "x-rollstream-pinned" not in plain.headers
    assert response.parse().choices[0].message.content == "hello"
    assert len(response.headers["x-request-id"]) == 32
    assert toy.engine.asked[0].sampling.temperature == 0.7


# Tools.


async def loop_of_tools(toy: Toy, *, stream: bool, turns: int = 3) -> list[Any]:
    """Play an agent: run what the model calls, send the results, until it answers."""
    client = toy.client()
    messages: list[Any] = list(HI)
    for _ in range(turns):
        asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": [CALC]}
        if stream:
            async with client.chat.completions.stream(**asked) as streaming:
                reply = await streaming.get_final_completion()
        else:
            reply = await client.chat.completions.create(**asked)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for call in message.tool_calls:
            x = json.loads(call.function.arguments)["x"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(x + 1)})
    return messages


def tool_ids(*texts: str) -> list[int]:
    """Return what stands between two turns where tools answered so."""
    ids = [10]
    for text in texts:
        ids += [1, 23, 10, *RENDERER.encode(text).tolist(), 2, 10]
    return [*ids, 1, 22, 10]


@pytest.mark.parametrize("stream", [False, True])
async def test_16_17_a_loop_with_tools_is_one_sample(stream: bool) -> None:
    both = said(call_text("calc", {"x": 1}) + "\n" + call_text("calc", {"x": 2}))
    one = said("hello" + call_text("calc", {"x": 5}))
    async with toy_gateway(both, one, A2) as toy:
        messages = await loop_of_tools(toy, stream=stream)
        sample = await toy.sample()
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == "hello"
    assert spans_of(sample) == [
        (both, 1), (tool_ids("2", "3"), 0), (one, 1), (tool_ids("6"), 0), (A2, 1),
    ]  # fmt: skip
    held = [*P0, *both, *tool_ids("2", "3")]
    assert toy.engine.prompts == [P0, held, [*held, *one, *tool_ids("6")]]


async def test_parallel_calls_of_a_stream_have_their_own_index_and_id() -> None:
    text = call_text("calc", {"x": 1}) + call_text("calc", {"x": 2})
    async with toy_gateway(said(text)) as toy:
        _, chunks = await told(await toy.chat(stream=True, tools=[CALC]))
    entries = [entry for chunk in chunks for entry in (chunk.choices[0].delta.tool_calls or [])]
    firsts = [entry for entry in entries if entry.id]
    assert [entry.index for entry in firsts] == [0, 1]
    assert {entry.type for entry in firsts} == {"function"}
    assert {entry.function.name for entry in firsts} == {"calc"}
    assert len({entry.id for entry in firsts}) == 2
    for index, wanted in ((0, '{"x":1}'), (1, '{"x":2}')):
        pieces = [entry.function.arguments for entry in entries if entry.index == index]
        assert "".join(piece or "" for piece in pieces) == wanted


async def test_parsed_outputs_are_refused_and_say_what_to_do() -> None:
    class Answer(BaseModel):
        x: int

    async with toy_gateway(A1) as toy:
        with pytest.raises(openai.BadRequestError, match="response_format") as caught:
            await toy.client().chat.completions.parse(
                model="m",
                messages=HI,
                response_format=Answer,
            )
        assert caught.value.param == "response_format"
        assert caught.value.code == "invalid_value"
        assert toy.engine.asked == []


# Retries, timeouts, leaving.


async def test_an_engine_that_failed_is_tried_again_and_the_turn_is_one() -> None:
    async with toy_gateway(engine_fault(), Says(A1, A1_LOG_PROBS)) as toy:
        toy.client(retries=2)
        reply = await toy.chat()
        sample = await toy.sample()
    assert reply.choices[0].message.content == "hello"
    assert toy.engine.prompts == [P0, P0]
    assert spans_of(sample) == [(A1, 1)]
    assert toy.session.fault is None


async def test_an_engine_that_failed_is_a_503_for_who_does_not_retry() -> None:
    async with toy_gateway(engine_fault()) as toy:
        with pytest.raises(openai.InternalServerError) as caught:
            await toy.chat()
        assert caught.value.status_code == 503
        assert caught.value.response.headers["x-should-retry"] == "true"
        assert caught.value.type == "server_error"
        assert toy.session.fault is not None


async def test_a_retry_behind_a_timeout_joins_the_call_that_is_under_way() -> None:
    rest = asyncio.Event()
    async with toy_gateway(Says(A1, held=rest)) as toy:
        client = toy.client(retries=3, timeout_s=0.2)
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HI))
        await until(lambda: toy.gateway.counters["left"] >= 1, "the first try to be left")
        await until(lambda: toy.gateway.num_requests >= 1, "the second try")
        rest.set()
        reply = await asking
        sample = await toy.sample()
    assert reply.choices[0].message.content == "hello"
    assert toy.engine.prompts == [P0]
    assert toy.engine.stopped == []
    assert spans_of(sample) == [(A1, 1)]


async def test_a_retry_of_an_answered_request_is_answered_the_same_without_a_call() -> None:
    async with toy_gateway(A1, A2) as toy:
        first = await toy.chat()
        again = await toy.chat(extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == first.id
        assert again.choices == first.choices
        streamed, _ = await told(
            await toy.chat(stream=True, extra_headers={"x-stainless-retry-count": "2"})
        )
        assert streamed == "hello"
        assert len(toy.engine.asked) == 1
        other = await toy.chat()
        assert other.id != first.id
        sample = await toy.sample()
    assert len(toy.engine.asked) == 2
    assert spans_of(sample) == [(A2, 1)]


async def test_tries_with_one_idempotency_key_are_one_call() -> None:
    headers = {"idempotency-key": "k1"}
    async with toy_gateway(A1, A2) as toy:
        first = await toy.chat(extra_headers=headers)
        again = await toy.chat(extra_headers=headers)
        assert first.id == again.id
        assert spans_of(await toy.sample()) == [(A1, 1)]


async def test_case_120_a_stream_that_is_left_is_not_committed_and_stopped_at_the_engine() -> None:
    never = asyncio.Event()
    async with toy_gateway(Says([30] * 40, slow=never), Says(A1, A1_LOG_PROBS)) as toy:
        stream = await toy.chat(stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await until(lambda: toy.engine.stopped == [0], "the engine to be told")
        assert (await toy.chat()).choices[0].message.content == "hello"
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, P0]
    assert spans_of(sample) == [(A1, 1)]


async def test_a_stream_whose_engine_breaks_raises_and_leaves_nothing() -> None:
    async with toy_gateway(engine_fault(), A1) as toy:
        with pytest.raises(openai.APIError, match="no engine"):
            await told(await toy.chat(stream=True))
        await toy.chat()
        assert spans_of(await toy.sample()) == [(A1, 1)]


# Errors, as the SDK's own classes.


async def test_errors_are_the_sdks_own_classes() -> None:
    async with toy_gateway(A1, [31, 32], A1, max_in_flight=1) as toy:
        with pytest.raises(openai.BadRequestError) as invalid:
            await toy.chat(n=2)
        assert (invalid.value.param, invalid.value.type) == ("n", "invalid_request_error")
        gone = toy.client()
        lost = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{toy.gateway.port}/sessions/{'0' * 32}/v1",
            api_key="none",
            max_retries=0,
        )
        toy.clients.append(lost)
        with pytest.raises(openai.NotFoundError, match=f"session_id={'0' * 32}"):
            await lost.chat.completions.create(model="m", messages=HI)
        cut = await toy.chat(max_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        with pytest.raises(openai.ConflictError):
            await toy.chat([*HI, cut.choices[0].message, *NO])
        await toy.session.close()
        with pytest.raises(openai.APIStatusError) as closed:
            await gone.chat.completions.create(model="m", messages=HI)
        assert closed.value.status_code == 410
        assert closed.value.response.headers["x-should-retry"] == "false"
        assert closed.value.code == "session_closed"


async def test_too_many_at_once_is_a_rate_limit() -> None:
    rest = asyncio.Event()
    async with toy_gateway(Says(A1, held=rest), A2, max_in_flight=1) as toy:
        first = asyncio.ensure_future(toy.chat())
        await until(lambda: len(toy.engine.asked) == 1, "the first request")
        with pytest.raises(openai.RateLimitError) as busy:
            await toy.chat(NO)
        assert busy.value.code == "rate_limit_exceeded"
        rest.set()
        await first


async def test_a_context_without_room_has_the_code_that_agents_look_for() -> None:
    async with toy_gateway(A1, limits={"max_context": len(P0)}) as toy:
        with pytest.raises(openai.BadRequestError) as caught:
            await toy.chat()
        assert caught.value.code == "context_length_exceeded"
        assert toy.engine.asked == []
