"""A conversation that comes back: echoed turns, and results in another order than the calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from worker.tito.history import difference, first_difference, order_tool_results


def call(arguments: Any = '{"b":1, "a":2}', **fields: Any) -> dict[str, Any]:
    """Return a call as a client sends it."""
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | (
        fields
    )


def turn(*calls: dict[str, Any], content: Any = None, **fields: Any) -> dict[str, Any]:
    """Return an assistant turn."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)} | fields


@pytest.mark.parametrize(
    "echoed",
    [
        turn(call('{"a":2,"b":1}')),
        turn(call('{ "a": 2.0,\n "b": 1 }')),
        turn(call({"b": 1, "a": 2})),
        turn(call(), content=""),
        turn(call(), content=[]),
        turn(call(), refusal=None, audio=None, annotations=[]),
        turn(call(index=0)),
        {"role": "assistant", "tool_calls": [call()], "reasoning_content": ""},
    ],
    ids=["order", "spaces", "object", "empty", "no-parts", "unread", "index", "absent"],
)
def test_case_50_an_echo_that_only_spells_otherwise_is_the_same_turn(
    echoed: dict[str, Any],
) -> None:
    stored = turn(call())
    given = copy.deepcopy((stored, echoed))
    assert difference(stored, echoed) == ""
    assert first_difference([stored], [echoed, {"role": "user", "content": "go"}]) is None
    assert (stored, echoed) == given, "nobody's message is changed"


@pytest.mark.parametrize(
    ("echoed", "part"),
    [
        (turn(call('{"b":1,"a":"2"}')), "tool_calls[0].arguments"),
        (turn(call('{"b":true,"a":2}')), "tool_calls[0].arguments"),
        (turn(call('{"b":1}')), "tool_calls[0].arguments"),
        (turn(call('{"b":1, "a":2')), "tool_calls[0].arguments"),
        (turn(call(function={"name": "g", "arguments": '{"b":1, "a":2}'})), "tool_calls[0].name"),
        (turn(call(id="c2")), "tool_calls[0].id"),
        (turn(call(), call()), "tool_calls: 2 instead of 1"),
        (turn(), "tool_calls: 0 instead of 1"),
        (turn(call(), content=" "), "content"),
        (turn(call(), reasoning_content="hm"), "reasoning"),
        (turn(call()) | {"role": "user"}, "role"),
    ],
)
def test_case_50_an_echo_that_renders_otherwise_says_in_which_part(
    echoed: dict[str, Any], part: str
) -> None:
    assert difference(turn(call()), echoed) == part
    assert first_difference([turn(call())], [echoed]) == (0, part)


def test_arguments_that_are_no_object_differ_only_where_their_values_do() -> None:
    same = [
        ("null", " null"),
        ("[1,2]", "[1, 2]"),
        ("", None),
        ("1e999", "10e998"),
        ("{bad", "{bad"),
    ]
    for one, other in same:
        assert difference(turn(call(one)), turn(call(other))) == "", (one, other)
    others = [
        ("null", '"null"'),
        ("[1,2]", "[2,1]"),
        ("1", "true"),
        ("0", "null"),
        ("{bad", "{bad "),
    ]
    for one, other in others:
        assert difference(turn(call(one)), turn(call(other))), (one, other)


def test_brackets_of_thousands_of_levels_raise_nothing() -> None:
    deep = "[" * 100_000
    assert difference(turn(call(deep)), turn(call(deep))) == ""
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    assert difference(turn(call(nested)), turn(call("{}"))) == "tool_calls[0].arguments"


def test_case_23_24_parts_and_empty_call_lists_are_the_same_message() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert difference({"role": "user", "content": "hi"}, {"role": "user", "content": parts}) == ""
    plain = {"role": "assistant", "content": "hello"}
    assert difference(plain, plain | {"tool_calls": []}) == ""
    assert difference(plain, plain | {"tool_calls": None}) == ""
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert difference(plain, plain | {"content": image}) == "content"
    assert (
        difference({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}) == ""
    )


def test_a_history_that_ends_early_says_where() -> None:
    stored = [{"role": "user", "content": "hi"}, turn(call())]
    assert first_difference(stored, stored[:1]) == (1, "missing")
    assert first_difference(stored, []) == (0, "missing")
    rewritten = [{"role": "user", "content": "ho"}, stored[1]]
    assert first_difference(stored, rewritten) == (0, "content")


