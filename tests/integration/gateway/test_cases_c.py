"""Theme C through the gateway: which calls a client gets, streamed or not, and how they come back.

Calls that an upstream streams (46, 47) are `tests/unit/tito/test_deltas.py`: nothing here reads a
call from an engine, which gives ids.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.integration.gateway.toys import (
    RENDERER,
    Says,
    Toy,
    call_text,
    said,
    spans_of,
    toy_gateway,
)
from tests.toy import A2, HI, P0
from worker.tito.ids import as_ids

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "calc")]


async def both_ways(ids: list[int], piece: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the message of a reply, which is the same with and without stream."""
    fields = {"tools": TOOLS} | fields
    async with toy_gateway(ids, Says(ids, piece=piece)) as toy:
        reply = (await toy.chat(**fields)).choices[0]
        chunks = [chunk async for chunk in await toy.chat(stream=True, **fields)]
        sample = await toy.sample()
    assert spans_of(sample) == [(ids, 1)]
    whole = reply.message.model_dump(exclude_none=True)
    streamed = put_together([c.choices[0].delta for c in chunks])
    assert without_ids(streamed) == without_ids(whole)
    assert [c.choices[0].finish_reason for c in chunks][-1] == reply.finish_reason
    return whole | {"finish": reply.finish_reason}


def put_together(deltas: list[Any]) -> dict[str, Any]:
    """Return the message of a stream, as a client that follows the API builds it."""
    message: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if getattr(delta, name, None) is not None:
                message[name] = message.get(name, "") + getattr(delta, name)
        for entry in delta.tool_calls or []:
            if entry.index not in calls:
                assert entry.id
                assert entry.type == "function"
                assert entry.function.name
                function = {"name": entry.function.name, "arguments": ""}
                calls[entry.index] = {"id": entry.id, "type": "function", "function": function}
            else:
                assert entry.id is None
                assert entry.function.name is None
            calls[entry.index]["function"]["arguments"] += entry.function.arguments or ""
    if calls:
        assert list(calls) == list(range(len(calls)))
        message["tool_calls"] = list(calls.values())
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of every call."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("as_control", [True, False])
async def test_case_25_a_closing_tag_in_an_argument_is_text(as_control: bool) -> None:
    inner = '{"name":"write","arguments":{"text":"use </tool_call> here }"}}'
    if as_control:
        ids = said(f"<tool_call>\n{inner}\n</tool_call>")
    else:
        ids = [6, *RENDERER.encode(f"\n{inner}\n").tolist(), 7, 2]
    message = await both_ways(ids)
    assert calls_of(message) == [("write", {"text": "use </tool_call> here }"})]
    assert message["finish"] == "tool_calls"
    assert "content" not in message


async def test_case_26_a_brace_in_an_argument_is_text() -> None:
    text = '<tool_call>{"name":"sh","arguments":{"cmd":"mkdir -p t/{a,b"}}</tool_call>'
    assert calls_of(await both_ways(said(text))) == [("sh", {"cmd": "mkdir -p t/{a,b"})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name":null,"arguments":{}}</tool_call>',
        '<tool_call>{"name":"a","arguments":[1,2]}</tool_call>',
        '<tool_call>{"name":"a","arguments":{"x": 1,}</tool_call>',
        '<tool_call>{"name":"a","arguments":{',
    ],
)
async def test_case_27_29_31_43_what_cannot_be_executed_is_content_as_it_was_written(
    text: str,
) -> None:
    message = await both_ways(said("hello" + text))
    assert calls_of(message) == []
    assert message["content"].startswith("hello")
    assert text in message["content"]
    assert message["finish"] == "stop"


async def test_case_28_arguments_are_encoded_once_however_often_the_model_did() -> None:
    inner = json.dumps({"url": "http://x.test"})
    text = call_text("open", json.dumps(inner))
    message = await both_ways(said(text))
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"url":"http://x.test"}'


async def test_case_32_a_rehearsed_call_is_reasoning() -> None:
    rehearsed, real = call_text("a", {}), call_text("a", {"x": 1})
    message = await both_ways(said(f"<think>I will {rehearsed}</think>{real}"))
    assert calls_of(message) == [("a", {"x": 1})]
    assert "I will" in message["reasoning_content"]


async def test_case_34_bare_json_is_an_answer() -> None:
    text = 'Example: {"name":"rm","arguments":{"path":"/"}}'
    message = await both_ways(said(text))
    assert calls_of(message) == []
    assert message["content"] == text
    assert message["finish"] == "stop"


