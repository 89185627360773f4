"""Two token sequences that should be one: where they differ, in words a person can act on.

Owns the segmentation at special ids and the four kinds of difference. Never tokenizes, never
renders, never judges which side is right. Invariant: an empty list exactly where the sequences are
equal after the ids that may be trimmed at the end.

A sequence is cut into *segments*: every special id is one, and so is every run of other ids
between them. A difference says the segment's index; segments that only one side has still count,
so that both sides number alike. Where the sides do not have the same number of special ids,
nothing can be numbered: one difference, `SPECIAL_TOKEN_COUNT`, with index -1.

How to call it, the start-up self-test for instance:

    found = differences(full, extended, special_ids=ids_of_all_control_tokens,
                        decode=renderer.decode, assistant=[im_start, assistant, newline],
                        ends=[im_end, im_start])
    if found:
        raise ConfigError(f"… behind message {place}: {describe(found)}")

`assistant` is the ids that open an assistant turn and `ends` the ids that end one; without them
every text is `NON_ASSISTANT_TEXT`. `Comparator` is the same with what stays equal bound once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]

_SHOWN_IDS = 8
_SHOWN_CHARS = 60


class DifferenceKind(StrEnum):
    """What kind of segment differs."""

    SPECIAL_TOKEN_COUNT = "special_token_count"
    """One side has more special ids; the turns do not line up."""
    SPECIAL_TOKEN_TYPE = "special_token_type"
    """Another special id in the same place."""
    ASSISTANT_TEXT = "assistant_text"
    """What the model wrote, or its role header."""
    NON_ASSISTANT_TEXT = "non_assistant_text"
    """What anybody else wrote, or the template."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One segment that is not the same on both sides."""

    kind: DifferenceKind
    index: int
    """Of the segment; -1 where the special ids do not line up."""
    at: int
    """Place in the expected sequence of the first id that differs."""
    message: str
    """A readable sentence with ids and text."""

    def __str__(self) -> str:
        """Return the sentence."""
        return self.message


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One side, cut: texts[k] stands before specials[k], the last text behind the last special."""

    specials: list[int]
    texts: list[list[int]]
    starts: list[int]
    """Where texts[k] begins."""


class Comparator:
    """Compares sequences of one vocabulary and template."""

    def __init__(
        self,
        special_ids: Collection[int],
        decode: Callable[[Any], str] | None = None,
        *,
        assistant: Sequence[int] = (),
        ends: Collection[int] = (),
        trim: Iterable[int] = (),
        same_text_is_equal: bool = False,
    ) -> None:
        """Bind what stays equal.

        Args:
            special_ids: the ids to cut at.
            decode: ids to text, for the sentences.
            assistant: the ids that open an assistant turn (its role header).
            ends: the ids that end an assistant turn: the close, and the role openers.
            trim: ids that are ignored at the end of either side.
            same_text_is_equal: segments of the same text in other ids do not differ; needs
                `decode`. Right where one side was re-tokenized from text, and only there.
        """
        self._special = frozenset(int(number) for number in special_ids)
        self._decode = decode
        self._assistant = [int(number) for number in assistant]
        self._ends = frozenset(int(number) for number in ends)
        self._trim = frozenset(int(number) for number in trim)
        self._same_text = same_text_is_equal and decode is not None

    def compare(self, expected: Ids, got: Ids, *, trim: Iterable[int] = ()) -> list[Difference]:
        """Return the differences in order; `trim` joins what the constructor was given."""
        trimmed = self._trim | frozenset(int(number) for number in trim)
        wanted, found = _without(expected, trimmed), _without(got, trimmed)
        if wanted == found:
            return []
        left, right = self._cut(wanted), self._cut(found)
        if len(left.specials) != len(right.specials):
            return [self._count(wanted, found, left, right)]
        differing: list[Difference] = []
        ours = self._assistant_places(wanted)
        theirs = self._assistant_places(found)
        index = 0
        for place, (text, other) in enumerate(zip(left.texts, right.texts, strict=True)):
            start = left.starts[place]
            if text or other:
                if text != other and not (self._same_text and self._say(text) == self._say(other)):
                    spoken = _covered(ours, start, len(text)) or _covered(
                        theirs, right.starts[place], len(other)
                    )
                    differing.append(self._text(index, start, text, other, assistant=spoken))
                index += 1
            if place < len(left.specials):
                special, instead = left.specials[place], right.specials[place]
                if special != instead:
                    differing.append(self._type(index, start + len(text), special, instead))
                index += 1
        return differing

    def _cut(self, ids: list[int]) -> _Sequence:
        cut = _Sequence([], [[]], [0])
        for place, number in enumerate(ids):
            if number in self._special:
                cut.specials.append(number)
                cut.texts.append([])
                cut.starts.append(place + 1)
            else:
                cut.texts[-1].append(number)
        return cut

    def _assistant_places(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return [(start, end)] of the assistant turns, header included, close excluded."""
        header, places = self._assistant, []
        if not header:
            return []
        start = _find(ids, header, 0)
        while start >= 0:
            behind = start + len(header)
            end = next((i for i in range(behind, len(ids)) if ids[i] in self._ends), len(ids))
            places.append((start, end))
            start = _find(ids, header, behind)
        return places

    def _count(
        self, wanted: list[int], found: list[int], left: _Sequence, right: _Sequence
    ) -> Difference:
        at = _first_difference(wanted, found)
        message = (
            f"{len(right.specials)} special tokens instead of {len(left.specials)}; the first "
            f"difference is at id {at}: expected {self._show(wanted[at:])}, "
            f"got {self._show(found[at:])}"
        )
        return Difference(DifferenceKind.SPECIAL_TOKEN_COUNT, -1, at, message)

    def _type(self, index: int, at: int, special: int, instead: int) -> Difference:
        message = (
            f"segment {index} (id {at}): special token {self._show([instead])} "
            f"instead of {self._show([special])}"
        )
        return Difference(DifferenceKind.SPECIAL_TOKEN_TYPE, index, at, message)

    def _text(
        self, index: int, start: int, text: list[int], other: list[int], *, assistant: bool
    ) -> Difference:
        kind = DifferenceKind.ASSISTANT_TEXT if assistant else DifferenceKind.NON_ASSISTANT_TEXT
        first = _first_difference(text, other)
        whose = "assistant text" if assistant else "text"
        if self._decode is not None and self._say(text) == self._say(other):
            what = f"the same {whose} in other ids"
        else:
            what = f"other {whose}"
        message = (
            f"segment {index} (id {start + first}): {what}: expected {self._show(text[first:])}, "
            f"got {self._show(other[first:])}"
        )
        return Difference(kind, index, start + first, message)

    def _say(self, ids: list[int]) -> str:
        return self._decode(np.array(ids, dtype=np.int32)) if self._decode and ids else ""

    def _show(self, ids: list[int]) -> str:
        if not ids:
            return "nothing"
        shown = ", ".join(str(number) for number in ids[:_SHOWN_IDS])
        more = ", …" if len(ids) > _SHOWN_IDS else ""
        text = self._say(ids[:_SHOWN_IDS])[:_SHOWN_CHARS]
        return f"[{shown}{more}]" + (f" {text!r}" if text else "")


