"""The anthropic SDK as agents use it: real HTTP, and what it does is the sample, id for id."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

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
from worker.gateway.dialects.anthropic import AnthropicMessages
from worker.sampling import Sampling
from worker.types import DivergencePolicy

CALC: Any = {
    "name": "calc",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
THOUGHT = "<think>\nhm\n</think>\n\n"


@asynccontextmanager
async def toy_and_client(
    *steps: Any, retries: int = 0, timeout_s: float = WAIT_S, **more: Any
) -> AsyncIterator[tuple[Toy, AsyncAnthropic]]:
    async with (
        toy_gateway(*steps, dialects=[AnthropicMessages()], **more) as toy,
        AsyncAnthropic(
            base_url=toy.url, api_key="none", max_retries=retries, timeout=timeout_s
        ) as client,
    ):
        yield toy, client


async def ask(client: AsyncAnthropic, messages: Any = HI, **fields: Any) -> Any:
    fields = {"max_tokens": 512} | fields
    return await client.messages.create(model="m", messages=copy.copy(messages), **fields)


async def streamed(client: AsyncAnthropic, messages: Any = HI, **fields: Any) -> Any:
    fields = {"max_tokens": 512} | fields
    async with client.messages.stream(model="m", messages=messages, **fields) as stream:
        return await stream.get_final_message()


def blocks(reply: Any) -> list[Any]:
    """Return the blocks of a message, without what the SDK adds."""
    return [block.to_dict() for block in reply.content]


def tool_ids(*texts: str, then: str = "") -> list[int]:
    """Return what stands between two turns where tools, and perhaps the user, spoke."""
    ids = [10]
    for one in texts:
        ids += [1, 23, 10, *RENDERER.encode(one).tolist(), 2, 10]
    if then:
        ids += [1, 21, 10, *RENDERER.encode(then).tolist(), 2, 10]
    return [*ids, 1, 22, 10]


# One turn.


async def test_a_message_is_the_ids_and_log_probs_of_the_engine() -> None:
    async with toy_and_client(Says(A1, A1_LOG_PROBS)) as (toy, client):
        reply = await ask(client)
        sample = await toy.sample()
    assert toy.engine.prompts == [P0]
    assert [block.to_dict() for block in reply.content] == [{"type": "text", "text": "hello"}]
    assert (reply.stop_reason, reply.role, reply.model) == ("end_turn", "assistant", "m")
    assert reply.id.startswith("msg_")
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(P0)
    assert (reply.usage.cache_read_input_tokens, reply.usage.output_tokens) == (4, 3)
    assert sample.tokens.tolist() == [*P0, *A1]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == A1_LOG_PROBS
    assert spans_of(sample) == [(A1, 1)]


async def test_case_120_a_stream_leaves_the_same_sample_and_says_usage() -> None:
    async with toy_and_client(Says(A1, A1_LOG_PROBS)) as (toy, client):
        async with client.messages.stream(model="m", max_tokens=512, messages=HI) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        sample = await toy.sample()
    assert toy.engine.asked[0].streams
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert final.content[0].text == "hello"
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == len(P0)
    assert final.usage.output_tokens == 3
    assert spans_of(sample) == [(A1, 1)]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == A1_LOG_PROBS


async def test_a_stream_is_told_while_the_engine_samples() -> None:
    rest = asyncio.Event()
    async with (
        toy_and_client(Says([30, 30, 2], slow=rest)) as (_, client),
        client.messages.stream(model="m", max_tokens=512, messages=HI) as stream,
        asyncio.timeout(WAIT_S),
    ):
        async for piece in stream.text_stream:
            assert piece
            assert not rest.is_set()
            break
        rest.set()
        assert await stream.get_final_text() == "hellohello"


async def test_the_sync_client_works_from_a_thread() -> None:
    async with toy_and_client(A1, A2) as (toy, _):
        url = toy.url

        def talk() -> list[str]:
            with Anthropic(base_url=url, api_key="none", timeout=WAIT_S, max_retries=0) as client:
                first = client.messages.create(model="m", max_tokens=512, messages=HI)  # type: ignore[arg-type]
                history: Any = [*HI, {"role": "assistant", "content": first.content}, *NO]
                with client.messages.stream(model="m", max_tokens=512, messages=history) as stream:
                    return [first.content[0].text, "".join(stream.text_stream)]  # type: ignore[union-attr]

        assert await asyncio.to_thread(talk) == ["hello", "hello"]
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, [*P0, *A1, *U1]]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


async def test_max_tokens_lowers_the_cap_and_never_raises_it() -> None:
    pinned = Sampling(temperature=0.7, max_new_tokens=1024)
    async with toy_and_client([30] * 9, A1, sampling=pinned) as (toy, client):
        cut = await ask(client, max_tokens=2)
        await ask(client, max_tokens=100_000)
        caps = [asked.sampling.max_new_tokens for asked in toy.engine.asked]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert caps == [2, 1024]


async def test_raw_responses_say_what_was_pinned() -> None:
    async with toy_and_client(A1) as (toy, client):
        response = await client.messages.with_raw_response.create(
            model="m",
            max_tokens=64,
            messages=HI,  # type: ignore[arg-type]
            thinking={"type": "enabled", "budget_tokens": 2048},
            stop_sequences=["x"],
            extra_body={"temperature": 0.0},
        )
    assert set(response.headers["x-rollstream-pinned"].split(", ")) == {
        "thinking",
        "stop_sequences",
        "temperature",
    }
    assert response.headers["request-id"]
    assert toy.engine.asked[0].sampling.temperature == 0.7


async def test_tokens_are_counted_as_they_would_be_sent_and_nothing_is_called() -> None:
    async with toy_and_client(A1, A2) as (toy, client):
        counted = await client.messages.count_tokens(model="m", messages=HI)  # type: ignore[arg-type]
        assert counted.input_tokens == len(P0)
        assert toy.engine.asked == []
        first = await ask(client)
        history: Any = [*HI, {"role": "assistant", "content": first.content}, *NO]
        counted = await client.messages.count_tokens(model="m", messages=history)
        await ask(client, history)
        assert counted.input_tokens == len(toy.engine.prompts[1])
        assert toy.session.stats["requests"] == 2
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content"):
            await client.messages.count_tokens(model="m", messages=[{"role": "user"}])  # type: ignore[typeddict-item]


async def test_the_beta_client_is_the_same() -> None:
    async with toy_and_client(A1) as (toy, client):
        reply = await client.beta.messages.create(
            model="m",
            max_tokens=64,
            messages=HI,  # type: ignore[arg-type]
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        )
        assert reply.content[0].to_dict() == {"type": "text", "text": "hello"}
        assert toy.engine.prompts == [P0]


# Tools.


async def loop_of_tools(
    client: AsyncAnthropic, *, stream: bool, keep_thinking: bool = True
) -> list[Any]:
    """Play an agent: run what the model calls, send the results, until it answers."""
    messages: list[Any] = copy.deepcopy(HI)
    for _ in range(4):
        reply = await (streamed if stream else ask)(client, messages, tools=[CALC])
        content = [one for one in reply.content if keep_thinking or one.type != "thinking"]
        messages.append({"role": "assistant", "content": content})
        calls = [one for one in reply.content if one.type == "tool_use"]
        assert (reply.stop_reason == "tool_use") == bool(calls)
        if not calls:
            return messages
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["x"] + 1)}
            for one in calls
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError("no end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_thinking", [False, True])
async def test_16_17_a_loop_with_tools_is_one_sample(stream: bool, keep_thinking: bool) -> None:
    both = said(THOUGHT + call_text("calc", {"x": 1}) + "\n" + call_text("calc", {"x": 2}))
    one = said("hello" + call_text("calc", {"x": 5}))
    async with toy_and_client(both, one, A2, on_divergence=DivergencePolicy.REJECT) as (
        toy,
        client,
    ):
        messages = await loop_of_tools(client, stream=stream, keep_thinking=keep_thinking)
        sample = await toy.sample()
    kinds = [[block.type for block in one["content"]] for one in messages[1::2]]
    thinking = ["thinking"] if keep_thinking else []
    assert kinds == [[*thinking, "tool_use", "tool_use"], ["text", "tool_use"], ["text"]]
    assert spans_of(sample) == [
        (both, 1), (tool_ids("2", "3"), 0), (one, 1), (tool_ids("6"), 0), (A2, 1),
    ]  # fmt: skip


async def test_case_49_results_in_another_order_answer_their_own_calls() -> None:
    both = said(call_text("calc", {"x": 1}) + call_text("calc", {"x": 2}))
    async with toy_and_client(both, A2) as (toy, client):
        reply = await ask(client, tools=[CALC])
        results: Any = [
            {"type": "text", "text": "no"},
            *(
                {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["x"])}
                for one in reversed(reply.content)
            ),
        ]
        turn = {"role": "assistant", "content": reply.content}
        await ask(client, [*HI, turn, {"role": "user", "content": results}], tools=[CALC])
        assert toy.engine.prompts[1] == [*P0, *both, *tool_ids("1", "2", then="no")]
        results[1]["tool_use_id"] = "nobody"
        with pytest.raises(anthropic.BadRequestError, match="nobody"):
            await ask(client, [*HI, turn, {"role": "user", "content": results}], tools=[CALC])


async def test_case_134_none_keeps_calls_as_text_and_one_at_most_keeps_the_others_so() -> None:
    two = said(call_text("calc", {"x": 1}) + call_text("calc", {"x": 2}))
    for stream in (False, True):
        async with toy_and_client(two, two) as (_, client):
            get = streamed if stream else ask
            none = await get(client, tools=[CALC], tool_choice={"type": "none"})
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            single = await get(client, tools=[CALC], tool_choice=choice)
        assert [one.type for one in none.content] == ["text"]
        assert none.content[0].text.count("<tool_call>") == 2
        assert none.stop_reason == "end_turn"
        assert [one.type for one in single.content] == ["text", "tool_use"]
        assert single.content[1].input == {"x": 1}


async def test_malformed_calls_are_text_in_both_ways() -> None:
    bad = said("hello<tool_call>\n{bad}\n</tool_call>")
    async with toy_and_client(bad, bad) as (_, client):
        whole, grown = await ask(client, tools=[CALC]), await streamed(client, tools=[CALC])
    assert blocks(whole) == blocks(grown)
    assert "{bad}" in whole.content[0].text
    assert whole.stop_reason == grown.stop_reason == "end_turn"


async def test_42_calls_of_a_reply_that_was_cut_are_text() -> None:
    cut = [*said(call_text("calc", {"x": 1}), closed=False), 6, *RENDERER.encode("{").tolist()]
    async with toy_and_client(Says(cut, finish="length")) as (_, client):
        reply = await streamed(client, tools=[CALC])
    assert (reply.stop_reason, [one.type for one in reply.content]) == ("max_tokens", ["text"])


async def test_a_number_beyond_64_bits_comes_back_as_it_went() -> None:
    big = said(call_text("calc", {"x": 10**30, "y": 1.0}))
    async with toy_and_client(big, A2, on_divergence=DivergencePolicy.REJECT) as (toy, client):
        reply = await ask(client, tools=[CALC])
        assert reply.content[0].input == {"x": 10**30, "y": 1.0}
        result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "1"}
        turn = {"role": "assistant", "content": reply.content}
        await ask(client, [*HI, turn, {"role": "user", "content": [result]}], tools=[CALC])
        assert spans_of(await toy.sample())[0] == (big, 1)


async def test_half_of_a_surrogate_pair_is_no_call() -> None:
    half = said('<tool_call>\n{"name": "calc", "arguments": {"x": "\\ud800"}}\n</tool_call>')
    async with toy_and_client(half, half) as (_, client):
        whole, grown = await ask(client, tools=[CALC]), await streamed(client, tools=[CALC])
    assert blocks(whole) == blocks(grown)
    assert [one.type for one in whole.content] == ["text"]


async def test_an_empty_reply_has_no_blocks_and_can_be_gone_on_from() -> None:
    async with toy_and_client([2], A2) as (toy, client):
        reply = await ask(client)
        assert reply.content == []
        turn = {"role": "assistant", "content": reply.content}
        await ask(client, [*HI, turn, *NO])
        assert toy.engine.prompts[1] == [*P0, 2, *U1]


# Retries, timeouts, leaving.


async def test_an_engine_that_failed_is_tried_again_and_the_turn_is_one() -> None:
    async with toy_and_client(engine_fault(), A1, retries=2) as (toy, client):
        assert (await ask(client)).content[0].text == "hello"
        assert spans_of(await toy.sample()) == [(A1, 1)]
    assert toy.engine.prompts == [P0, P0]


async def test_a_retry_behind_a_timeout_joins_the_call_that_is_under_way() -> None:
    rest = asyncio.Event()
    async with toy_and_client(Says(A1, held=rest), retries=3, timeout_s=0.2) as (toy, client):
        asking = asyncio.ensure_future(ask(client))
        await until(lambda: toy.session.stats["joined"] >= 1, "the second try")
        rest.set()
        assert (await asking).content[0].text == "hello"
        assert spans_of(await toy.sample()) == [(A1, 1)]
    assert toy.engine.prompts == [P0]


async def test_a_retry_of_an_answered_request_is_answered_the_same_without_a_call() -> None:
    again = {"x-stainless-retry-count": "1"}
    async with toy_and_client(said(THOUGHT + "hello")) as (toy, client):
        first = await ask(client)
        second = await ask(client, extra_headers=again)
        third = await streamed(client, extra_headers=again)
        assert first.to_dict() == second.to_dict() == third.to_dict()
        assert len(toy.engine.asked) == 1


async def test_a_stream_that_is_left_is_not_committed_and_stopped_at_the_engine() -> None:
    never = asyncio.Event()
    async with toy_and_client(Says([30] * 40, slow=never), A1) as (toy, client):
        async with client.messages.stream(model="m", max_tokens=512, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: toy.engine.stopped == [0], "the engine to be told")
        await ask(client)
        assert spans_of(await toy.sample()) == [(A1, 1)]


# Errors, as the SDK's own classes.


async def test_errors_are_the_sdks_own_classes_in_anthropics_shape() -> None:
    async with toy_and_client(Says([31, 32], finish="length"), A1) as (toy, client):
        with pytest.raises(anthropic.BadRequestError) as invalid:
            await ask(client, tool_choice={"type": "any"}, tools=[CALC])
        body: Any = invalid.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == invalid.value.type == "invalid_request_error"
        assert "tool_choice" in body["error"]["message"]
        cut = await ask(client)
        turn = {"role": "assistant", "content": cut.content}
        with pytest.raises(anthropic.ConflictError):
            await ask(client, [*HI, turn, *NO])
        with pytest.raises(anthropic.BadRequestError, match="prefill"):
            await ask(client, [*HI, turn])
        async with AsyncAnthropic(
            base_url=toy.url[:-32] + "0" * 32, api_key="none", max_retries=0
        ) as lost:
            with pytest.raises(anthropic.NotFoundError, match="session not found"):
                await ask(lost)
        await toy.session.close()
        with pytest.raises(anthropic.APIStatusError) as closed:
            await ask(client)
        assert closed.value.status_code == 410
        assert closed.value.response.headers["x-should-retry"] == "false"


async def test_an_engine_that_failed_is_a_503() -> None:
    async with toy_and_client(engine_fault()) as (toy, client):
        with pytest.raises(anthropic.ServiceUnavailableError) as caught:
            await ask(client)
        assert caught.value.type == "overloaded_error"
        assert toy.session.fault is not None


async def test_a_context_without_room_has_the_words_that_agents_look_for() -> None:
    async with toy_and_client(limits={"max_context": len(P0)}) as (toy, client):
        for asking in (ask, streamed):
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await asking(client)
        assert toy.engine.asked == []


# As Claude Code asks.


def coding_tools(count: int = 16) -> list[Any]:
    """Return many tools, as a coding agent has them."""
    return [
        {
            "name": f"Tool{place}",
            "description": f"Does {place}.\n\nUsage: " + "careful, " * 20,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "number"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for place in range(count)
    ]


def coding_request(messages: list[Any], number: int) -> dict[str, Any]:
    """Return a request with everything that changes from one to the next and means nothing."""
    marked = copy.deepcopy(messages)
    last = marked[-1]
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return {
        "max_tokens": 32_000,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.177.{number:03x}; "
                f"cc_entrypoint=cli; cch={number:05x};",
            },
            {
                "type": "text",
                "text": "You are a coding agent.",
                "cache_control": {"type": "ephemeral"},
            },
            {
                "type": "text",
                "text": "\nBe careful.",
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
        ],
        "messages": marked,
        "tools": coding_tools(),
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        },
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14,claude-code-20250219"},
    }


def calls_of(*calls: tuple[str, dict[str, Any]], thought: str = "") -> str:
    """Return a turn of Qwen3 that calls."""
    written = "\n".join(call_text(name, arguments) for name, arguments in calls)
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + written


async def play_coding_agent(url: str, *, keep_thinking: bool, apart: bool) -> list[Any]:
    """Play a coding agent: streams, parallel results with reminders, thinking kept or dropped.

    `apart`: every block of a reply is a message of its own when it comes back.
    """
    start = {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>\n"}
    messages: list[Any] = [
        {"role": "user", "content": [start, {"type": "text", "text": "Fix the bug."}]}
    ]
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        for number in range(6):
            reply = await streamed(client, **coding_request(messages, number))
            said_blocks = [
                block.to_dict()
                for block in reply.content
                if keep_thinking or block.type != "thinking"
            ]
            parts = [[block] for block in said_blocks] if apart else [said_blocks]
            messages += [{"role": "assistant", "content": part} for part in parts]
            results: list[Any] = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [
                        {"type": "text", "text": f"{block.name}: {json.dumps(block.input)}"}
                    ],
                    **({"is_error": True} if place else {}),
                }
                for place, block in enumerate(b for b in reply.content if b.type == "tool_use")
            ]
            if not results:
                return messages
            results.append({"type": "text", "text": "<system-reminder>more</system-reminder>"})
            messages.append({"role": "user", "content": results})
    raise AssertionError("no end")


@pytest.mark.parametrize(("keep_thinking", "apart"), [(True, False), (False, False), (True, True)])
async def test_traffic_as_claude_codes_is_one_append_only_sample(
    qwen3: Any, keep_thinking: bool, apart: bool
) -> None:
    turns = [
        calls_of(("Tool1", {"path": "a"}), ("Tool2", {"path": "b", "limit": 3}), thought="look"),
        "Now this.\n" + calls_of(("Tool3", {"path": 'c}{"</tool_call>'})),
        calls_of(("Tool4", {"path": "d"}), thought="again"),
        "<think>\ndone\n</think>\n\nFixed.",
    ]
    rules = {"on_divergence": DivergencePolicy.REJECT}
    async with gateway_stage(qwen3, *text(qwen3, *turns), rules=rules) as stage:
        messages = await play_coding_agent(stage.url, keep_thinking=keep_thinking, apart=apart)
        await stage.session.close()
        sample = await stage.session.collect()
    assert messages[-1]["content"][-1]["text"] == "Fixed."
    prompts = [asked.ids for asked in stage.asked]
    assert len(prompts) == 4
    for before, behind in itertools.pairwise(prompts):
        assert behind[: len(before)] == before
    assert [call.start for call in sample.calls] == [len(prompt) for prompt in prompts]
    assert sample.tokens[: len(prompts[-1])].tolist() == prompts[-1]
    whole = qwen3.decode(sample.tokens)
    assert "billing" not in whole
    assert whole.count("You are a coding agent.\nBe careful.") == 1
    assert whole.count("<system-reminder>more</system-reminder>") == 3
    sampled = [sample.tokens[call.start : call.end] for call in sample.calls]
    assert [qwen3.decode(ids).removesuffix("<|im_end|>") for ids in sampled] == turns
