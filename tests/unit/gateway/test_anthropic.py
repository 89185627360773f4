"""Anthropic's dialect: what is read, what is refused, and how a reply is told."""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.sample import Message
from tests.unit.gateway.dialect_wire import (
    Wire,
    a_reply,
    a_request,
    broken_bodies,
    deltas_of,
    grown_replies,
    parsed_replies,
    stream_events,
)
from worker.gateway.dialects.anthropic import TABLE, AnthropicMessages
from worker.gateway.dialects.rules import Fate
from worker.gateway.matchers import rendered
from worker.gateway.types import STATUS, CallRule, ChatRequest, ErrorKind, Refusal
from worker.types import AssistantMessage, Finish, ToolCall

HI = {"role": "user", "content": "hi"}
ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
dialect = AnthropicMessages()


def parse(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    known = {"model": "m", "max_tokens": 64, "messages": [HI]}
    return dialect.parse(known | body, headers or {})


def refusal(**body: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(**body)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


def messages(*given: dict[str, Any]) -> list[Message]:
    return parse(messages=list(given)).messages


def test_every_field_of_the_sdk_has_a_rule() -> None:
    fields: set[str] = set()
    for params in (
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta_params.MessageCreateParamsNonStreaming,
        beta_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
    ):
        fields |= typing.get_type_hints(params).keys()
    assert {"system", "thinking", "tool_choice", "context_management"} <= fields
    assert sorted(fields - TABLE.keys()) == []


def test_the_rules_on_values_that_clients_send() -> None:
    request = parse(
        temperature=0,
        top_k=3,
        stop_sequences=["x"],
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high", "format": None},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        service_tier="auto",
        mcp_servers=[],
        container=None,
        foo=1,
    )
    assert request.pinned == (
        "temperature",
        "top_k",
        "stop_sequences",
        "thinking",
        "context_management",
        "output_config.effort",
    )
    assert request.ignored == ("foo",)
    assert request.max_tokens == 64


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"model": 3}, "model"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": 3}, "output_config"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [3]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "so"}]}, "messages.1.role"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"tools": [ADD, ADD | {"defer_loading": True}]}, "tools.1.defer_loading"),
        ({"tools": [ADD | {"allowed_callers": ["x"]}]}, "tools.0.allowed_callers"),
        ({"tools": [ADD | {"name": 3}]}, "tools.0.name"),
        ({"tools": [ADD | {"description": 3}]}, "tools.0.description"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(body: dict[str, Any], param: str) -> None:
    found = refusal(**body)
    assert found.param == param
    assert param.rpartition(".")[2] in found.message or param in found.message


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "search_result", "content": []},
        {"type": "container_upload", "file_id": "f"},
        {"type": "tool_use", "id": "c", "name": "n", "input": {}},
        {"type": "something_new"},
        {"type": None},
        {},
    ],
)
def test_a_block_that_is_no_text_is_refused_wherever_it_stands(block: dict[str, Any]) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "see"}, block]}
    assert refusal(messages=[user]).param == "messages.0.content.1"
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    turn = {"role": "assistant", "content": [USE]}
    found = refusal(messages=[HI, turn, {"role": "user", "content": [result]}])
    assert found.param == "messages.2.content.0.content.0"
    assert "text only" in found.message


def test_server_tools_in_a_history_are_refused() -> None:
    turn = {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "input": {}}]}
    assert refusal(messages=[HI, turn, HI]).param == "messages.1.content.0"


@pytest.mark.parametrize(
    ("block", "path"),
    [
        ({"type": "tool_use", "id": 3, "name": "n", "input": {}}, "id"),
        ({"type": "tool_use", "id": "c", "input": {}}, "name"),
        ({"type": "tool_use", "id": "c", "name": "n", "input": [1]}, "input"),
        ({"type": "tool_use", "id": "c", "name": "n", "input": "{}"}, "input"),
        ({"type": "thinking"}, "thinking"),
    ],
)
def test_a_turn_without_its_parts_is_refused(block: dict[str, Any], path: str) -> None:
    found = refusal(messages=[HI, {"role": "assistant", "content": [block]}, HI])
    assert found.param == f"messages.1.content.0.{path}"


