"""Chat completions without a server: what is read, what is refused and how, what is written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as params

from worker.gateway.dialects import rules
from worker.gateway.dialects.openai_chat import FIELDS, OpenAIChat
from worker.gateway.types import CallRule, ChatReply, ChatRequest, ErrorKind, Refusal

CHAT = OpenAIChat()
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"x":1}'}}


def read(*messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": list(messages) or [HI], **fields}
    return CHAT.parse(body, headers or {})


def refusal_of(*messages: Any, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(*messages, **fields)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


def a_reply(**changes: Any) -> ChatReply:
    known: dict[str, Any] = {
        "id": "f" * 32,
        "message": {"role": "assistant", "content": "hello"},
        "finish": "stop",
        "ids": np.array([31, 32, 2], dtype=np.int32),
        "log_probs": np.array([-0.5, -0.25, -0.125], dtype=np.float32),
        "pieces": ["he", "llo", "<|im_end|>"],
        "num_prompt": 10,
        "num_cached": 4,
        "created_unix_s": 1_700_000_000.9,
    }
    return ChatReply(**(known | changes))


# What becomes of a field.


def test_every_field_of_the_sdk_has_a_rule() -> None:
    known = {
        *params.CompletionCreateParamsBase.__annotations__,
        *params.CompletionCreateParamsStreaming.__annotations__,
        *params.CompletionCreateParamsNonStreaming.__annotations__,
    }
    assert len(known) > 30
    assert sorted(known - set(FIELDS)) == []


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_field_that_is_null_is_absent(name: str) -> None:
    if name != "messages":
        assert read(**{name: None}) == read(**({"model": None} if name == "model" else {}))


@pytest.mark.parametrize("name", sorted(rules.names_of(FIELDS, rules.Fate.REFUSED)))
def test_a_refused_field_says_its_name_and_what_to_do(name: str) -> None:
    refusal = refusal_of(**{name: {"type": "surely nothing"}})
    assert refusal.param == name
    assert refusal.message.startswith(f"{name} ")
    assert FIELDS[name].note in refusal.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1), ("best_of", 1), ("response_format", {"type": "text"}), ("top_logprobs", 0),
        ("chat_template_kwargs", {}), ("modalities", ["text"]), ("echo", False),
        ("add_generation_prompt", True), ("guided_json", ""), ("return_token_ids", False),
    ],
)  # fmt: skip
def test_a_refused_field_may_ask_for_what_happens_anyway(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("best_of", 2), ("top_logprobs", 5),
        ("response_format", {"type": "json_object"}), ("response_format", "text"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("chat_template_kwargs", {"enable_thinking": False}), ("chat_template_kwargs", [1]),
        ("modalities", ["text", "audio"]), ("input_ids", [1]), ("prompt_token_ids", []),
        ("prediction", {"type": "content", "content": "x"}), ("functions", [{"name": "f"}]),
        ("function_call", "auto"), ("audio", {"voice": "x"}), ("guided_choice", ["a"]),
    ],
)  # fmt: skip
def test_121_133_136_what_would_change_prompt_or_reply_is_refused(name: str, value: Any) -> None:
    assert refusal_of(**{name: value}).param == name


def test_case_122_sampling_is_accepted_pinned_and_named() -> None:
    request = read(
        temperature=0, top_p=0.1, seed=1, stop=["x"], logit_bias={"1": 2}, top_k=3, max_tokens=4096,
        reasoning_effort="low", presence_penalty=None,
    )  # fmt: skip
    assert request.pinned == (
        "temperature", "top_p", "seed", "stop", "logit_bias", "top_k", "reasoning_effort",
    )  # fmt: skip
    assert request.max_tokens == 4096
    assert read(logit_bias={}, stop=[]).pinned == ()


def test_case_136_unknown_fields_are_ignored_and_named_within_bounds() -> None:
    assert read(foo=1, metadata={}, user="me").ignored == ("foo",)
    many = read(**{f"x{n}" + "y" * 1000: n for n in range(1000)})
    assert len(many.ignored) == rules.MAX_IGNORED
    assert max(map(len, many.ignored)) <= 64


def test_case_124_the_newer_cap_wins_and_must_be_a_positive_whole_number() -> None:
    assert read(max_completion_tokens=5).max_tokens == 5
    assert read(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert read(max_tokens=9).max_tokens == 9
    assert read(max_tokens=9.0).max_tokens == 9
    assert read(max_completion_tokens=None, max_tokens=9).max_tokens == 9
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, True, "5", 1.5, float("inf"), float("nan"), [1]):
            assert refusal_of(**{name: value}).param == name
    assert refusal_of(max_completion_tokens=5, max_tokens=0).param == "max_tokens"


def test_case_134_a_forced_call_is_refused_and_none_keeps_calls_as_text() -> None:
    assert read(tool_choice="auto", tools=[TOOL]).call_rule is CallRule.AUTO
    assert read(tool_choice="none", tools=[TOOL]).call_rule is CallRule.NONE
    named = {"type": "function", "function": {"name": "a"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    for choice in ("required", named, allowed, "any", 1, []):
        assert refusal_of(tool_choice=choice, tools=[TOOL]).param == "tool_choice"


def test_parallel_calls_off_is_one_call() -> None:
    assert read().max_calls is None
    assert read(parallel_tool_calls=True).max_calls is None
    assert read(parallel_tool_calls=False).max_calls == 1
    assert refusal_of(parallel_tool_calls="no").param == "parallel_tool_calls"


def test_stream_usage_and_log_probs_are_read() -> None:
    request = read(stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert request.stream
    assert request.log_probs
    assert request.extra["include_usage"] is True
    assert read(stream=True, stream_options={}).extra["include_usage"] is False
    assert read(stream_options={"include_usage": True}).extra["include_usage"] is False
    for name, value in (("stream", 1), ("logprobs", 5), ("stream_options", True), ("model", 7)):
        assert refusal_of(**{"stream": True, name: value}).param == name


def test_retries_are_read_from_headers() -> None:
    headers = {"x-stainless-retry-count": "2", "idempotency-key": "k" * 1000}
    request = read(headers=headers)
    assert request.retry == 2
    assert request.retry_key == "k" * rules.MAX_KEY_CHARS
    for count in ("", "-1", "x", "\u0662", "9" * 5000):
        assert read(headers={"x-stainless-retry-count": count}).retry == 0


# Tools.


def test_case_21_tools_stay_as_given_and_flat_ones_get_their_function() -> None:
    swapped = {"type": "function", "function": {"parameters": {}, "name": "b", "description": "d"}}
    request = read(tools=[TOOL, swapped])
    assert json.dumps(request.tools) == json.dumps([TOOL, swapped])  # the order of keys too
    flat = {"type": "function", "name": "a", "parameters": {}, "strict": True}
    assert read(tools=[flat]).tools == [
        {"type": "function", "function": {"name": "a", "parameters": {}, "strict": True}}
    ]
    assert read(tools=[{"function": {"name": "a"}}]).tools == [
        {"type": "function", "function": {"name": "a"}}
    ]


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    assert read(tools=[]) == read(tools=None) == read()


def test_strict_tools_are_said_not_to_be_enforced() -> None:
    strict = {"type": "function", "function": {"name": "a", "strict": True}}
    assert read(tools=[TOOL, strict]).pinned == ("strict",)
    assert read(tools=[TOOL]).pinned == ()


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}, "calc", None,
        {"type": "function"}, {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": 3}}, {"type": "function", "function": "calc"},
        {"type": "function", "function": {"name": "x", "parameters": []}}, {"type": ["function"]},
    ],
)  # fmt: skip
def test_a_tool_that_is_no_function_is_refused_with_its_index(tool: Any) -> None:
    refusal = refusal_of(tools=[TOOL, tool])
    assert refusal.param.startswith("tools[1]")
    assert refusal.message.startswith("tools[1]")
    assert refusal_of(tools={"a": 1}).param == "tools"


# Messages.


def test_messages_keep_what_is_read_and_drop_the_rest() -> None:
    echoed = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [CALL], "provider_specific_fields": {"a": 1},
        "name": "bot",
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok", "name": "calc", "x": 1}
    request = read({"role": "developer", "content": "be"}, HI, echoed, result)
    assert request.messages == [
        {"role": "developer", "content": "be"},
        HI,
        {"role": "assistant", "content": "", "name": "bot", "tool_calls": [CALL]},
        {"role": "tool", "content": "ok", "name": "calc", "tool_call_id": "c1"},
    ]


def test_case_15_24_null_absent_and_empty_calls_are_a_plain_turn() -> None:
    for turn in ({"content": None}, {}, {"content": "", "tool_calls": []}, {"tool_calls": None}):
        assert read(HI, {"role": "assistant", **turn}).messages[1] == {
            "role": "assistant", "content": "",
        }  # fmt: skip


def test_case_17_arguments_of_any_kind_are_left_to_the_template() -> None:
    for arguments in ({"arguments": "null"}, {"arguments": "{bad"}, {"arguments": [1]}, {}):
        call = {"id": "c1", "type": "function", "function": {"name": "f", **arguments}}
        assert read(HI, {"role": "assistant", "tool_calls": [call]}).messages[1]["tool_calls"] == [
            call
        ]


def test_case_23_text_parts_are_kept_and_refusals_are_text() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert read({"role": "user", "content": parts}).messages[0]["content"] == [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert read(HI, refused).messages[1]["content"] == [{"type": "text", "text": "no"}]
    assert read(HI, {"role": "assistant", "refusal": "no"}).messages[1]["content"] == "no"


def test_case_130_reasoning_comes_back_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "x", name: "why"}
        assert read(HI, message).messages[1]["reasoning_content"] == "why"
    both = {"role": "assistant", "content": "x", "reasoning_content": "a", "reasoning": "b"}
    assert read(HI, both).messages[1] == {
        "role": "assistant", "content": "x", "reasoning_content": "a",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", ""), (None, ""), ({}, ".role"), ({"role": "bot", "content": "x"}, ".role"),
        ({"role": ["user"], "content": "x"}, ".role"),
        ({"role": "function", "name": "f", "content": "x"}, ".role"),
        ({"role": "user"}, ".content"), ({"role": "user", "content": None}, ".content"),
        ({"role": "tool", "tool_call_id": "c"}, ".content"),
        ({"role": "user", "content": 3}, ".content"), ({"role": "user", "content": {}}, ".content"),
        ({"role": "user", "content": ["hi"]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "file"}]}, ".content[0]"),
        ({"role": "user", "content": "x", "name": 1}, ".name"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, ".tool_call_id"),
        ({"role": "assistant", "reasoning": {}}, ".reasoning"),
        ({"role": "assistant", "refusal": {"a": 1}}, ".refusal"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call"),
        ({"role": "assistant", "audio": {"id": "a"}}, ".audio"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, ".tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 4}]}, ".tool_calls[0].id"),
        (
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": None}}]},
            ".tool_calls[1].function.name",
        ),
    ],
)  # fmt: skip
def test_a_message_without_a_text_form_is_refused_where_it_stands(message: Any, param: str) -> None:
    refusal = refusal_of(HI, message)
    assert refusal.param == f"messages[1]{param}"
    assert refusal.message.startswith(f"messages[1]{param} ")
    assert len(refusal.message) < 400


def test_no_messages_are_refused() -> None:
    for messages in ([], None, "hi", {"role": "user"}):
        with pytest.raises(Refusal, match="messages: a list"):
            CHAT.parse({"messages": messages}, {})


def test_huge_values_make_short_errors() -> None:
    huge = "x" * 1_000_000
    for fields in ({"n": huge}, {"tool_choice": huge}, {"max_tokens": huge}, {"tools": [huge]}):
        assert len(refusal_of(**fields).message) < 400
    assert len(refusal_of({"role": huge, "content": huge}).message) < 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["user", "assistant", "tool", "function", "text", "auto", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            "role content type text name arguments id function tool_calls tool_call_id refusal "
            "reasoning parameters include_usage".split()
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


ROLE = st.sampled_from(["user", "assistant", "tool", "system", "developer"])
MESSAGE = st.builds(
    lambda role, content, more: {"role": role, "content": content} | more,
    ROLE,
    st.just("hi") | JSON,
    st.dictionaries(st.sampled_from(["name", "tool_calls", "tool_call_id", "reasoning"]), JSON),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(MESSAGE, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=4), JSON, max_size=4),
)
def test_whatever_a_body_holds_it_is_read_or_refused_with_a_field(
    messages: list[Any], fields: dict[str, Any]
) -> None:
    found = None
    try:
        request = CHAT.parse({"messages": messages} | fields, {})
    except Refusal as refusal:
        found = refusal
    if found is not None:
        assert found.kind is ErrorKind.INVALID
        assert found.param
        assert found.message.startswith(found.param)
        return
    for message in request.messages:
        assert message["role"] in ("user", "assistant", "tool", "system", "developer")
        parts = message["content"]
        texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
        assert all(isinstance(text, str) for text in texts)
        assert all(
            isinstance(call["function"]["name"], str) for call in message.get("tool_calls", ())
        )


# Replies.


def test_a_reply_is_what_the_sdk_reads() -> None:
    reply = CHAT.reply(read(), a_reply())
    read_back = ChatCompletion.model_validate(reply)
    assert read_back.id == "chatcmpl-" + "f" * 32
    assert read_back.created == 1_700_000_000
    assert read_back.model == "m"
    choice = read_back.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.content == "hello"
    assert reply["choices"][0]["message"]["refusal"] is None
    assert "tool_calls" not in reply["choices"][0]["message"]
    usage = read_back.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_content_is_null_only_beside_calls() -> None:
    def content(**message: Any) -> Any:
        reply = CHAT.reply(read(), a_reply(message={"role": "assistant", **message}))
        return reply["choices"][0]["message"]["content"]

    assert content(content="", tool_calls=[CALL]) is None
    assert content(content="see", tool_calls=[CALL]) == "see"
    assert content(content="") == ""
    assert content(content="", reasoning_content="why") == ""


def test_the_stored_message_is_not_changed_by_telling_it() -> None:
    stored = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "w"}
    before = json.dumps(stored)
    CHAT.reply(read(), a_reply(message=stored))
    chunks(a_reply(message=stored), [])
    assert json.dumps(stored) == before


def test_case_11_log_probs_are_told_for_every_id_with_its_bytes() -> None:
    reply = a_reply(
        ids=np.array([1240, 1159, 1153, 1130, 2], dtype=np.int32),
        log_probs=np.array([-1, -2, -3, -4, -0.5], dtype=np.float32),
        pieces=["\udcf0", "\udc9f", "\udc99", "\udc82", "<|im_end|>"],
        message={"role": "assistant", "content": "🙂"},
    )
    told = CHAT.reply(read(logprobs=True), reply)
    entries = told["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["\ufffd"] * 4 + ["<|im_end|>"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:4]).decode() == "🙂"
    assert [entry["logprob"] for entry in entries] == [-1, -2, -3, -4, -0.5]
    assert {str(entry["top_logprobs"]) for entry in entries} == {"[]"}
    json.dumps(told, ensure_ascii=False).encode()  # has a UTF-8 form
    ChatCompletion.model_validate(told)


# Streams.


def chunks(reply: ChatReply, deltas: list[dict[str, Any]], **fields: Any) -> list[Any]:
    """Return the data of a whole stream."""
    writer = CHAT.streamer(read(stream=True, **fields), reply.id, reply.created_unix_s)
    events = writer.begin()
    for delta in deltas:
        events += writer.delta(delta)
    events += writer.end(reply)
    assert {name for name, _ in events} == {""}
    return [data for _, data in events]


def test_a_stream_is_role_deltas_finish_and_done() -> None:
    deltas = [{"content": "he"}, {"content": "llo"}]
    *told, done = chunks(a_reply(), deltas)
    assert done == "[DONE]"
    for chunk in told:
        ChatCompletionChunk.model_validate(chunk)
        assert "usage" not in chunk
    assert {chunk["id"] for chunk in told} == {"chatcmpl-" + "f" * 32}
    assert {chunk["created"] for chunk in told} == {1_700_000_000}
    choices = [chunk["choices"][0] for chunk in told]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": None, "refusal": None}, *deltas, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert {choice["logprobs"] for choice in choices} == {None}


def test_a_stream_ends_with_usage_where_it_was_asked_for() -> None:
    *told, usage, done = chunks(a_reply(), [], stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == CHAT.reply(read(), a_reply())["usage"]
    assert {chunk["usage"] for chunk in told} == {None}
    ChatCompletionChunk.model_validate(usage)


def test_a_stream_tells_log_probs_in_chunks_before_its_finish() -> None:
    length = 600
    reply = a_reply(
        ids=np.arange(length, dtype=np.int32),
        log_probs=-np.arange(length, dtype=np.float32),
        pieces=["x"] * length,
    )
    *told, finish, _ = chunks(reply, [{"content": "x" * length}], logprobs=True)
    assert finish["choices"][0]["finish_reason"] == "stop"
    with_log_probs = [c["choices"][0] for c in told if c["choices"][0]["logprobs"]]
    assert [len(choice["logprobs"]["content"]) for choice in with_log_probs] == [256, 256, 88]
    assert {str(choice["delta"]) for choice in with_log_probs} == {"{}"}
    entries = [entry for choice in with_log_probs for entry in choice["logprobs"]["content"]]
    whole = CHAT.reply(read(logprobs=True), reply)["choices"][0]["logprobs"]["content"]
    assert entries == whole


def test_a_stream_without_content_says_the_same_as_the_reply() -> None:
    def content(deltas: list[dict[str, Any]], **message: Any) -> Any:
        reply = a_reply(message={"role": "assistant", "content": "", **message})
        told = [d["choices"][0]["delta"] for d in chunks(reply, deltas)[:-1]]
        texts = [delta["content"] for delta in told if delta.get("content") is not None]
        whole = CHAT.reply(read(), reply)["choices"][0]["message"]["content"]
        assert ("".join(texts) if texts else None) == whole
        return whole

    entry = {"index": 0, **CALL}
    assert content([{"tool_calls": [entry]}], tool_calls=[CALL]) is None
    assert content([]) == ""
    assert content([{"reasoning_content": "why"}], reasoning_content="why") == ""


def test_a_stream_that_breaks_says_so_and_is_not_done() -> None:
    writer = CHAT.streamer(read(stream=True), "f" * 32, 0.0)
    refusal = Refusal(ErrorKind.ENGINE, "no engine")
    assert writer.error(refusal) == [("", CHAT.error(refusal))]
    assert writer.ping() is None


# Errors.


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_error_has_the_apis_shape(kind: ErrorKind) -> None:
    error = CHAT.error(Refusal(kind, "why"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "why"
    assert error["param"] is None
    assert error["type"]
    assert error["code"]
    assert CHAT.error(Refusal(kind, "why", param="n"))["error"]["param"] == "n"


def test_a_context_that_is_full_has_the_code_that_clients_look_for() -> None:
    error = CHAT.error(Refusal(ErrorKind.TOO_LONG, "full"))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
