"""Conformance of sections 2, 10 and 11 as a chat client sees it, with exact ids at the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from rollstream.errors import Withheld
from tests.generate_stage import check
from tests.integration.gateway.stage import gateway_stage, text
from tests.integration.gateway.toys import (
    Says,
    Toy,
    call_text,
    engine_fault,
    said,
    spans_of,
    toy_gateway,
    until,
)
from tests.scripted_engine import a_reply
from tests.toy import A1, A2, HI, NO, OK, P0, U1, toy_renderer
from worker.tito.backend import RenderersBackend
from worker.tito.ids import as_ids

HELLO = {"role": "assistant", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def raw(toy: Toy, **fields: Any) -> Any:
    """Return one response with its headers."""
    create = (toy.clients[0] if toy.clients else toy.client()).chat.completions.with_raw_response
    return await create.create(model="m", messages=HI, **fields)


async def test_15_a_reply_without_a_call_is_one_request() -> None:
    async with toy_gateway(A1) as toy:
        await toy.chat(tools=TOOLS)
        sample = await toy.sample()
    assert toy.engine.prompts == [P0]
    assert spans_of(sample) == [(A1, 1)]
    assert (sample.status, sample.stop_reason) == ("completed", "stop")


async def test_18_a_turn_that_was_cut_is_truncated() -> None:
    async with toy_gateway([31, 32, 30], A2) as toy:
        await toy.chat(max_tokens=2)
        sample = await toy.sample()
    assert spans_of(sample) == [([31, 32], 1)]
    assert sample.status == "truncated"


async def test_19_an_abort_that_nothing_follows_gives_the_sample_back() -> None:
    async with toy_gateway(A1, Says([30], finish="abort")) as toy:
        await toy.chat()
        with pytest.raises(openai.InternalServerError) as caught:
            await toy.chat([*HI, HELLO, *NO])
        assert caught.value.status_code == 503
        assert "aborted" in (await toy.sample()).status


async def test_19_an_abort_behind_which_the_run_goes_on_is_one_reply() -> None:
    opened = asyncio.Event()

    async def wait() -> None:
        await opened.wait()

    steps = (Says([31], finish="abort"), Withheld(), [32, 2])
    async with toy_gateway(*steps, opened=wait) as toy:
        asking = asyncio.ensure_future(toy.chat(logprobs=True, max_tokens=5))
        await until(lambda: len(toy.engine.asked) == 1, "the first call")
        assert not asking.done()
        opened.set()
        reply = await asking
        sample = await toy.sample()
    assert reply.choices[0].message.content == "hello"
    assert reply.usage.completion_tokens == 3
    assert len(reply.choices[0].logprobs.content) == 3
    assert toy.engine.prompts[0] == P0
    assert toy.engine.prompts[-1] == [*P0, 31]
    assert toy.engine.asked[-1].sampling.max_new_tokens == 4
    assert spans_of(sample) == [([31, 32, 2], 1)]
    assert len(sample.calls) == 2


async def test_20_a_line_may_have_so_many_calls() -> None:
    async with toy_gateway(A1, A2, max_turns=1) as toy:
        await toy.chat()
        with pytest.raises(openai.BadRequestError):
            await toy.chat([*HI, HELLO, *NO])
        assert spans_of(await toy.sample()) == [(A1, 1)]


async def test_26_two_results_are_what_the_family_makes_of_them(qwen3: RenderersBackend) -> None:
    text = call_text("f", {"x": 1}) + "\n" + call_text("f", {"x": 2})
    reply = [*qwen3.encode_raw(text).tolist(), qwen3.stop_token_ids[0]]
    async with toy_gateway(reply, reply, renderer=qwen3) as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": str(place)}
            for place, call in enumerate(message.tool_calls)
        ]
        await toy.chat([*HI, message, *results], tools=TOOLS)
    first, second = toy.engine.prompts
    assert second[: len(first) + len(reply)] == [*first, *reply]
    suffix = qwen3.decode(as_ids(second[len(first) + len(reply) :]))
    assert suffix.count("<|im_start|>user") == 1
    assert suffix.count("<tool_response>") == 2
    assert "<|im_start|>assistant" in suffix


async def test_27_no_arguments_are_an_object_and_a_call_without_an_id_gets_one() -> None:
    texts = ['{"name":"f","arguments":""}', '{"name":"f"}']
    ids = said("".join(f"<tool_call>{text}</tool_call>" for text in texts))
    async with toy_gateway(ids) as toy:
        calls = (await toy.chat(tools=TOOLS)).choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ["{}", "{}"]
    assert all(len(call.id) == len("call_") + 24 for call in calls)
    assert all(int(call.id.removeprefix("call_"), 16) >= 0 for call in calls)


async def test_88_three_turns_are_seven_messages_and_one_line() -> None:
    async with toy_gateway(A1, A2, A1) as toy:
        messages: list[Any] = list(HI)
        for _ in range(3):
            reply = await toy.chat(messages)
            messages += [reply.choices[0].message, *NO]
        sample = await toy.sample()
    assert toy.engine.prompts[-1] == [*P0, *A1, *U1, *A2, *U1]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1), (U1, 0), (A1, 1)]


async def test_94_95_system_developer_and_user_messages_may_follow_a_turn() -> None:
    for role in ("system", "developer", "user"):
        async with toy_gateway(A1, A2) as toy:
            await toy.chat()
            await toy.chat([*HI, HELLO, {"role": role, "content": "no"}])
            sample = await toy.sample()
        number = 21 if role == "user" else 20
        suffix = [10, 1, number, 10, 1110, 1111, 2, 10, 1, 22, 10]
        assert toy.engine.prompts[1] == [*P0, *A1, *suffix]
        assert len(sample.calls) == 2


async def test_96_a_first_turn_that_failed_binds_nothing() -> None:
    async with toy_gateway(engine_fault(), A1) as toy:
        with pytest.raises(openai.InternalServerError):
            await toy.chat(OK)
        await toy.chat()
        sample = await toy.sample()
    assert toy.engine.prompts[1] == P0
    assert spans_of(sample) == [(A1, 1)]


async def test_89_a_prompt_that_does_not_begin_with_what_was_held_is_not_sent() -> None:
    """Prompts are appended to; where a template breaks what stands there, it is a bug of ours."""
    held = [0, 0]
    renderer = toy_renderer(damage=lambda ids: ids if not held else [9, 9, 9, *ids[3:]])
    async with toy_gateway(A1, A2, renderer=renderer) as toy:
        await toy.chat()
        for _ in list(held):
            with pytest.raises(openai.InternalServerError, match="changed what was held") as caught:
                await toy.chat([*HI, HELLO, *NO])
            assert caught.value.status_code == 500
            assert len(toy.engine.asked) == toy.session.stats["committed"] == 1
            held.pop()
        await toy.chat([*HI, HELLO, *NO])
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, [*P0, *A1, *U1]]
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


async def test_90_98_a_last_turn_that_is_edited_or_dropped_is_taken_back() -> None:
    for edited in ([*HI, HELLO, *OK], [*HI, HELLO, {"role": "user", "content": "hello"}]):
        async with toy_gateway(A1, A2, [31, 2]) as toy:
            await toy.chat()
            await toy.chat([*HI, HELLO, *NO])
            await toy.chat(edited)
            sample = await toy.sample()
        assert [ids for ids, mask in spans_of(sample) if mask] == [A1, [31, 2]]
        assert len(sample.calls) == 2


async def test_92_a_retry_of_the_first_turn_begins_anew() -> None:
    async with toy_gateway(A1, [31, 2]) as toy:
        await toy.chat()
        await toy.chat()
        sample = await toy.sample()
    assert toy.engine.prompts == [P0, P0]
    assert sample.tokens.tolist() == [*P0, 31, 2]


async def test_99_the_first_spelling_stays_where_a_loose_matcher_takes_another() -> None:
    ids = said('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>')
    async with toy_gateway(ids, A2, A1, matcher="loose_tool_call") as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message.model_dump(exclude_none=True)
        result = {
            "role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok",
        }  # fmt: skip
        message["tool_calls"][0]["function"]["arguments"] = '{ "x": 1.0 }'
        await toy.chat([*HI, message, result], tools=TOOLS)
        await toy.chat([*HI, message, result, HELLO, *NO], tools=TOOLS)
        sample = await toy.sample()
    assert [spans[0] for spans in spans_of(sample) if spans[1]] == [ids, A2, A1]
    assert toy.engine.prompts[2][: len(P0) + len(ids)] == [*P0, *ids]


async def test_99_121_strict_takes_another_spelling_for_another_turn() -> None:
    ids = said('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>')
    async with toy_gateway(ids, A2, matcher="strict") as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message.model_dump(exclude_none=True)
        result = {
            "role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok",
        }  # fmt: skip
        message["tool_calls"][0]["function"]["arguments"] = '{"x": 1}'
        await toy.chat([*HI, message, result], tools=TOOLS)
        sample = await toy.sample()
    assert spans_of(sample) == [(A2, 1)]


HALF = {
    "no log-probs": a_reply(drop=["output_token_logprobs"]),
    "no meta": a_reply(drop=["meta_info"]),
    "one log-prob fewer": a_reply(log_probs=[-0.5] * 4),
    "one id fewer": a_reply().replace(b"23, 92]", b"23]"),
    "no content": a_reply(drop=["output_ids", "output_token_logprobs"]),
    "content null": b'{"output_ids":null,'
    + a_reply(drop=["output_ids", "output_token_logprobs"])[1:],
}


@pytest.mark.parametrize("half", HALF)
async def test_102_a_reply_without_its_log_probs_or_ids_is_an_engines_fault_and_not_recorded(
    qwen3: RenderersBackend, half: str
) -> None:
    (good,) = text(qwen3, "8")
    async with gateway_stage(qwen3, good, HALF[half], good, over="http") as stage:
        messages: list[Any] = list(HI)
        await stage.turn(messages)
        messages += NO
        answer = await stage.chat(messages)
        assert answer.status_code == 503
        assert answer.headers["x-should-retry"] == "true"
        assert "no engine answered" in answer.json()["error"]["message"]
        assert stage.session.stats["committed"] == 1
        await stage.turn(messages)
        await stage.session.close()
        sample = await stage.session.collect()
        first, refused, again = stage.asked
    assert refused.ids == again.ids
    check(sample, [first, again], [good, good])
    assert (sample.metadata["agent"]["failed"], sample.metadata["agent"]["committed"]) == (1, 2)


@pytest.mark.parametrize("damage", ["logprobs_missing", "logprobs_short", "logprobs_long"])
async def test_102_a_stream_without_its_log_probs_breaks_and_is_not_recorded(
    qwen3: RenderersBackend, vocabulary: Path, damage: str
) -> None:
    async with gateway_stage(
        qwen3, over="sim", vocabulary=str(vocabulary), sim={"latency_s": 0}
    ) as stage:
        ordered = await stage.sim.post("/sim/next", {"damage": [damage]})
        assert ordered.status_code == 200, ordered.text
        broken = await stage.chat(HI, stream=True)
        assert stage.session.stats["committed"] == 0
        assert "data: [DONE]" not in broken.text
        assert "no engine answered" in broken.text
        await stage.turn(list(HI))
        await stage.session.close()
        sample = await stage.session.collect()
    sample.validate()
    assert len(sample.calls) == 1
    assert (sample.metadata["agent"]["failed"], sample.metadata["agent"]["committed"]) == (1, 1)


async def test_103_a_reply_says_nothing_of_the_engine_and_has_one_server_and_date() -> None:
    async with toy_gateway(A1) as toy:
        response = await raw(toy)
    body = response.http_response.json()
    assert set(body) == {
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint",
    }  # fmt: skip
    assert set(body["choices"][0]["message"]) == {"role", "content", "refusal"}
    names = [name.lower() for name, _ in response.http_response.headers.multi_items()]
    assert names.count("server") == names.count("date") == 1


async def test_105_a_stream_whose_call_is_refused_is_json_and_records_nothing() -> None:
    async with toy_gateway(A1, limits={"max_context": len(P0)}) as toy:
        with pytest.raises(openai.BadRequestError) as caught:
            await toy.chat(stream=True)
        assert caught.value.response.headers["content-type"].startswith("application/json")
        sample = await toy.sample()
    assert sample.calls == []
    assert toy.engine.asked == []


async def test_106_every_call_of_a_session_has_its_routing_key() -> None:
    async with toy_gateway(A1, A2) as toy:
        await toy.chat()
        await toy.chat([*HI, HELLO, *NO])
        keys = {asked.routing_key for asked in toy.engine.asked}
    assert len(keys) == 1
    assert keys.pop()


async def test_107_four_requests_at_once_are_all_answered_and_no_token_is_lost() -> None:
    rest = asyncio.Event()
    replies = [[30, number, 2] for number in (30, 31, 32, 10)]
    async with toy_gateway(*(Says(ids, held=rest) for ids in replies)) as toy:
        asking = [asyncio.ensure_future(toy.chat()) for _ in replies]
        await until(lambda: len(toy.engine.asked) == 4, "all four")
        rest.set()
        answers = await asyncio.gather(*asking)
        sample = await toy.sample()
    assert len({answer.id for answer in answers}) == 4
    counts = sample.metadata["agent"]
    assert counts["committed"] == 4
    assert counts["sampled_tokens"] == 12
    assert counts["dropped_tokens"] == 9
    assert sum(mask for _, mask in spans_of(sample)) == 1


async def test_110_in_front_of_a_turn_that_was_cut_another_one_may_begin() -> None:
    async with toy_gateway([31, 32, 30], A1, A2) as toy:
        await toy.chat(max_tokens=2)
        await toy.chat()
        await toy.chat([*HI, HELLO, *NO])
        sample = await toy.sample()
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]