def test_a_tool_result_without_an_id_is_refused() -> None:
    user = {"role": "user", "content": [{"type": "tool_result", "content": "x"}]}
    assert refusal(messages=[user]).param == "messages.0.content.0.tool_use_id"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, None),
        ("", None),
        ([], None),
        ("be kind", "be kind"),
        ([{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}], "be kind"),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
                {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
            ],
            "be kind",
        ),
        ("x-anthropic-billing-header: cch=1a2b3;\nbe kind", "be kind"),
        ("say x-anthropic-billing-header: no", "say x-anthropic-billing-header: no"),
    ],
)
def test_system_is_one_message_without_what_is_not_for_a_model(
    system: Any, expected: str | None
) -> None:
    found = parse(system=system).messages
    assert found[-1] == HI
    assert found[:-1] == ([] if expected is None else [{"role": "system", "content": expected}])


def test_text_and_blocks_of_it_are_one() -> None:
    block = {
        "type": "text",
        "text": "hi",
        "cache_control": {"type": "ephemeral"},
        "citations": None,
    }
    assert messages({"role": "user", "content": [block]}) == messages(HI)


def test_results_stand_before_the_text_of_their_user_messages() -> None:
    found = messages(
        HI,
        {"role": "assistant", "content": [USE, USE | {"id": "c2"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "two", "is_error": True},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}],
                },
            ],
        },
        {"role": "user", "content": "go on"},
    )
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "user", "content": "<reminder>"},
        {"role": "user", "content": "go on"},
    ]


def test_a_result_without_content_and_a_user_without_text_are_empty() -> None:
    found = messages(
        {"role": "user", "content": []},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
    )
    assert found[0] == {"role": "user", "content": ""}
    assert found[2:] == [{"role": "tool", "tool_call_id": "c1", "content": ""}]


def test_a_turn_in_several_messages_is_one() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    whole = [thinking, hidden, {"type": "text", "text": "so"}, USE]
    together = messages(HI, {"role": "assistant", "content": whole}, HI)
    apart = messages(HI, *({"role": "assistant", "content": [block]} for block in whole), HI)
    assert together == apart
    assert together[1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a":1}'},
            }
        ],
    }


def test_a_system_message_among_the_others_stays_where_it_is() -> None:
    late = {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    assert messages(HI, late, HI)[1] == {"role": "system", "content": "be kind"}
    turn = {"role": "assistant", "content": "a"}
    assert [one["role"] for one in messages(HI, turn, late, turn, HI)] == [
        "user",
        "assistant",
        "system",
        "assistant",
        "user",
    ]


def test_no_message_depends_on_what_follows_it_behind_a_turn() -> None:
    turn = {"role": "assistant", "content": [USE]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
    history = [HI, turn, {"role": "user", "content": [result]}]
    longer = [*history, turn, {"role": "user", "content": [result, {"type": "text", "text": "x"}]}]
    assert messages(*longer)[: len(messages(*history))] == messages(*history)


def test_tools_are_functions_with_what_the_model_reads() -> None:
    given_tool = ADD | {
        "type": "custom",
        "strict": True,
        "cache_control": {"type": "ephemeral"},
        "input_examples": [{"a": 1}],
        "eager_input_streaming": True,
        "allowed_callers": ["direct"],
        "defer_loading": False,
    }
    request = parse(tools=[given_tool, {"name": "bare", "input_schema": {"type": "object"}}])
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": ADD["input_schema"],
            },
        },
        {"type": "function", "function": {"name": "bare", "parameters": {"type": "object"}}},
    ]
    assert request.pinned == ("tools.strict",)
    assert parse(tools=[]).tools is None


@pytest.mark.parametrize(
    ("choice", "rule", "most"),
    [
        (None, CallRule.AUTO, None),
        ({"type": "auto"}, CallRule.AUTO, None),
        ({"type": "auto", "disable_parallel_tool_use": False}, CallRule.AUTO, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, CallRule.AUTO, 1),
        ({"type": "none"}, CallRule.NONE, None),
    ],
)
def test_tool_choice(choice: Any, rule: CallRule, most: int | None) -> None:
    request = parse(tools=[ADD], tool_choice=choice)
    assert (request.call_rule, request.max_calls) == (rule, most)


