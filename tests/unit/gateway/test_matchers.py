"""Which messages are the same: the built-in matchers, and a user's own."""

from __future__ import annotations

import copy
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import ConfigError, ContractError
from worker.gateway.matchers import (
    BUILT_IN,
    first_difference,
    loose_tool_call,
    rendered,
    resolve_matcher,
    role_content_only,
    strict,
)

NOTHING: list[Any] = [None, "", [], ...]
"""`...` is an absent key."""


def call(arguments: Any = '{"x":1}', **fields: Any) -> dict[str, Any]:
    """Return a call as a client sends it."""
    function = {"name": "f", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function} | fields


def turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return an assistant turn; a field `...` is left out."""
    message = {"role": "assistant", "content": "hi", "tool_calls": list(calls)} | fields
    return {name: value for name, value in message.items() if value is not ...}


def given_arguments(one: Any, other: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return turn(call(one)), turn(call(other))


# --- strict --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["content", "reasoning_content", "tool_calls"])
@pytest.mark.parametrize("one", NOTHING)
@pytest.mark.parametrize("other", NOTHING)
def test_121_strict_takes_null_empty_and_absent_for_one(name: str, one: Any, other: Any) -> None:
    assert strict(turn(**{name: one}), turn(**{name: other}))
    assert not strict(turn(**{name: one}), turn(**{name: "hm"}))
    assert not strict(turn(**{name: "hm"}), turn(**{name: other}))


def test_121_strict_ignores_the_index_of_a_call_and_nothing_else_of_it() -> None:
    assert strict(turn(call(index=0)), turn(call()))
    assert strict(turn(call(index=0)), turn(call(index=7)))
    assert not strict(turn(call(extra=0)), turn(call()))
    assert not strict(*given_arguments('{"x":1}', {"x": 1}))
    assert not strict(*given_arguments('{"x":1}', '{"x": 1}'))
    assert strict(*given_arguments({"x": 1, "y": 2}, {"y": 2, "x": 1}))
    assert not strict(*given_arguments({"x": True}, {"x": 1}))
    assert not strict(*given_arguments({"x": 1}, {"x": 1.0}))


# --- loose_tool_call -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x":1}', {"x": 1}),
        ('{"x":1}', '{"x":1.0}'),
        ({"x": 1}, '{ "x" : 1.0 }'),
        ('{"x":1,"y":[{"a":1,"b":2}]}', '{"y":[{"b":2,"a":1}],"x":1}'),
        ('{"x":1e999}', '{"x":10e998}'),
        ('{"x":0.1}', {"x": 0.1}),
        ('{"x":' + "9" * 5000 + "}", '{"x":' + "9" * 5000 + ".0}"),
        ("{bad", "{bad"),
        ("[1, 2]", [1, 2.0]),
        ({"x": None}, '{"x":null}'),
    ],
)
def test_122_loose_takes_arguments_for_the_same_that_say_the_same(one: Any, other: Any) -> None:
    for stored, echoed in (given_arguments(one, other), given_arguments(other, one)):
        assert loose_tool_call(stored, echoed)
        assert one == other or not strict(stored, echoed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x":true}', '{"x":1}'),
        ({"x": True}, {"x": 1}),
        ('{"x":null}', '{"x":"null"}'),
        (None, "null"),
        ("null", None),
        ('{"x":[1,2]}', '{"x":[2,1]}'),
        ({"x": Decimal(1)}, {"x": Decimal(1)}),
        ({"x": Decimal(1)}, '{"x":1}'),
        ({"x": float("nan")}, {"x": float("nan")}),
        ({"x": float("inf")}, {"x": float("inf")}),
        ({"x": (1,)}, {"x": (1,)}),
        ({1: 2}, {1: 2}),
        ('{"x":1}', '{"x":1'),
        ('{"x":1,"x":2}', '{"x":2}'),
        ('{"x":NaN}', '{"x": NaN}'),
        ("5", 5),
        ('{"x":1}', '"{\\"x\\":1}"'),
    ],
)
def test_122_loose_tells_apart_what_json_tells_apart(one: Any, other: Any) -> None:
    for stored, echoed in (given_arguments(one, other), given_arguments(other, one)):
        assert not loose_tool_call(stored, echoed)


@pytest.mark.parametrize(
    "echoed",
    [
        call(id="c2"), call(id=None), call(type="custom"), call(extra=1),
        call(function={"name": "g", "arguments": '{"x":1}'}),
        call(function={"name": "f", "arguments": '{"x":1}', "strict": True}),
        call(function={"name": "f"}), call(function={"arguments": '{"x":1}'}), call(function=None),
        {key: value for key, value in call().items() if key != "id"},
        {key: value for key, value in call().items() if key != "type"},
        {key: value for key, value in call().items() if key != "function"},
    ],
)  # fmt: skip
def test_125_loose_wants_every_other_field_of_a_call_and_wants_it_the_same(
    echoed: dict[str, Any],
) -> None:
    assert not loose_tool_call(turn(call()), turn(echoed))
    assert not loose_tool_call(turn(echoed), turn(call()))
    assert loose_tool_call(turn(echoed), turn(copy.deepcopy(echoed)))


def test_125_loose_wants_all_calls_in_order_and_the_reasoning_as_it_was() -> None:
    a, b = call(id="a"), call(id="b")
    assert loose_tool_call(turn(a, b), turn(a, b))
    for calls in ((b, a), (a,), (a, b, b), ()):
        assert not loose_tool_call(turn(a, b), turn(*calls))
    assert not loose_tool_call(turn(a, reasoning_content="hm"), turn(a))
    assert not loose_tool_call(turn(a, reasoning_content="hm"), turn(a, reasoning_content="hm "))
    assert loose_tool_call(turn(a, reasoning_content="hm"), turn(a, reasoning="hm"))


# --- role_content_only ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["role", "content"])
@pytest.mark.parametrize("one", NOTHING)
@pytest.mark.parametrize("other", NOTHING)
def test_127_role_and_content_have_one_class_of_nothing(name: str, one: Any, other: Any) -> None:
    assert role_content_only(turn(**{name: one}), turn(**{name: other}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hi", "hi"), ("hi", " hi"), ("é", "e\u0301"), (["a", "b"], ["b", "a"]),
        ('{"x":1}', '{"x": 1}'), ("1", 1), (True, 1), ("hi", [{"type": "text", "text": "hi"}]),
    ],
)  # fmt: skip
def test_127_everything_about_content_matters_and_nothing_else(one: Any, other: Any) -> None:
    assert not role_content_only(turn(content=one), turn(content=other))
    assert not role_content_only(turn(role=one), turn(role=other))
    for calls in (5, "x", [None], [{"function": 5}], [call(), 7]):
        assert role_content_only(
            turn(content=one), turn(content=one, tool_calls=calls, reasoning="hm", name="n", z=1)
        )


# --- all three -----------------------------------------------------------------------------------
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 0.5, "", "1", "null"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2)
    ),
    max_leaves=4,
)
ARGUMENTS = JSON | JSON.map(json.dumps) | st.sampled_from(["{bad", "", "null", Decimal(1)])
CALLS = (
    st.builds(
        call,
        ARGUMENTS,
        id=st.sampled_from(["a", "b", None]),
        index=st.integers(0, 1),
        type=st.sampled_from(["function", "custom"]),
    )
    | JSON
)
MESSAGES = st.builds(
    lambda fields, calls: {**fields, "tool_calls": calls},
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["assistant", "tool", None]),
            "content": JSON,
            "reasoning_content": st.sampled_from(["hm", "", None]),
            "reasoning": st.sampled_from(["hm", ""]),
            "tool_call_id": st.sampled_from(["a", "", None]),
            "other": JSON,
        },
    ),
    st.lists(CALLS, max_size=2) | JSON,
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Return two messages that are mostly alike."""
    one = draw(MESSAGES)
    other = copy.deepcopy(one)
    if draw(st.booleans()):
        other.update(draw(MESSAGES.map(lambda m: dict(list(m.items())[:1]))))
    calls = other.get("tool_calls")
    if isinstance(calls, list) and calls and draw(st.booleans()):
        calls[0] = draw(CALLS)
    return one, other