def differences(
    expected: Ids,
    got: Ids,
    *,
    special_ids: Collection[int],
    decode: Callable[[Any], str] | None = None,
    assistant: Sequence[int] = (),
    ends: Collection[int] = (),
    trim: Iterable[int] = (),
    same_text_is_equal: bool = False,
) -> list[Difference]:
    """Return the differences between two sequences in order; see `Comparator` for the arguments."""
    comparator = Comparator(
        special_ids,
        decode,
        assistant=assistant,
        ends=ends,
        trim=trim,
        same_text_is_equal=same_text_is_equal,
    )
    return comparator.compare(expected, got)


def describe(found: Sequence[Difference], most: int = 3) -> str:
    """Return one sentence about the first `most` differences; "no difference" for none."""
    if not found:
        return "no difference"
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(difference.message for difference in found[:most]) + more


def _without(ids: Ids, trim: frozenset[int]) -> list[int]:
    kept = ids.tolist() if isinstance(ids, np.ndarray) else [int(number) for number in ids]
    while kept and kept[-1] in trim:
        kept.pop()
    return kept


def _find(ids: list[int], wanted: list[int], start: int) -> int:
    for place in range(start, len(ids) - len(wanted) + 1):
        if ids[place] == wanted[0] and ids[place : place + len(wanted)] == wanted:
            return place
    return -1


def _covered(places: list[tuple[int, int]], start: int, length: int) -> bool:
    return any(first < start + length and start < end for first, end in places)


def _first_difference(ids: list[int], others: list[int]) -> int:
    shorter = min(len(ids), len(others))
    return next((i for i in range(shorter) if ids[i] != others[i]), shorter)
