"""The comparator: conformance 133 and 134, over the toy vocabulary and over Qwen3's."""

from __future__ import annotations

from typing import Any

import pytest

from tests import toy
from worker.tito.backend import RenderersBackend
from worker.tito.compare import Comparator, DifferenceKind, describe, differences

COUNT = DifferenceKind.SPECIAL_TOKEN_COUNT
TYPE = DifferenceKind.SPECIAL_TOKEN_TYPE
ASSISTANT = DifferenceKind.ASSISTANT_TEXT
OTHER = DifferenceKind.NON_ASSISTANT_TEXT

SPECIAL = set(toy.CONTROLS.values())
START, CLOSE, END, NEWLINE = toy.START, toy.CLOSE, toy.END, toy.NEWLINE
USER, SAID, TOOL = 21, 22, 23
TURN = [START, SAID, NEWLINE, 30, CLOSE]
ASKED = [START, USER, NEWLINE, 1104, CLOSE]


def compared(expected: list[int], got: list[int], **options: Any) -> list[tuple[str, int]]:
    given = {
        "special_ids": SPECIAL,
        "decode": toy.toy_renderer().decode,
        "assistant": [START, SAID, NEWLINE],
        "ends": [CLOSE, START],
    } | options
    return [(d.kind, d.index) for d in differences(expected, got, **given)]


@pytest.mark.parametrize("ids", [[], TURN, [30, 31], [START]])
def test_133_equal_or_both_empty_sequences_have_no_difference(ids: list[int]) -> None:
    assert compared(ids, list(ids)) == []
    assert compared(toy.array(ids), ids) == []  # type: ignore[arg-type]  # arrays as well


def test_133_missing_trailing_special_is_one_count_difference() -> None:
    assert compared(TURN, TURN[:-1]) == [(COUNT, -1)]
    assert compared(TURN[:-1], TURN) == [(COUNT, -1)]
    assert compared(TURN, []) == [(COUNT, -1)]


def test_133_swapped_special_is_a_type_difference_at_its_segment() -> None:
    assert compared(TURN, [END, *TURN[1:]], assistant=()) == [(TYPE, 0)]
    assert compared(TURN, [*TURN[:-1], END]) == [(TYPE, 2)]


def test_133_assistant_text_and_other_text_are_told_apart() -> None:
    both = [*ASKED, NEWLINE, *TURN]
    assert compared(both, [*ASKED, NEWLINE, START, SAID, NEWLINE, 31, 32, CLOSE]) == [
        (ASSISTANT, 5)
    ]
    other = [START, USER, NEWLINE, 1105, CLOSE]
    assert compared(both, [*other, NEWLINE, *TURN]) == [(OTHER, 1)]
    assert compared(both, [*other, NEWLINE, START, SAID, NEWLINE, 31, CLOSE]) == [
        (OTHER, 1),
        (ASSISTANT, 5),
    ]


def test_133_separator_behind_the_assistants_close_is_not_assistant_text() -> None:
    assert compared([*TURN, NEWLINE, *ASKED], [*TURN, *ASKED]) == [(OTHER, 3)]


def test_133_qwen3_kinds_come_from_the_role_header(qwen: RenderersBackend) -> None:
    ids = qwen.encode_raw("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>")
    user = qwen.encode_raw("<|im_start|>user\nho<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>")
    said = qwen.encode_raw("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nno<|im_end|>")
    comparator = Comparator(
        {151644, 151645},
        qwen.decode,
        assistant=qwen.encode_raw("<|im_start|>assistant\n").tolist(),
        ends=[151644, 151645],
    )
    assert [(d.kind, d.index) for d in comparator.compare(ids, user)] == [(OTHER, 1)]
    assert [(d.kind, d.index) for d in comparator.compare(ids, said)] == [(ASSISTANT, 5)]
    assert comparator.compare(ids, ids) == []


def test_134_trim_ids_of_construction_and_of_the_call_are_joined() -> None:
    comparator = Comparator(SPECIAL, trim=[NEWLINE])
    held = [*TURN, NEWLINE]
    assert comparator.compare(held, TURN) == []
    assert [d.kind for d in comparator.compare(held, TURN[:-1])] == [COUNT]
    assert comparator.compare(held, TURN[:-1], trim=[CLOSE]) == []
    assert comparator.compare([*TURN, END], TURN, trim=[END]) == []
    assert [d.kind for d in comparator.compare([*TURN, END], TURN)] == [COUNT]  # not remembered


def test_134_only_the_end_is_trimmed() -> None:
    assert Comparator(SPECIAL, trim=[NEWLINE]).compare([START, NEWLINE, 30], [START, 30]) != []


def test_134_roles_that_are_special_tokens_differ_by_type_in_the_middle() -> None:
    """As in GLM, where a tool result under the user's token is another conversation."""
    user, observation, assistant = 100, 101, 102
    ids = [user, 5, assistant, 6, observation, 7, assistant]
    swapped = [user, 5, assistant, 6, user, 7, assistant]
    found = differences(
        ids, swapped, special_ids={100, 101, 102}, assistant=[assistant], ends={100, 101}
    )
    assert [(d.kind, d.index, d.at) for d in found] == [(TYPE, 4, 4)]
    found = differences(
        ids, [*ids[:3], 9, *ids[4:]], special_ids={100, 101, 102}, assistant=[102], ends={100, 101}
    )
    assert [(d.kind, d.index) for d in found] == [(ASSISTANT, 3)]


def test_differences_says_the_ids_the_place_and_the_text() -> None:
    found = differences(
        TURN, [START, SAID, NEWLINE, 31, 32, CLOSE], special_ids=SPECIAL,
        decode=toy.toy_renderer().decode,
    )  # fmt: skip
    assert (found[0].index, found[0].at) == (1, 3)
    assert describe(found) == (
        "segment 1 (id 3): the same text in other ids: expected [30] 'hello', got [31, 32] 'hello'"
    )
    assert describe([]) == "no difference"
    assert describe(found * 5).endswith("; and 2 more")


def test_differences_of_ids_alone_are_forgiven_only_where_asked() -> None:
    split = [START, SAID, NEWLINE, 31, 32, CLOSE]
    assert compared(TURN, split, same_text_is_equal=True) == []
    assert compared(TURN, split) == [(ASSISTANT, 1)]
    assert compared(TURN, [*split[:3], 31, CLOSE], same_text_is_equal=True) == [(ASSISTANT, 1)]


def test_count_difference_names_the_first_id_that_differs() -> None:
    found = differences([START, 30, CLOSE, END], [START, 30, END], special_ids=SPECIAL)
    assert found[0].at == 2
    assert "2 special tokens instead of 3; the first difference is at id 2" in str(found[0])