def test_headers_of_retries_are_read() -> None:
    request = parse({"x-stainless-retry-count": "2", "idempotency-key": "k"})
    assert (request.retry, request.retry_key) == (2, "k")


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (a_reply("so"), "end_turn", None),
        (a_reply("so", finish=Finish.LENGTH), "max_tokens", None),
        (a_reply("so", finish=Finish.ABORT), "max_tokens", None),
        (a_reply("so", stop_text="END"), "stop_sequence", "END"),
        (a_reply(""), "end_turn", None),
        (a_reply(AssistantMessage("so", None, [ToolCall("c", "a", {})])), "tool_use", None),
    ],
)
def test_why_a_reply_ended(reply: Any, reason: str, sequence: str | None) -> None:
    body = dialect.reply(a_request(), reply)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_a_reply_says_what_was_read_from_the_cache() -> None:
    body = dialect.reply(a_request(), a_reply("so", num_reasoning=4))
    assert body["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 32,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 4},
    }
    unknown = dialect.reply(a_request(), a_reply("so"))["usage"]
    assert "output_tokens_details" not in unknown
    assert body["id"] == "msg_" + "0f" * 16
    assert body["model"] == "m"


def test_a_stream_has_its_blocks_one_after_the_other() -> None:
    parsed = AssistantMessage(
        content="so",
        reasoning="hm",
        tool_calls=[ToolCall("c1", "a", {}), ToolCall("c2", "b", {"x": 1})],
    )
    reply = a_reply(parsed)
    streamer = dialect.streamer(a_request(), reply.id, 0.0)
    events = stream_events(streamer, deltas_of(reply.message, (1,), late_content=True), reply)
    told = [
        (name, data.get("index"), data.get("delta", data.get("content_block", {})).get("type"))
        for name, data in events
        if isinstance(data, dict)
    ]
    assert told == [
        ("message_start", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("ping", None, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use"),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


ASKED: Any = [{"role": "user", "content": "hi"}]
WIRE = Wire(httpx2.Response)
CLIENT = anthropic.Anthropic(
    api_key="k",
    base_url="http://gateway",
    max_retries=0,
    http_client=httpx2.Client(transport=httpx2.MockTransport(WIRE)),
)


def whole(reply: Any) -> anthropic.types.Message:
    WIRE.answer(dialect.reply(a_request(), reply))
    return CLIENT.messages.create(model="m", max_tokens=9, messages=ASKED)


def streamed(reply: Any, deltas: list[dict[str, Any]]) -> anthropic.types.Message:
    WIRE.stream(stream_events(dialect.streamer(a_request(), reply.id, 0.0), deltas, reply))
    with CLIENT.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
        return stream.get_final_message()


def echoed(said: anthropic.types.Message, **changes: Any) -> Message:
    """Return what the SDK's echo of a reply is in our form."""
    WIRE.answer(dialect.reply(a_request(), a_reply("next")))
    turn = {"role": said.role, "content": list(said.content)} | changes
    user = {"role": "user", "content": "go on"}
    history: Any = [user, turn, user]
    CLIENT.messages.create(model="m", max_tokens=9, messages=history)
    found = dialect.parse(WIRE.bodies[-1], WIRE.headers[-1]).messages
    WIRE.bodies.clear()
    WIRE.headers.clear()
    assert len(found) == 3
    return found[1]


@settings(max_examples=60, deadline=None)
@given(parsed_replies(), st.lists(st.integers(0, 99), max_size=4), st.booleans(), st.booleans())
def test_every_way_of_telling_a_reply_agrees_and_comes_back_as_the_stored_message(
    parsed: AssistantMessage, places: list[int], late: bool, single: bool
) -> None:
    reply = a_reply(parsed, max_calls=1 if single else None)
    said = whole(reply)
    grown = streamed(reply, deltas_of(reply.message, places, late))
    assert grown.to_dict() == said.to_dict()
    assert rendered(reply.message, echoed(said))
    assert rendered(reply.message, echoed(grown))
    left_out = [block for block in said.content if block.type != "thinking"]
    assert rendered(reply.message, echoed(said, content=left_out))
    if left_out != said.content:
        changed = [*left_out, {"type": "thinking", "thinking": "other", "signature": "s"}]
        assert rendered(reply.message, echoed(said, content=changed)) == (
            reply.message["reasoning_content"] == "other"
        )


@settings(max_examples=40, deadline=None)
@given(grown_replies())
def test_a_reply_that_grew_comes_back_as_the_stored_message(
    grown: tuple[Message, list[dict[str, Any]]],
) -> None:
    reply = a_reply(grown[0])
    said = streamed(reply, grown[1])
    assert rendered(reply.message, echoed(said))
    content = "".join(one.text for one in said.content if one.type == "text")
    assert content == reply.message["content"]


def test_thinking_behind_text_is_a_block_where_it_came_with_its_own_signature() -> None:
    reply = a_reply(AssistantMessage("ac", "bb", []))
    pieces = [("content", "a"), ("reasoning_content", "b"), ("content", "c")]
    said = streamed(reply, [{name: text} for name, text in [*pieces, pieces[1]]])
    assert [block.type for block in said.content] == ["text", "thinking", "text", "thinking"]
    seals = [block.signature for block in said.content if block.type == "thinking"]
    alone = whole(a_reply(AssistantMessage("", "b", []))).content[0]
    assert alone.type == "thinking"
    assert seals == [alone.signature] * 2
    assert rendered(reply.message, echoed(said))


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_errors_are_the_sdks_exceptions(kind: ErrorKind) -> None:
    WIRE.answer(dialect.error(Refusal(kind, "what and why", param="p")), STATUS[kind])
    with pytest.raises(anthropic.APIStatusError) as caught:
        CLIENT.messages.create(model="m", max_tokens=9, messages=ASKED)
    expected = {
        ErrorKind.INVALID: anthropic.BadRequestError,
        ErrorKind.TOO_LONG: anthropic.BadRequestError,
        ErrorKind.NOT_FOUND: anthropic.NotFoundError,
        ErrorKind.CONFLICT: anthropic.ConflictError,
        ErrorKind.BUSY: anthropic.RateLimitError,
        ErrorKind.ENGINE: anthropic.InternalServerError,
        ErrorKind.INTERNAL: anthropic.InternalServerError,
    }
    assert isinstance(caught.value, expected.get(kind, anthropic.APIStatusError))
    assert caught.value.status_code == STATUS[kind]
    assert "what and why" in str(caught.value.api_message)


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for() -> None:
    body = dialect.error(Refusal(ErrorKind.TOO_LONG, "9 tokens, at most 8"))
    assert body["error"]["message"] == "prompt is too long: 9 tokens, at most 8"
    again = dialect.error(Refusal(ErrorKind.TOO_LONG, body["error"]["message"]))
    assert again == body


def test_a_stream_that_breaks_raises_in_the_sdk() -> None:
    streamer = dialect.streamer(a_request(), "0" * 32, 0.0)
    events = [*streamer.begin(), *streamer.delta({"content": "so"})]
    WIRE.stream([*events, *streamer.error(Refusal(ErrorKind.ENGINE, "gone"))])
    with (
        CLIENT.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream,
        pytest.raises(anthropic.APIStatusError, match="gone"),
    ):
        stream.until_done()


ALL_OF_IT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "1"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [ADD],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
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


async def test_count_answers_with_the_tokens_that_the_session_counts() -> None:
    class Session:
        async def count(self, request: ChatRequest) -> int:
            assert request.tools is not None
            return 10 * len(request.messages)

    body = {"model": "m", "system": "s", "messages": [HI], "tools": [ADD]}
    assert await dialect.count(Session(), body) == {"input_tokens": 20}


def test_what_it_cannot_carry_is_said_of_every_refused_and_pinned_kind() -> None:
    said = " ".join([*dialect.cannot_carry, *dialect.cannot_carry.values()])
    for name in ("thinking", "context_management", "is_error", "tool_choice", "prefill"):
        assert name in said
    assert TABLE["thinking"].fate is Fate.PINNED
