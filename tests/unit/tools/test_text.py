"""The cap of an observation: unit, sides, and what the marker costs."""

from __future__ import annotations

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


@given(st.text(max_size=400), st.integers(min_value=0, max_value=200))
def test_a_cut_never_exceeds_its_cap_and_keeps_whole_characters(text: str, limit: int) -> None:
    found = cut(text, limit)
    assert len(found) <= limit
    if len(text) > limit >= 40:
        head, _, tail = found.partition("[... ")
        count, _, end = tail.partition(" characters cut ...]")
        assert text.startswith(head)
        assert text.endswith(end)
        assert len(head) + len(end) + int(count) == len(text)
