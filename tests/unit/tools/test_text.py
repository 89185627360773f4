"""The cap of an observation: unit, sides, and what the marker costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.tito.families import toyvocab
from worker.tools import Cap, cut
from worker.tools.caps import cut_tokens

MARKER = re.compile(r"\[\.\.\. (\d+) characters cut \.\.\.\]")
SIDES = ["left", "right", "middle"]


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


def checked(text: str, chars: int, tokens: int, renderer: Any, side: Any) -> str:
    """Return the cut, once what holds of every cut was checked."""
    found = cut_tokens(text, chars, tokens, renderer, side)
    assert len(renderer.encode(found)) <= tokens
    assert len(found) <= max(chars, 0)
    whole = text.replace("\x00", "\ufffd")
    marker = MARKER.search(found)
    if found == whole:
        return found
    if marker is None:  # no room for it
        assert whole.startswith(found) or whole.endswith(found)
        return found
    head, tail = found[: marker.start()], found[marker.end() :]
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert int(marker[1]) == len(whole) - len(head) - len(tail)
    assert side != "left" or not head
    assert side != "right" or not tail
    return found


@pytest.mark.parametrize("side", SIDES)
def test_a_cap_in_tokens_uses_its_room_and_cuts_between_tokens(side: Any, qwen3: Any) -> None:
    text = " ".join(f"word{i} of many" for i in range(2000))
    found = checked(text, 10**6, 100, qwen3, side)
    assert len(qwen3.encode(found)) >= 96, "the room is used"
    marker = MARKER.search(found)
    assert marker is not None
    ids = qwen3.encode(text).tolist()
    head = qwen3.encode(found[: marker.start()]).tolist()
    tail = qwen3.encode(found[marker.end() :]).tolist()
    assert ids[: len(head)] == head
    assert not tail or ids[-len(tail) :] == tail
    assert len(head) == {"left": 0, "right": len(head), "middle": len(tail) // 2}[side]


def test_both_caps_hold_and_the_marker_counts_from_the_whole_text(qwen3: Any) -> None:
    text = "one two three " * 5000
    by_chars = checked(text, 500, 10_000, qwen3, "middle")
    assert by_chars == cut(text, 500)
    by_tokens = checked(text, 500, 30, qwen3, "middle")
    assert MARKER.findall(by_tokens) == [str(len(text) - len(MARKER.sub("", by_tokens)))]


def test_what_fits_both_caps_is_left_alone(qwen3: Any) -> None:
    assert checked("short", 100, 16, qwen3, "middle") == "short"
    exact = "a b c d"
    assert checked(exact, 100, len(qwen3.encode(exact)), qwen3, "right") == exact


@pytest.mark.parametrize("side", SIDES)
@given(
    text=st.text(
        st.sampled_from("a \n\U0001f642\u0915\u0958e\u0301\u65e5\x00<|im_end|>"), max_size=300
    ),
    chars=st.integers(0, 400),
    tokens=st.integers(1, 60),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_cap_in_tokens_holds_for_every_text(
    side: Any, qwen3: Any, text: str, chars: int, tokens: int
) -> None:
    checked(text, chars, tokens, qwen3, side)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_a_cap_in_tokens_holds_for_other_vocabularies(name: str) -> None:
    renderer = toyvocab.renderer(name)
    for side in SIDES:
        for tokens in (1, 16, 40, 200):
            checked("of the caf\u00e9 \U0001f642 and more " * 60, 800, tokens, renderer, side)


async def test_a_long_text_is_measured_in_a_thread_and_cut_alike(qwen3: Any) -> None:
    text = "many words are here " * 1000
    found = await Cap(15_000, 500, "right", qwen3).of(text)
    assert found == checked(text, 15_000, 500, qwen3, "right")


@pytest.mark.parametrize("side", SIDES)
async def test_a_cap_in_tokens_counts_what_a_character_costs(side: Any, qwen3: Any) -> None:
    faces = "\U0001f642\u0f40\u2fa1" * 30  # a few tokens each
    found = await Cap(1000, 64, side, qwen3).of(faces)
    assert len(found) < len(faces)
    assert found == checked(faces, 1000, 64, qwen3, side)
    assert len(qwen3.encode(found)) >= 58, "the room is used"
