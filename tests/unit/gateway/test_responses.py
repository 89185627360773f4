"""The dialect of OpenAI's Responses API: what is read, what is refused, and how a reply is told."""

from __future__ import annotations

import typing
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import response_create_params

from rollstream.sample import Message
from tests.unit.gateway.dialect_wire import (
    Wire,
    a_reply,
    broken_bodies,
    deltas_of,
    grown_replies,
    parsed_replies,
    stream_events,
)
from worker.gateway.dialects.responses import FIELDS, OpenAIResponses
from worker.gateway.matchers import rendered
from worker.gateway.types import STATUS, CallRule, ChatRequest, ErrorKind, Refusal
from worker.types import AssistantMessage, Finish, ToolCall

HI = {"role": "user", "content": "hi"}
REPLY = "0f" * 16
ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
TOLD_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
dialect = OpenAIResponses()


def parse(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    return dialect.parse({"model": "m", "input": "hi"} | body, headers or {})


def refusal(**body: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(**body)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


def messages(*items: dict[str, Any]) -> list[Message]:
    return parse(input=list(items)).messages


def test_every_field_of_the_sdk_has_a_rule() -> None:
    fields: set[str] = set()
    for params in (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ):
        fields |= typing.get_type_hints(params).keys()
    assert {"input", "instructions", "previous_response_id", "truncation"} <= fields
    assert sorted(fields - FIELDS.keys()) == []


def test_the_rules_on_values_that_clients_send() -> None:
    request = parse(
        temperature=0.2,
        top_p=0.9,
        truncation="auto",
        reasoning={"effort": "high"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        store=False,
        background=False,
        conversation=None,
        stream_options={"include_obfuscation": False},
        max_output_tokens=64,
        top_logprobs=0,
        foo=1,
    )
    assert set(request.pinned) == {
        "temperature",
        "top_p",
        "truncation",
        "reasoning",
        "text.verbosity",
    }
    assert request.ignored == ("foo",)
    assert (request.max_tokens, request.log_probs, request.max_calls) == (64, False, None)
    assert parse(include=["message.output_text.logprobs"]).log_probs
    assert parse(parallel_tool_calls=False).max_calls == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": 1}, "stream"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": 3}, "text"),
        ({"include": "x"}, "include"),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [ADD, {"type": "custom", "name": "patch"}]}, "tools[1]"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [HI, CALL | {"call_id": None}, RESULT]}, "input[1].call_id"),
        ({"input": [HI, CALL | {"name": 3}, RESULT]}, "input[1].name"),
        ({"input": [HI, CALL | {"arguments": {}}, RESULT]}, "input[1].arguments"),
        ({"input": [HI, CALL, RESULT | {"output": 3}]}, "input[2].output"),
        ({"input": [HI, CALL, RESULT | {"call_id": 3}]}, "input[2].call_id"),
        ({"input": [HI, {"type": "reasoning", "content": 3}, HI]}, "input[1].content"),
        ({"input": [HI, CALL]}, "input[1]"),
        ({"input": [HI, {"role": "assistant", "content": "so"}]}, "input[1]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(body: dict[str, Any], param: str) -> None:
    found = refusal(**body)
    assert found.param == param
    assert param in found.message or param.partition("[")[0] in found.message


def test_a_text_and_parts_of_it_are_one() -> None:
    part = {"type": "input_text", "text": "hi"}
    assert parse().messages == [HI]
    assert messages({"type": "message", "role": "user", "content": [part]}) == [HI]
    assert messages(HI) == [HI]


def test_the_items_of_a_turn_are_one_message() -> None:
    found = messages(
        {"role": "developer", "content": "be kind"},
        HI,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        CALL,
        CALL | {"call_id": "c2", "arguments": None},
        RESULT | {"call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        RESULT,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        HI,
    )
    second = TOLD_CALL | {"id": "c2", "function": {"name": "add", "arguments": ""}}
    assert found == [
        {"role": "developer", "content": "be kind"},
        HI,
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [TOLD_CALL, second],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "no", "reasoning_content": "sum"},
        HI,
    ]


def test_results_between_the_calls_of_one_reply_do_not_cut_it() -> None:
    calls = [CALL | {"call_id": name, "id": f"fc_{REPLY}_{name[1]}"} for name in ("c1", "c2")]
    results = [RESULT | {"call_id": name} for name in ("c1", "c2")]
    together = messages(HI, *calls, *results)
    assert messages(HI, calls[0], results[0], calls[1], results[1]) == together
    assert len(together[1]["tool_calls"]) == 2


def test_calls_of_two_replies_with_results_between_them_are_two_messages() -> None:
    second = CALL | {"call_id": "c2", "id": f"fc_{'1e' * 16}_0"}
    first = CALL | {"id": f"fc_{REPLY}_0"}
    for items in (
        [first, RESULT, second, RESULT | {"call_id": "c2"}],
        [CALL, RESULT, CALL | {"call_id": "c2"}, RESULT | {"call_id": "c2"}],
    ):
        roles = [one["role"] for one in messages(HI, *items)]
        assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_two_replies_of_ours_are_never_one_message() -> None:
    first = {"role": "assistant", "content": "a", "id": f"msg_{REPLY}_0"}
    second = {"role": "assistant", "content": "b", "id": f"msg_{'1e' * 16}_0"}
    assert [one["content"] for one in messages(HI, first, second, HI)][1:3] == ["a", "b"]


def test_encrypted_reasoning_alone_says_nothing() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x", "id": "rs_1"}
    assert messages(HI, hidden, HI) == [HI, HI]


def test_flat_tools_become_the_form_of_the_chat() -> None:
    request = parse(tools=[ADD | {"strict": True}])
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": ADD["parameters"],
                "strict": True,
            },
        }
    ]
    assert request.pinned == ("tools.strict",)
    assert parse(tools=[ADD], tool_choice="none").call_rule is CallRule.NONE