@given(pairs())
def test_128_what_a_stricter_matcher_takes_a_looser_one_takes_and_nothing_is_changed(
    pair: tuple[Any, Any],
) -> None:
    before = copy.deepcopy(pair)
    is_strict, is_loose = strict(*pair), loose_tool_call(*pair)
    assert is_loose or not is_strict
    assert role_content_only(*pair) or not is_loose
    rendered(*pair)
    assert repr(pair) == repr(before)
    for matcher in BUILT_IN.values():
        assert matcher(*pair) == matcher(*reversed(pair)) or matcher is rendered


def test_messages_of_any_depth_or_kind_are_compared_without_an_error() -> None:
    deep: list[Any] = []
    other: list[Any] = []
    for _ in range(10_000):
        deep, other = [deep], [other]
    for matcher in BUILT_IN.values():
        matcher(turn(call({"x": deep}), content=deep), turn(call({"x": other}), content=other))
        text = "[" * 10_000
        assert matcher(turn(call(text)), turn(call(text)))
        odd: Any
        for odd in (5, None, "x", [], {"role": 5, "content": {1: 2}}):
            assert matcher(odd, turn()) is False
    assert strict(turn(content=deep), turn(content=other))


# --- rendered ------------------------------------------------------------------------------------
def test_case_130_reasoning_may_be_left_out_or_renamed_and_never_changed() -> None:
    stored = turn(content="hello", reasoning_content="hello")
    assert rendered(stored, {"role": "assistant", "content": "hello"})
    assert rendered(stored, turn(content="hello", reasoning="hello"))
    assert rendered(stored, turn(content="hello", reasoning_content=None))
    assert not rendered(stored, turn(content="hello", reasoning_content="hello!"))
    assert not rendered(stored, turn(content="hello!"))
    # Reasoning that the stored turn never had is another turn.
    assert not rendered(turn(content="hello"), turn(content="hello", reasoning="hm"))


