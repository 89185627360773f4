"""The message that a client gets of a parsed reply, and the word that it ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import toy
from worker.gateway.reply import call_rule, finish_word, reply_message
from worker.gateway.types import CallRule, ChatRequest
from worker.tito.calls import judge_call
from worker.tito.ids import as_ids
from worker.tito.messages import MAX_DEPTH, normalize_messages
from worker.types import AssistantMessage, Finish, ToolCall

TOOLS = [{"type": "function", "function": {"name": "a"}}]


def call(name: str, **arguments: Any) -> ToolCall:
    raw = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    found = judge_call(raw, closed=True)
    assert found.problem is None
    return found


BROKEN = judge_call('{"name":"x"', closed=True)
UNCLOSED = judge_call('{"name":"y","arguments":{}}', closed=False)


def message(*calls: ToolCall, content: str = "I look.", **options: Any) -> dict[str, Any]:
    return reply_message(AssistantMessage(content, "hm", list(calls)), **options)


def names(of: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in of.get("tool_calls", ())]


def test_a_reply_is_role_content_reasoning_and_calls() -> None:
    good = call("a", text="né\n", n=1.5)
    assert message(good) == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": good.id,
                "type": "function",
                "function": {"name": "a", "arguments": '{"text":"né\\n","n":1.5}'},
            }
        ],
    }
    assert reply_message(AssistantMessage("", None, [])) == {"role": "assistant", "content": ""}
    assert reply_message(AssistantMessage("x", "", [])) == {"role": "assistant", "content": "x"}


def test_malformed_calls_are_content_in_order_and_the_good_ones_stay_calls() -> None:
    mixed = message(call("a"), BROKEN, call("b"), UNCLOSED)
    assert mixed["content"] == f"I look.\n{BROKEN.raw}\n{UNCLOSED.raw}"
    assert names(mixed) == ["a", "b"]
    assert message(BROKEN, content="")["content"] == BROKEN.raw
    assert "tool_calls" not in message(BROKEN)


def test_calls_beyond_the_limit_are_content_and_malformed_ones_do_not_count() -> None:
    first, second, third = call("a"), call("b"), call("c")
    limited = message(BROKEN, first, second, third, max_calls=1)
    assert names(limited) == ["a"]
    assert limited["content"] == f"I look.\n{BROKEN.raw}\n{second.raw}\n{third.raw}"
    assert names(message(first, second, max_calls=2)) == ["a", "b"]
    assert names(message(first, second, max_calls=None)) == ["a", "b"]


def test_case_134_without_calls_they_are_text_and_nothing_is_lost() -> None:
    first, second = call("a"), call("b")
    none = message(first, BROKEN, second, rule=CallRule.NONE)
    assert "tool_calls" not in none
    assert none["content"] == f"I look.\n{first.raw}\n{BROKEN.raw}\n{second.raw}"


def test_case_28_arguments_in_strings_are_encoded_once() -> None:
    raw = '{"name":"open","arguments":"\\"{\\\\\\"url\\\\\\":\\\\\\"http://x.test\\\\\\"}\\""}'
    [entry] = message(judge_call(raw, closed=True))["tool_calls"]
    assert entry["function"]["arguments"] == '{"url":"http://x.test"}'


@pytest.mark.parametrize("text", ["<tool_call>{}</tool_call>", "<tool_call>{bad", "<tool_call>"])
def test_case_29_half_a_call_is_text_that_never_raises(text: str) -> None:
    renderer = toy.toy_renderer()
    parsed = renderer.parse(renderer.encode_raw(f"hi {text}<|im_end|>"), as_ids(toy.P0))
    found = reply_message(parsed)
    assert "tool_calls" not in found
    assert found["content"].startswith("hi")
    json.dumps(found)


@pytest.mark.parametrize(
    ("rule", "tools", "is_cut", "becomes"),
    [
        (CallRule.AUTO, TOOLS, False, CallRule.AUTO),
        (CallRule.NONE, TOOLS, False, CallRule.NONE),
        (CallRule.AUTO, None, False, CallRule.NONE),
        (CallRule.AUTO, [], False, CallRule.NONE),
        (CallRule.AUTO, TOOLS, True, CallRule.NONE),
    ],
    ids=["offered", "none", "no tools", "empty tools", "cut"],
)
def test_case_41_42_calls_are_given_out_only_of_whole_replies_to_whom_tools_were_offered(
    rule: CallRule, tools: Any, is_cut: bool, becomes: CallRule
) -> None:
    request = ChatRequest([], tools=tools, call_rule=rule)
    assert call_rule(request, is_cut=is_cut) is becomes


def test_case_41_a_cut_is_told_as_length_whatever_the_message_holds() -> None:
    with_calls, without = message(call("a")), message(BROKEN)
    assert finish_word(Finish.STOP, with_calls) == "tool_calls"
    assert finish_word(Finish.STOP, without) == "stop"
    for finish in (Finish.LENGTH, Finish.ABORT):
        assert finish_word(finish, with_calls) == finish_word(finish, without) == "length"


def test_what_utf_8_or_a_template_cannot_say_is_never_sent_as_a_call() -> None:
    half = judge_call('{"name":"f","arguments":{"a":"\\udc00"}}', closed=True)
    assert message(half, content="") == {
        "role": "assistant", "content": half.raw, "reasoning_content": "hm",
    }  # fmt: skip
    for levels, is_call in ((MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False), (900, False)):
        raw = '{"name":"f","arguments":{"a":' + "[" * levels + "]" * levels + "}}"
        deep = judge_call(raw, closed=True)
        assert deep.problem is None
        found = message(deep, content="")
        assert ("tool_calls" in found, found["content"]) == (is_call, "" if is_call else raw)
        if is_call:
            normalize_messages([found], toy.toy_tokenizer())