def test_instructions_stand_in_front_of_a_first_request() -> None:
    assert parse(instructions="be kind").messages == [
        {"role": "system", "content": "be kind"},
        HI,
    ]
    assert parse(instructions="").messages == [HI]


def response_id(request: ChatRequest) -> str:
    found: str = dialect.reply(request, a_reply("so"))["id"]
    return found


def test_instructions_behind_a_response_are_added_only_where_they_are_others() -> None:
    first = response_id(parse(instructions="be kind"))
    same = parse(instructions="be kind", previous_response_id=first)
    assert (same.continues, same.messages) == (REPLY, [HI])
    none = parse(previous_response_id=first)
    assert (none.continues, none.messages) == (REPLY, [HI])
    again = parse(instructions="be kind", previous_response_id=response_id(none))
    assert again.messages == [HI]
    other = parse(instructions="be short", previous_response_id=first)
    assert other.messages == [{"role": "system", "content": "be short"}, HI]
    back = parse(instructions="be kind", previous_response_id=response_id(other))
    assert back.messages == [{"role": "system", "content": "be kind"}, HI]
    bare = response_id(parse())
    assert bare == f"resp_{REPLY}"
    late = parse(instructions="be kind", previous_response_id=bare)
    assert late.messages == [{"role": "system", "content": "be kind"}, HI]


def test_added_instructions_do_not_part_results_from_their_calls() -> None:
    found = parse(instructions="x", previous_response_id="resp_0", input=[RESULT, RESULT, HI])
    assert [one["role"] for one in found.messages] == ["tool", "tool", "system", "user"]


def test_an_id_that_is_none_of_ours_is_passed_on_to_be_refused() -> None:
    assert parse(previous_response_id="x" * 9).continues == "x" * 9


