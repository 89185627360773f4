"""Finding any of many strings: the longest, at the first place, as plain searching does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.tito.patterns import any_of

STRINGS = st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=8)


@given(strings=STRINGS, text=st.text("ab<|", max_size=12))
def test_any_of_finds_the_longest_at_the_first_place(strings: list[str], text: str) -> None:
    expected = next(
        (
            (place, max(found, key=len))
            for place in range(len(text))
            if (found := [string for string in strings if text.startswith(string, place)])
        ),
        None,
    )
    match = any_of(strings).search(text)
    assert (match and (match.start(), match[0])) == expected


def test_any_of_nothing_finds_nothing() -> None:
    assert any_of([]).search("anything") is None
