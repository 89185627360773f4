"""Tool calls as a model writes them, right and wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from worker.tito.calls import (
    judge_call,
    judge_parsed,
    limit_calls,
    new_call_id,
    strict_json,
    unwrap_arguments,
)
from worker.types import ProblemKind, ToolCall


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 3}}', {"a": 3}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 3}"}', {"a": 3}),
        ('{"name":"f","arguments":"\\"{\\\\\\"url\\\\\\":\\\\\\"http://x.test\\\\\\"}\\""}',
         {"url": "http://x.test"}),
        ('{"name":"sh","arguments":{"cmd":"mkdir -p t/{a,b"}}', {"cmd": "mkdir -p t/{a,b"}),
        ('{"name":"w","arguments":{"t":"a}{b"}}', {"t": "a}{b"}),
        ('{"name":"w","arguments":{"t":"\\ud83d\\ude00"}}', {"t": "\U0001f600"}),
    ],
)  # fmt: skip
def test_call_is_executable_when_its_arguments_are_an_object(
    raw: str, arguments: dict[str, Any]
) -> None:
    call = judge_call(raw, closed=True)
    assert (call.problem, call.arguments, call.raw) == (None, arguments, raw)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ('{"name":"calc","arguments":{"x": 1,}', ProblemKind.INVALID_JSON),
        ('{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}', ProblemKind.INVALID_JSON),
        ('{"name":"sh","arguments":{"cmd":"a\nb"}}', ProblemKind.INVALID_JSON),
        ('{"name":"grep","arguments":{"re":"\\d+"}}', ProblemKind.INVALID_JSON),
        ("", ProblemKind.INVALID_JSON),
        ("[1, 2]", ProblemKind.INVALID_JSON),
        ("[" * 100_000, ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", ProblemKind.INVALID_JSON),
        ('{"name": "f", "name": "g"}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"n": NaN}}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"n": -Infinity}}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"n": 1e400}}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"half": "\\ud83d"}}', ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {"\\udc00": 1}}', ProblemKind.INVALID_JSON),
        ('{"name": "f\\ud800", "arguments": {}}', ProblemKind.INVALID_JSON),
        ("{'name': 'f'}", ProblemKind.INVALID_JSON),
        ('{"name": "f", "arguments": {},}', ProblemKind.INVALID_JSON),
        ('{"name": " ", "arguments": {}}', ProblemKind.NO_NAME),
        ("{}", ProblemKind.NO_NAME),
        ('{"name": null, "arguments": {}}', ProblemKind.NO_NAME),
        ('{"name": 5, "arguments": {}}', ProblemKind.NO_NAME),
        ('{"name": "", "arguments": {}}', ProblemKind.NO_NAME),
        ('{"name": "f", "arguments": [1, 2]}', ProblemKind.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": 5}', ProblemKind.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": null}', ProblemKind.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": "text"}', ProblemKind.BAD_ARGUMENTS),
    ],
)
def test_call_is_a_problem_that_says_what_is_expected(raw: str, kind: ProblemKind) -> None:
    call = judge_call(raw, closed=True)
    assert call.problem is kind
    assert '{"name": <function name>' in call.problem_text
    assert call.arguments == {}


def test_call_without_its_end_is_unclosed_even_when_it_looks_complete() -> None:
    call = judge_call('{"name": "f", "arguments": {}}', closed=False)
    assert call.problem is ProblemKind.UNCLOSED


def test_unwrapping_stops_after_three_layers() -> None:
    four = '"\\"\\\\\\"{}\\\\\\"\\""'
    assert unwrap_arguments(four) == "{}"


def test_call_ids_have_24_hex_digits_and_do_not_repeat() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", one) for one in ids)


@pytest.mark.parametrize(
    ("raw", "name", "arguments", "status", "expected"),
    [
        ('{"a": 3}', "f", {"a": 3}, "ok", {"a": 3}),
        ("", "f", None, "ok", {}),
        ("f", "f", {}, "unknown_tool", {}),
        ("", "f", '"{\\"a\\": 3}"', "ok", {"a": 3}),
        ("<function=f>\n<parameter=a>\n3\n</parameter>\n</function>", "f", {"a": 3}, "ok",
         {"a": 3}),
        ("\n<function=f>\n</function>\n", "f", {}, "ok", {}),
        # No JSON where the schema may want some: the schema's own check tells the model.
        ("<function=f><parameter=a>x</parameter></function>", "f", {"a": "x"}, "invalid_json",
         {"a": "x"}),
        ('<invoke name="f"><parameter name="a">3</parameter></invoke>', "f", {"a": 3}, "ok",
         {"a": 3}),
        ('<invoke name="f"></invoke>\n<invoke name="g"></invoke>', "g", {}, "ok", {}),
    ],
)  # fmt: skip
def test_a_parsers_call_is_executable_when_nothing_of_it_is_left_over(
    raw: str, name: str, arguments: Any, status: str, expected: dict[str, Any]
) -> None:
    call = judge_parsed(raw, name=name, arguments=arguments, status=status)
    assert (call.problem, call.name, call.arguments, call.raw) == (None, name, expected, raw)


@pytest.mark.parametrize(
    ("raw", "arguments", "status", "kind"),
    [
        ("f", {}, "unclosed_block", ProblemKind.UNCLOSED),
        ("f", {}, "malformed_structure", ProblemKind.BAD_STRUCTURE),
        ("{bad", "{bad", "invalid_json", ProblemKind.INVALID_JSON),
        ("{bad", "{bad", "ok", ProblemKind.BAD_ARGUMENTS),
        ("[1]", [1], "ok", ProblemKind.BAD_ARGUMENTS),
        ("5", 5, "ok", ProblemKind.BAD_ARGUMENTS),
        ('f{"a": 1, "a": 2}', {"a": 2}, "ok", ProblemKind.INVALID_JSON),
        ('{"a": NaN}', {"a": float("nan")}, "ok", ProblemKind.INVALID_JSON),
        # The second function of a block: its arguments would have become the first one's.
        ("<function=f><parameter=a>1</parameter></function><function=g></function>", {"a": 1}, "ok",
         ProblemKind.BAD_STRUCTURE),
        # An argument without its end, which a parser leaves out.
        ("<function=f><parameter=a>1</parameter><parameter=b>2</function>", {"a": 1}, "ok",
         ProblemKind.BAD_STRUCTURE),
        # The end marker inside a value: the value would have been cut there.
        ("<function=f><parameter=a>x </parameter> y</parameter></function>", {"a": "x"}, "ok",
         ProblemKind.BAD_STRUCTURE),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", {"a": 2},
         "ok", ProblemKind.BAD_STRUCTURE),
        ('<invoke name="f"></invoke><invoke name="g">', {}, "ok", ProblemKind.BAD_STRUCTURE),
        ('<invoke name="f">text</invoke>', {}, "ok", ProblemKind.BAD_STRUCTURE),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value>rest", {"a": 1}, "ok",
         ProblemKind.BAD_STRUCTURE),
        ("f<arg_key>a</arg_key>1<arg_key>b</arg_key><arg_value>2</arg_value>", {"b": 2}, "ok",
         ProblemKind.BAD_STRUCTURE),
        ("f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2, {"a": 1}, "ok",
         ProblemKind.BAD_STRUCTURE),
    ],
)  # fmt: skip
def test_a_parsers_call_is_a_problem_when_it_was_read_loosely(
    raw: str, arguments: Any, status: str, kind: ProblemKind
) -> None:
    call = judge_parsed(raw, name="f", arguments=arguments, status=status)
    assert (call.problem, call.arguments) == (kind, {})
    assert call.problem_text


@pytest.mark.parametrize("name", [None, "", "  "])
def test_a_parsers_call_without_a_name_is_one(name: str | None) -> None:
    for status in ("ok", "missing_name"):
        call = judge_parsed("{}", name=name, arguments={}, status=status)
        assert call.problem is ProblemKind.NO_NAME


def test_a_calls_own_id_is_kept_where_a_template_can_show_it_again() -> None:
    assert judge_parsed("", name="f", arguments={}, call_id="functions.f:0").id == "functions.f:0"
    for odd in (None, "", "a b", "<|im_end|>", "x" * 65, "a\n"):
        assert re.fullmatch(
            r"call_[0-9a-f]{24}", judge_parsed("", name="f", arguments={}, call_id=odd).id
        )


def test_a_block_of_thousands_of_open_arguments_is_judged_at_once() -> None:
    raw = "<function=f>" + "<parameter=a>" * 100_000
    assert judge_parsed(raw, name="f", arguments={}).problem is ProblemKind.BAD_STRUCTURE


@pytest.mark.parametrize(("most", "good"), [(None, 4), (9, 4), (4, 4), (2, 2), (1, 1)])
def test_calls_behind_as_many_as_a_turn_may_make_are_problems(most: int | None, good: int) -> None:
    broken = judge_call("{", closed=True)
    calls = [ToolCall("1", "a", {}), broken, *(ToolCall(str(n), "a", {}) for n in (2, 3, 4))]
    limit_calls(calls, most)
    executable = [call.id for call in calls if call.problem is None]
    assert executable == ["1", "2", "3", "4"][:good]
    assert broken.problem is ProblemKind.INVALID_JSON
    for call in calls:
        if call.problem is ProblemKind.TOO_MANY:
            assert call.problem_text.startswith(
                f"not executed: 4 calls in one turn, at most {most} "
            )


def test_strict_json_takes_what_json_is() -> None:
    assert strict_json('{"a": [1, 1.5, -2e3, null, true, "\\u00e9"], "b": {}}') == {
        "a": [1, 1.5, -2000.0, None, True, "é"], "b": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        (
            "<function=f>\n<parameter=zip>\n01234\n</parameter>\n<parameter=flag>true</parameter>"
            "<parameter=n>3</parameter><parameter=new>7</parameter></function>"
        ),
        (
            "f\n<arg_key>zip</arg_key>\n<arg_value>01234</arg_value><arg_key>flag</arg_key>"
            "<arg_value>true</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
            "<arg_key>new</arg_key><arg_value>7</arg_value>"
        ),
    ],
)
def test_text_that_looks_like_json_stays_text_where_the_tool_wants_text(raw: str) -> None:
    read = {"zip": "01234", "flag": True, "n": 3, "new": 7}
    properties = {"zip": {"type": "string"}, "flag": {"type": ["string"]}, "n": {"type": "integer"}}
    spec = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    for tools in ([spec], [{"type": "function", "function": spec}]):
        call = judge_parsed(raw, name="f", arguments=read, status="invalid_json", tools=tools)
        assert (call.problem, call.arguments) == (None, read | {"flag": "true"})
    for other in (None, [], [spec | {"name": "g"}], [{"name": "f"}]):
        assert judge_parsed(raw, name="f", arguments=read, tools=other).arguments == read