def test_a_response_says_again_what_was_asked_for() -> None:
    request = parse(
        instructions="i",
        tools=[ADD],
        metadata={"k": "v"},
        max_output_tokens=9,
        parallel_tool_calls=False,
        tool_choice="none",
    )
    body = dialect.reply(request, a_reply("so"))
    assert (body["instructions"], body["tools"], body["metadata"]) == ("i", [ADD], {"k": "v"})
    assert (body["max_output_tokens"], body["parallel_tool_calls"]) == (9, False)
    assert (body["tool_choice"], body["temperature"]) == ("none", None)
    assert body["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 47,
    }


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        (Finish.STOP, "completed", None),
        (Finish.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (Finish.ABORT, "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_reply_that_was_cut_is_incomplete(finish: Finish, status: str, details: Any) -> None:
    body = dialect.reply(parse(), a_reply("so", finish=finish))
    assert (body["status"], body["incomplete_details"]) == (status, details)
    assert body["output"][-1]["status"] == status


def test_log_probs_are_told_as_the_client_asked() -> None:
    reply = a_reply("so", pieces=tuple("abcdefg"))
    asked = parse(include=["message.output_text.logprobs"])
    told = dialect.reply(asked, reply)["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in told] == list("abcdefg")
    assert [one["logprob"] for one in told] == [-i / 8 for i in range(7)]
    events = stream_events(dialect.streamer(asked, reply.id, 0.0), [{"content": "so"}], reply)
    done = [data for name, data in events if name == "response.output_text.done"]
    assert isinstance(done[0], dict)
    assert done[0]["logprobs"] == told
    assert dialect.reply(parse(), reply)["output"][0]["content"][0]["logprobs"] == []


def test_a_stream_has_its_items_one_after_the_other_and_every_event_its_number() -> None:
    parsed = AssistantMessage("so", "hm", [ToolCall("c1", "a", {}), ToolCall("c2", "b", {"x": 1})])
    reply = a_reply(parsed)
    streamer = dialect.streamer(parse(), reply.id, 0.0)
    events = stream_events(streamer, deltas_of(reply.message, (1,), late_content=True), reply)
    assert [data["sequence_number"] for _, data in events if isinstance(data, dict)] == list(
        range(len(events))
    )
    assert all(isinstance(data, dict) and data["type"] == name for name, data in events)
    call = ["added", "arguments.delta", "arguments.done", "done"]
    text = ["item.added", "part.added", "text.delta", "text.delta", "text.done", "part.done"]
    told = [name.split("_")[-1] for name, _ in events]
    assert told[2:9] == [one.split(".")[0] + "." + one.split(".")[1] for one in text] + [
        "item.done"
    ]
    assert [name for name, _ in events][-9:] == [
        *(
            f"response.{'function_call_' if 'arguments' in one else 'output_item.'}{one}"
            for one in call * 2
        ),
        "response.completed",
    ]


ALL_OF_IT: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": f"rs_{REPLY}_0",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        CALL | {"id": f"fc_{REPLY}_0"},
        RESULT | {"output": [{"type": "input_text", "text": "1"}]},
    ],
    "previous_response_id": "resp_0",
    "tools": [ADD],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"k": "v"},
    "max_output_tokens": 9,
    "stream": True,
}


@settings(deadline=None)
@given(broken_bodies(ALL_OF_IT))
def test_whatever_a_body_holds_it_is_read_or_refused(body: dict[str, Any]) -> None:
    assert parse(**ALL_OF_IT).stream
    try:
        request = dialect.parse(body, {})
    except Refusal as refused:
        said = (refused.kind, bool(refused.message))
        assert said == (ErrorKind.INVALID, True)
        return
    assert all(isinstance(message["content"], str) for message in request.messages)
    assert request.messages[-1]["role"] != "assistant"
    told = dialect.reply(request, a_reply("so"))
    assert isinstance(told["metadata"], dict)


WIRE = Wire(httpx2.Response)
CLIENT = openai.OpenAI(
    api_key="k",
    base_url="http://gateway/v1",
    max_retries=0,
    http_client=httpx2.Client(transport=httpx2.MockTransport(WIRE)),
)


def whole(reply: Any) -> openai.types.responses.Response:
    WIRE.answer(dialect.reply(parse(), reply))
    return CLIENT.responses.create(model="m", input="hi")


