"""Tool calls as a model writes them, right and wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from worker.tito.calls import judge_call, new_call_id, unwrap_arguments
from worker.types import ProblemKind


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
