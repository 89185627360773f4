"""Where a program and its tests are found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import RewardFault
from worker.rewards.code import MAX_PROGRAM_CHARS, payload_of, program_of, read_tests

STDIN = {"stdin": [{"input": "1\n2", "output": "3"}]}
CASES = {"entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```py\na\n```\nbetter:\n```Python\nb\n```\nIt prints\n```\n1\n```\n", "b\n"),
        ("```\na\n```\nand\n```\nb\n```", "b\n"),
        ("```cpp\nint main;\n```", ""),
        ("```cpp\nint main;\n```\n~~~\na\n~~~", "a\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```python", ""),
        ("print(1)", "print(1)"),
        ("   ```python title='x'\na\n   ```", "a\n"),
        ("", ""),
    ],
)
def test_program_of_is_the_last_block_of_python_else_the_last_without_a_language(
    text: str, program: str
) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    ("label", "metadata", "tests"),
    [
        (STDIN, {}, STDIN),
        (json.dumps(STDIN), {}, STDIN),
        ([{"input": ["1", "2"], "output": "3"}], {}, STDIN),
        ({"inputs": ["1\n2"], "outputs": ["3"]}, {}, STDIN),
        ("ignored", {"tests": STDIN}, STDIN),
        (CASES, {}, CASES),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, {}, CASES),
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, {}, CASES),
        (["assert f(1) == 2", "assert f(2) == 3"], {},
         {"asserts": "assert f(1) == 2\nassert f(2) == 3"}),
        ("assert f(1) == 2", {}, {"asserts": "assert f(1) == 2"}),
        ({"asserts": "assert f(1) == 2"}, {}, {"asserts": "assert f(1) == 2"}),
        ("[x] = [f(1)]", {}, {"asserts": "[x] = [f(1)]"}),
        ("def check(f):\n    assert f(1)", {"entry_point": "g"},
         {"asserts": "def check(f):\n    assert f(1)\n\ncheck(g)\n"}),
        ("def check(f):\n    assert f(1)", {"entry_point": "g; import os"},
         {"asserts": "def check(f):\n    assert f(1)"}),
    ],
)  # fmt: skip
def test_tests_of_reads_the_ways_in_which_data_sets_write_tests(
    label: Any, metadata: dict[str, Any], tests: dict[str, Any]
) -> None:
    assert read_tests(label, metadata) == tests


@pytest.mark.parametrize(
    "label",
    [None, 5, "", " ", [], {}, [1], {"stdin": []}, {"stdin": [{"input": "1"}]}, {"stdin": [5]},
     {"entry": "f", "cases": []}, {"entry": "f", "cases": [{"args": 1, "expected": 2}]},
     {"entry": "f", "cases": [{"args": [1]}]}, {"inputs": ["1"], "outputs": []},
     {"fn_name": "f", "inputs": ["no json"], "outputs": ["1"]}],
)  # fmt: skip
def test_tests_of_has_no_verdict_for_a_row_without_usable_tests(label: Any) -> None:
    with pytest.raises(RewardFault, match="the row has no tests") as caught:
        read_tests(label, {})
    assert (caught.value.detail, caught.value.retryable) == ("no_label", False)


def test_payload_of_says_how_the_tests_are_run() -> None:
    whole = payload_of("```python\na\n```", STDIN, {}, 8.0)
    assert whole == {
        "program": "a\n", "tests": STDIN, "timeout_s": 8.0, "stop_early": True, "partial": False,
    }  # fmt: skip
    part = payload_of("a", STDIN, {"partial": True, "timeout_s": 2}, 8.0)
    assert part is not None
    assert (part["partial"], part["stop_early"]) == (True, False)
    assert (part["timeout_s"], part["test_timeout_s"]) == (8.0, 2.0)


@pytest.mark.parametrize(
    ("asked", "one_s"), [(100, 8.0), (0.5, 0.5), (0, None), (-1, None), (True, None), ("2", None)]
)
def test_payload_of_gives_one_test_what_the_row_says_and_no_more_than_all(
    asked: Any, one_s: float | None
) -> None:
    payload = payload_of("a", STDIN, {"timeout_s": asked}, 8.0)
    assert payload is not None
    assert payload.get("test_timeout_s") == one_s


@pytest.mark.parametrize(
    "text", ["", "```cpp\nx\n```", "```python\n \n```", "😀" * MAX_PROGRAM_CHARS]
)
def test_payload_of_runs_nothing_that_could_not_be_right(text: str) -> None:
    assert payload_of(text, STDIN, {}, 8.0) is None


@given(st.lists(st.sampled_from(["```", "~~~~", "python", "\n", "x", " ", "````"]), max_size=40))
def test_program_of_finds_nothing_that_is_not_in_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert program_of(text) in text


@pytest.mark.parametrize("piece", ["```\n", "```python\n", "`", "~~~~~", "\n", "   "])
def test_program_of_takes_linear_time(piece: str) -> None:
    program_of(piece * (1_000_000 // len(piece)))