def streamed(reply: Any, deltas: list[dict[str, Any]]) -> list[Any]:
    WIRE.stream(
        stream_events(dialect.streamer(parse(), reply.id, reply.created_unix_s), deltas, reply)
    )
    with CLIENT.responses.stream(model="m", input="hi") as stream:
        return list(stream)


def as_told(value: Any) -> Any:
    """Return JSON without what the SDK's helper adds of its own."""
    if isinstance(value, list):
        return [as_told(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {k: as_told(v) for k, v in value.items() if k not in ("parsed", "parsed_arguments")}


def echoed(items: list[Any]) -> Message:
    """Return what the SDK's echo of a reply is in our form."""
    WIRE.answer(dialect.reply(parse(), a_reply("next")))
    history: Any = [HI, *items, HI]
    CLIENT.responses.create(model="m", input=history)
    found = dialect.parse(WIRE.bodies[-1], WIRE.headers[-1]).messages
    WIRE.bodies.clear()
    WIRE.headers.clear()
    assert len(found) == 3
    return found[1]


@settings(max_examples=40, deadline=None)
@given(
    parsed_replies(),
    st.lists(st.integers(0, 99), max_size=4),
    st.booleans(),
    st.sampled_from([Finish.STOP, Finish.LENGTH]),
)
def test_every_way_of_telling_a_reply_agrees_and_comes_back_as_the_stored_message(
    parsed: AssistantMessage, places: list[int], late: bool, finish: Finish
) -> None:
    rule = CallRule.AUTO if finish is Finish.STOP else CallRule.NONE
    reply = a_reply(parsed, finish=finish, rule=rule)
    said = whole(reply)
    events = streamed(reply, deltas_of(reply.message, places, late))
    final = events[-1].response
    assert as_told(final.to_dict()) == said.to_dict()
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in said.output]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == said.output_text == reply.message["content"]
    for items in (said.output, final.output, done):
        assert rendered(reply.message, echoed([*items]))
    if len(said.output) > 1:
        left_out = [item for item in said.output if item.type != "reasoning"]
        assert rendered(reply.message, echoed([*left_out]))
        without_ids = [{k: v for k, v in item.items() if k != "id"} for item in done]
        assert rendered(reply.message, echoed(without_ids))


def test_reasoning_behind_text_is_an_item_where_it_came_and_comes_back_whole() -> None:
    reply = a_reply(AssistantMessage("ac", "bd", []))
    deltas = [
        {"content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
        {"reasoning_content": "d"},
    ]
    events = streamed(reply, deltas)
    output = events[-1].response.output
    assert [item.type for item in output] == ["message", "reasoning", "message", "reasoning"]
    assert len({item.id for item in output}) == 4
    assert rendered(reply.message, echoed(output))


@settings(max_examples=40, deadline=None)
@given(grown_replies())
def test_a_reply_that_grew_comes_back_as_the_stored_message(
    grown: tuple[Message, list[dict[str, Any]]],
) -> None:
    reply = a_reply(grown[0])
    final = streamed(reply, grown[1])[-1].response
    assert rendered(reply.message, echoed([*final.output]))
    assert final.output_text == reply.message["content"]


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_errors_are_the_sdks_exceptions(kind: ErrorKind) -> None:
    WIRE.answer(dialect.error(Refusal(kind, "what and why", param="p")), STATUS[kind])
    with pytest.raises(openai.APIStatusError, match="what and why") as caught:
        CLIENT.responses.create(model="m", input="hi")
    assert caught.value.status_code == STATUS[kind]
    assert caught.value.param == "p"


def test_a_stream_that_breaks_says_so_in_its_last_event() -> None:
    streamer = dialect.streamer(parse(), REPLY, 0.0)
    events = [*streamer.begin(), *streamer.delta({"content": "so"})]
    WIRE.stream([*events, *streamer.error(Refusal(ErrorKind.TOO_LONG, "no room"))])
    with CLIENT.responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
        with pytest.raises(RuntimeError):
            stream.get_final_response()
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (
        "context_length_exceeded",
        "no room",
    )