async def test_case_35_an_unknown_name_is_the_clients_to_answer() -> None:
    call = call_text("nope", {})
    async with toy_gateway(said(call), A2) as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["nope"]
        result = {
            "role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "no tool nope",
        }  # fmt: skip
        await toy.chat([*HI, message.model_dump(exclude_none=True), result], tools=TOOLS)
        sample = await toy.sample()
    assert [mask for _, mask in spans_of(sample)] == [1, 0, 1]


async def test_calls_are_text_where_no_tools_were_offered_or_none_are_wanted() -> None:
    text = call_text("a", {"x": 1})
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        message = await both_ways(said(text), **fields)
        assert calls_of(message) == []
        assert message["content"] == text
        assert message["finish"] == "stop"


async def test_one_call_at_a_time_keeps_the_others_as_text() -> None:
    text = call_text("a", {}) + call_text("b", {})
    message = await both_ways(said(text), parallel_tool_calls=False)
    assert calls_of(message) == [("a", {})]
    assert message["content"] == call_text("b", {})


async def test_case_41_42_no_call_of_a_cut_reply_is_given_out() -> None:
    whole = said(call_text("a", {"path": "/srv/a"}) + call_text("b", {"path": "/srv/a"}))
    cut = len(whole) - 20
    # The engine calls it a stop; as many tokens as were asked for and no end are a cut.
    message = await both_ways(whole[:cut], max_tokens=cut)
    assert message["finish"] == "length"
    async with toy_gateway(whole, whole) as toy:
        reply = (await toy.chat(tools=TOOLS, max_tokens=cut)).choices[0]
        chunks = [c async for c in await toy.chat(tools=TOOLS, max_tokens=cut, stream=True)]
        sample = await toy.sample()
    assert reply.finish_reason == "length"
    assert reply.message.tool_calls is None
    assert "/srv/a" in reply.message.content
    streamed = put_together([c.choices[0].delta for c in chunks])
    assert streamed == {"role": "assistant", "content": reply.message.content}
    assert spans_of(sample) == [(whole[:cut], 1)]
    assert sample.stop_reason == "turn_length"
    assert sample.status == "truncated"


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
async def test_case_44_45_the_pieces_of_arguments_are_the_arguments(piece: int) -> None:
    long = {"x": "y" * 1000, "z": "🙂\n\"'"}
    text = "hello" + call_text("a", {"x": 1}) + "\n" + call_text("b", long)
    message = await both_ways(said(text), piece)
    first, second = message["tool_calls"]
    assert first["function"]["arguments"] == '{"x":1}'
    assert json.loads(second["function"]["arguments"]) == long
    assert first["id"] != second["id"]


async def test_case_45_a_streaming_client_sends_the_calls_back_without_index() -> None:
    text = call_text("a", {"x": "y" * 1000})
    async with toy_gateway(said(text), A2) as toy:
        chunks = [c async for c in await toy.chat(stream=True, tools=TOOLS)]
        message = put_together([c.choices[0].delta for c in chunks])
        assert len([c for c in chunks if c.choices[0].delta.tool_calls]) > 3
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        await toy.chat([*HI, message, result], tools=TOOLS)
        sample = await toy.sample()
    assert [mask for _, mask in spans_of(sample)] == [1, 0, 1]


