"""Where an answer is, and which answers are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.sample import Sample
from tests.builders import a_sample
from worker.rewards import answer_of, boxed
from worker.rewards.answers import final_message, final_turn_ids, normalized, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"First \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{", None),
        ("no box", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_complete_box_counts(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>1</answer> no: <answer>\n2 </answer>", "2"),
        (r"<answer>\boxed{3}</answer>", "3"),
        (r"\boxed{4}", "4"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        ("  just text ", "just text"),
        ("<answer>open", "<answer>open"),
    ],
)
def test_the_answer_is_the_tag_else_the_box_else_all(text: str, answer: str) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("42", "42"),
        (" 42. ", "42"),
        ("42.0", "42"),
        ("042", "42"),
        ("+3", "3"),
        ("-0", "0"),
        (".5", "0.5"),
        ("1,234,567", "1234567"),
        ("1{,}000", "1000"),
        ("$42$", "42"),
        (r"\(42\)", "42"),
        (r"\frac{1}{2}", "1/2"),
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\tfrac{2}{4}", "0.5"),
        (r"\frac{x+1}{2}", "(x+1)/(2)"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{Friday}", "Friday"),
        (r"5\,\text{cm}", "5cm"),
        (r"90^\circ", "90"),
        (r"50\%", "50%"),
        ("x = 5", "5"),
    ],
)
def test_answers_that_mean_the_same_are_the_same(given_: str, expected: str) -> None:
    assert same_answer(given_, expected)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("42", "43"),
        ("", ""),
        ("", "0"),
        ("1/0", "1"),
        ("1/2", "0.51"),
        ("wrong", "42"),
        ("-5", "5"),
        ("50%", "50"),
        ("A", "a"),
        ("y=5", "x=5"),
        ("1e999999999", "2"),
        ("12", "1,2"),
    ],
)
def test_answers_that_differ_are_different(given_: str, expected: str) -> None:
    assert not same_answer(given_, expected)


@given(st.text(alphabet="\\{}boxedfrac0123456789,./= $", max_size=200))
def test_no_text_breaks_the_search_or_the_normalization(text: str) -> None:
    boxed(text)
    answer_of(text)
    assert normalized(normalized(text)) is not None


def test_the_last_turn_is_what_was_sampled_last() -> None:
    sample = a_sample(turns=[((4, 5), (6,)), ((7, 8), ())])
    assert final_turn_ids(sample).tolist() == [7, 8]
    assert final_turn_ids(Sample()).tolist() == []


def test_a_resumed_last_turn_is_joined_and_the_turn_before_it_is_not() -> None:
    sample = a_sample(turns=[((4, 5), (6,)), ((7,), ()), ((8,), ())])
    sample.calls[1].finish = "abort"
    assert final_turn_ids(sample).tolist() == [7, 8]
    sample.calls[0].finish = "abort"  # a tool answered in between, so it is another turn
    assert final_turn_ids(sample).tolist() == [7, 8]


def sampled(renderer: Any, *texts: str) -> Sample:
    """Return a sample of these turns, by their real ids."""
    turns = [(renderer.encode_raw(text).tolist(), ()) for text in texts]
    return a_sample(turns=turns, prompt_ids=renderer.encode_raw("hi").tolist())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 8.<|im_end|>", "The answer is 8."),
        ("<think>\nIs it 9?\n</think>\n\nIt is 8.<|im_end|>", "It is 8."),
        ("<think>\nIs it 9", ""),
        ('Let me see.\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>', "Let me see."),
    ],
)
def test_the_final_text_has_no_reasoning_no_call_and_no_end(
    text: str, expected: str, qwen3: Any
) -> None:
    message = final_message(sampled(qwen3, "earlier<|im_end|>", text), qwen3)
    assert message is not None
    assert message.content.strip() == expected


def test_reasoning_that_the_prompt_opened_is_not_final_text(qwen3: Any) -> None:
    opener = qwen3.encode_raw("<|im_start|>assistant\n<think>\n").tolist()
    reply = qwen3.encode_raw("maybe 9\n</think>\n\n8<|im_end|>").tolist()
    sample = a_sample(prompt_ids=opener, turns=[(reply, ())])
    message = final_message(sample, qwen3)
    assert message is not None
    assert message.content.strip() == "8"
    assert final_message(Sample(tokens=np.array([1], dtype=np.int32)), qwen3) is None