def result(content: str, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool message."""
    return {"role": "tool", "content": content} | (
        {} if call_id is None else {"tool_call_id": call_id}
    )


def contents(messages: list[dict[str, Any]]) -> list[Any]:
    """Return what the tool messages say, in order."""
    return [m["content"] for m in order_tool_results(messages) if m["role"] == "tool"]


USER = {"role": "user", "content": "hi"}
TWO = turn(call(id="w"), call(id="t"))


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([result("14:05", "t"), result("22C", "w")], ["22C", "14:05"]),
        ([result("22C", "w"), result("14:05", "t")], ["22C", "14:05"]),
        ([result("14:05"), result("22C")], ["14:05", "22C"]),
        ([result("22C"), result("14:05", "t")], ["22C", "14:05"]),
        ([result("14:05", "t"), result("22C")], ["22C", "14:05"]),  # the call that is left
        ([result("14:05", "t")], ["14:05"]),
        ([result("b", "t"), result("a", "w"), result("c", "t")], ["a", "b", "c"]),
        ([result("x"), result("y"), result("z")], ["x", "y", "z"]),
    ],
)
def test_case_49_results_come_in_the_order_of_their_calls(
    results: list[dict[str, Any]], expected: list[str]
) -> None:
    messages = [USER, TWO, *results, USER]
    given = copy.deepcopy(messages)
    assert contents(messages) == expected
    ordered = order_tool_results(messages)
    assert [m["role"] for m in ordered] == [m["role"] for m in messages]
    assert messages == given


def test_case_49_an_id_that_no_call_has_says_its_index() -> None:
    with pytest.raises(ValueError, match=r"message 3: tool_call_id 'x' .*its calls: 'w', 't'"):
        order_tool_results([USER, TWO, result("22C", "w"), result("?", "x")])


def test_case_48_ids_count_within_the_latest_turn_alone() -> None:
    first, second = turn(call(id="f:0")), turn(call(id="f:1"), call(id="f:0"))
    messages = [USER, first, result("one", "f:0"), second, result("two", "f:0"), result("b", "f:1")]
    assert contents(messages) == ["one", "b", "two"]
    with pytest.raises(ValueError, match="message 4: tool_call_id 'f:0'"):
        order_tool_results([USER, first, result("one", "f:0"), turn(call(id="g:0")), messages[4]])


def test_calls_of_one_turn_that_share_an_id_are_answered_in_order() -> None:
    same = turn(call(id="f:0"), call(id="f:0"), call(id="g:1"))
    results = [result("c", "g:1"), result("a", "f:0"), result("b", "f:0")]
    assert contents([same, *results]) == ["a", "b", "c"]
    around = turn(call(id="f:0"), call(id="g:1"), call(id="f:0"))
    results = [result("a", "f:0"), result("c", "f:0"), result("b", "g:1")]
    assert contents([around, *results]) == ["a", "b", "c"]


def test_results_behind_no_call_stay_where_they_are() -> None:
    for before in ([], [USER], [{"role": "assistant", "content": "<tool_call>"}], [turn()]):
        messages = [*before, result("a", "x"), result("b", "y")]
        assert order_tool_results(messages) == messages
    without_ids = turn({"type": "function", "function": {"name": "f", "arguments": "{}"}})
    assert contents([without_ids, result("a", "x")]) == ["a"]


def test_what_is_no_message_is_left_for_whoever_checks_messages() -> None:
    odd: list[Any] = [
        "text",
        None,
        5,
        {"role": "assistant", "tool_calls": ["x", None]},
        result("a"),
    ]
    assert order_tool_results(odd) == odd


def test_values_that_no_json_has_are_themselves_and_deep_ones_raise_nothing() -> None:
    assert difference(turn(call('{"a":NaN}')), turn(call('{ "a": NaN }'))) == ""
    assert difference(turn(call('{"a":NaN}')), turn(call('{"a":Infinity}'))) != ""
    deep: list[Any] = []
    other: list[Any] = []
    for _ in range(5000):
        deep, other = [deep], [other]
    assert difference(turn(call({"a": deep})), turn(call({"a": other}))).endswith("arguments")
    assert difference(turn(content=deep), turn(content=other)) == "content"
    text = "[" * 5000
    assert difference(turn(call(text)), turn(call(text))) == ""