def a_call(number: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def a_result(number: str | None, content: str) -> dict[str, Any]:
    result = {"role": "tool", "content": content}
    return result if number is None else {**result, "tool_call_id": number}


async def shown(toy: Toy, messages: list[Any]) -> str:
    """Return the prompt of a conversation as text."""
    await toy.chat(messages)
    return RENDERER.decode(as_ids(toy.engine.prompts[-1]))


async def test_case_48_ids_that_repeat_every_turn_answer_the_turn_before_them() -> None:
    given = [
        *HI,
        {"role": "assistant", "tool_calls": [a_call("f:0", "f", '{"n":1}')]},
        a_result("f:0", "one"),
        {"role": "assistant", "tool_calls": [a_call("f:0", "f", '{"n":2}')]},
        a_result("f:0", "two"),
    ]
    async with toy_gateway(A2) as toy:
        text = await shown(toy, given)
    assert text.index('"n": 1') < text.index("one") < text.index('"n": 2') < text.index("two")


async def test_case_49_results_stand_in_the_order_of_their_calls() -> None:
    calls = {"role": "assistant", "tool_calls": [a_call("w", "weather"), a_call("t", "time")]}
    async with toy_gateway(A2, A2, A2) as toy:
        text = await shown(toy, [*HI, calls, a_result("t", "14:05"), a_result("w", "22C")])
        assert text.index("22C") < text.index("14:05")
        text = await shown(toy, [*HI, calls, a_result(None, "14:05"), a_result(None, "22C")])
        assert text.index("14:05") < text.index("22C")
        with pytest.raises(openai.BadRequestError, match="answers no call") as caught:
            await toy.chat([*HI, calls, a_result("w", "22C"), a_result("zzz", "14:05")])
        assert caught.value.param == "messages"
        assert len(toy.engine.asked) == 2


async def test_case_49_the_same_behind_a_reply_that_was_sampled() -> None:
    text = call_text("a", {}) + call_text("b", {})
    ids = said(text)
    async with toy_gateway(ids, A2) as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message
        first, second = message.tool_calls
        echo = message.model_dump(exclude_none=True)
        with pytest.raises(openai.BadRequestError, match="answers no call"):
            await toy.chat([*HI, echo, a_result("zzz", "x")], tools=TOOLS)
        results = [a_result(second.id, "two"), a_result(first.id, "one")]
        await toy.chat([*HI, echo, *results], tools=TOOLS)
        sample = await toy.sample()
    prompt = toy.engine.prompts[-1]
    assert prompt[: len(P0) + len(ids)] == [*P0, *ids]
    behind = RENDERER.decode(as_ids(prompt[len(P0) + len(ids) :]))
    assert behind.index("one") < behind.index("two")
    assert [mask for _, mask in spans_of(sample)] == [1, 0, 1]


@pytest.mark.parametrize("arguments", ['{"a":2,"b":1}', '{ "a": 2.0, "b": 1 }', {"a": 2, "b": 1}])
async def test_case_50_arguments_in_another_spelling_are_the_same_turn(arguments: Any) -> None:
    ids = said('<tool_call>{"name":"calc","arguments":{"b":1, "a":2}}</tool_call>')
    async with toy_gateway(ids, A2) as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message
        assert message.tool_calls[0].function.arguments == '{"b":1,"a":2}'
        number = message.tool_calls[0].id
        echo = {"role": "assistant", "tool_calls": [a_call(number, "calc", arguments)]}
        await toy.chat([*HI, echo, a_result(number, "3")], tools=TOOLS)
        sample = await toy.sample()
    assert toy.engine.prompts[1][: len(P0) + len(ids)] == [*P0, *ids]
    assert spans_of(sample)[0] == (ids, 1)


async def test_case_50_other_arguments_are_another_turn() -> None:
    ids = said('<tool_call>{"name":"calc","arguments":{"b":1, "a":2}}</tool_call>')
    async with toy_gateway(ids, A2) as toy:
        message = (await toy.chat(tools=TOOLS)).choices[0].message
        number = message.tool_calls[0].id
        echo = {"role": "assistant", "tool_calls": [a_call(number, "calc", '{"b":1,"a":3}')]}
        await toy.chat([*HI, echo, a_result(number, "3")], tools=TOOLS)
        sample = await toy.sample()
    assert toy.engine.prompts[1][: len(P0) + len(ids)] != [*P0, *ids]
    assert spans_of(sample) == [(A2, 1)]


async def test_case_11_a_character_of_several_ids_is_told_whole() -> None:
    emoji = [1240, 1159, 1153, 1130]
    message = await both_ways([*emoji, 2])
    assert message["content"] == "🙂"
    message = await both_ways([1240, 1159, 2])
    assert message["content"] == "\ufffd"
    async with toy_gateway([1240, 1159, 1153]) as toy:
        cut = await toy.chat(max_tokens=2, logprobs=True)
        sample = await toy.sample()
    assert [bytes(entry.bytes) for entry in cut.choices[0].logprobs.content] == [b"\xf0", b"\x9f"]
    assert spans_of(sample) == [([1240, 1159], 1)]


async def test_a_stream_never_shows_half_a_character() -> None:
    rest = asyncio.Event()
    async with toy_gateway(Says([30, 1240, 1159, 1153, 1130, 2], slow=rest)) as toy:
        stream = await toy.chat(stream=True)
        rest.set()
        pieces = [c.choices[0].delta.content or "" async for c in stream]
    assert "".join(pieces) == "hello🙂"
    assert all("\ufffd" not in piece for piece in pieces)