def test_rendered_takes_another_spelling_for_the_same_and_says_where_it_does_not() -> None:
    stored = [{"role": "system", "content": "a"}, turn(call('{"b":1, "a":2}'), content=None)]
    echoed = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        turn(call({"a": 2, "b": 1}), content=""),
        {"role": "tool", "content": "ok"},
    ]
    assert first_difference(rendered, stored, echoed) is None
    assert first_difference(rendered, echoed, stored) == (2, "missing")
    changed = [*echoed[:1], turn(call({"a": 2, "b": 3}))]
    assert first_difference(rendered, stored, changed) == (1, "content")
    assert first_difference(strict, stored[1:], echoed[1:2]) == (0, "the matcher's own judgement")


# --- names ---------------------------------------------------------------------------------------
def fits(stored: Any, echoed: Any) -> bool:
    del stored, echoed
    return True


async def fits_later(stored: Any, echoed: Any) -> bool:
    return fits(stored, echoed)


def one_word(stored: Any) -> bool:
    return bool(stored)


def a_number(stored: Any, echoed: Any) -> Any:
    del stored, echoed
    return 1


def a_text(stored: Any, echoed: Any) -> Any:
    del stored, echoed
    return "yes"


def a_promise(stored: Any, echoed: Any) -> Any:
    return fits_later(stored, echoed)


def raises(stored: Any, echoed: Any) -> bool:
    raise KeyError("role")


def test_129_names_are_exact_and_paths_load(tmp_path: Path) -> None:
    for name, matcher in BUILT_IN.items():
        assert resolve_matcher(name) is matcher
    equal = resolve_matcher("operator.eq")
    assert equal({"a": 1}, {"a": 1})
    assert not equal({"a": 1}, {"a": 2})
    assert resolve_matcher(f"{__name__}.fits")({}, {})
    assert resolve_matcher(f"{__name__}:fits")({}, {})
    file = tmp_path / "mine.py"
    file.write_text("def same(stored, echoed):\n    return stored is echoed\n")
    mine = resolve_matcher(f"{file}:same")
    message: dict[str, Any] = {}
    assert mine(message, message)
    assert not mine(message, {})


@pytest.mark.parametrize(
    "name",
    ["Strict", "STRICT", "strict ", "", ".", "operator.", ".eq", "operator", "no_such_module.eq",
     "operator.no_such", "json.decoder", "json.decoder.NaN", f"{__name__}.fits_later",
     f"{__name__}:fits_later", f"{__name__}.one_word", "missing.py:same", "a b.c"],
)  # fmt: skip
def test_129_what_cannot_be_loaded_says_failed_to_resolve(name: str) -> None:
    with pytest.raises(ConfigError, match="failed to resolve") as caught:
        resolve_matcher(name)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "says"),
    [("a_number", "must return bool, got int"), ("a_text", "must return bool, got str"),
     ("a_promise", "must return bool, got coroutine"), ("raises", "raised KeyError: 'role'")],
)  # fmt: skip
def test_129_a_matcher_that_breaks_its_promise_is_a_contract_error(name: str, says: str) -> None:
    with pytest.raises(ContractError, match=says):
        resolve_matcher(f"{__name__}.{name}")({}, {})
