"""The cap of an observation: unit, sides, and what the marker costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.tools import cut


def test_the_end_stays_visible_and_the_marker_counts() -> None:
    text = "x" * 100 + " Final: 7"
    found = cut(text, 40)
    assert len(found) <= 40
    assert found.endswith("Final: 7")
    assert "characters cut" in found


@pytest.mark.parametrize("length", [0, 39, 40])
def test_what_fits_is_left_alone(length: int) -> None:
    assert cut("x" * length, 40) == "x" * length


@given(st.integers(0, 3000), st.integers(0, 400))
def test_a_cut_never_exceeds_its_cap_and_keeps_whole_characters(length: int, limit: int) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(length))  # every character is a different one
    found = cut(text, limit)
    assert len(found) <= limit
    if length > limit >= 40:
        head, _, tail = found.partition("[... ")
        count, _, end = tail.partition(" characters cut ...]")
        assert text.startswith(head)
        assert text.endswith(end)
        assert len(head) + len(end) + int(count) == length
        assert limit - len(found) <= 1, "the room is used"


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "[... 97 characters cut ...]xxx Final: 7"),
        ("right", "x" * 12 + "[... 97 characters cut ...]"),
        ("middle", "xxxx[... 97 characters cut ...]Final: 7"),
    ],
)
def test_case_85_a_side_is_cut_away_and_the_marker_counts(side: Any, expected: str) -> None:
    text = "x" * 100 + " Final: 7"
    assert cut(text, 40, side) == expected
    assert len(expected) <= 40


@given(
    st.text(st.sampled_from("a\U0001f642é"), max_size=80),
    st.integers(0, 80),
    st.sampled_from(["left", "right", "middle"]),
)
def test_case_85_a_cut_of_any_side_is_within_its_cap_and_of_whole_characters(
    text: str, limit: int, side: Any
) -> None:
    found = cut(text, limit, side)
    assert len(found) <= limit
    head, marker, tail = found.partition("[...")
    if len(text) <= limit:
        assert found == text
    elif not marker:  # no room for it
        assert found in (text[:limit], text[len(text) - limit :])
        assert len(found) == limit
    else:
        said, _, tail = tail.partition("characters cut ...]")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert int(said) == len(text) - len(head) - len(tail)
        assert (bool(head), bool(tail)) == {
            "left": (False, True), "right": (True, False)
        }.get(side, (bool(head), True))  # fmt: skip
