"""Where the reasoning of a reply is: one rule for families and chat templates.

Owns which ids of a reply are reasoning. Never reads calls, never raises for what a model wrote.
Invariant: what stands in a block, finished or not, is in no piece that anybody looks for calls in.

    an opener              begins a block, wherever in the reply it stands
    the prompt opened one  the reply begins inside it
    a closer               ends the block that is open; without one it is text
    no closer behind it    everything up to the end of the reply is reasoning

Markers that are tokens are looked for as ids, so text that only looks like one is text; others in
the text of the ids. Pieces between blocks are read one by one: a call does not go on behind a block
that began inside it, so it is one that was not closed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Split:
    """A reply without its reasoning."""

    reasoning: str | None
    """None where no block has a text; empty where one is open."""
    is_open: bool
    """The last block has no end."""
    pieces: list[list[int]]
    """What is no reasoning, in order."""


class Reasoning:
    """The reasoning blocks of one format over one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, markers: tuple[str, str], ends: Iterable[int]) -> None:
        """Bind the markers.

        Args:
            tokenizer: of the vocabulary.
            markers: that open and close a block.
            ends: ids that end a turn; a block does not go on behind one.
        """
        self._tokenizer, self._markers = tokenizer, markers
        opener, closer = (tokenizer.token_id(marker) for marker in markers)
        self._ids = None if opener is None or closer is None else (opener, closer)
        self._ends = frozenset(ends)

    @property
    def atomic(self) -> bool:
        """Whether both markers are tokens."""
        return self._ids is not None

    @property
    def markers(self) -> tuple[str, str]:
        """The texts that open and close a block."""
        return self._markers

    @property
    def marker_ids(self) -> tuple[int, int] | None:
        """Their ids; None where they are looked for as text."""
        return self._ids

    @property
    def closing(self) -> list[int]:
        """The ids that end a block."""
        return list(self._tokenizer.encode(self._markers[1]))

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside a block."""
        if self._ids is not None:
            known = self._ends.union(self._ids)
            last = next((n for n in reversed(prompt) if n in known), None)
            return last == self._ids[0]
        # What people wrote has a control token of the template behind it.
        controls = self._tokenizer.control_ids | self._ends
        start = next((i for i in range(len(prompt), 0, -1) if prompt[i - 1] in controls), 0)
        text = self._tokenizer.decode(list(prompt[start:]))
        opener, closer = self._markers
        return text.rfind(opener) > text.rfind(closer)

    def split(self, ids: list[int], prompt: Sequence[int] = ()) -> Split:
        """Return what of a reply is reasoning, and the rest.

        Args:
            ids: the reply, without what ended it.
            prompt: the tail of what the engine saw.
        """
        is_open = self.is_open(prompt)
        if self._ids is not None:
            if not is_open and self._ids[0] not in ids:
                return Split(None, False, [ids])
            reply: _Ids = _Ids(ids, self._ids)
        else:
            if not is_open and self._markers[0] not in self._tokenizer.decode(ids):
                return Split(None, False, [ids])
            reply = _Text(ids, self._markers, self._tokenizer)
        return self._split(reply, is_open=is_open)

    def _split(self, reply: _Ids, *, is_open: bool) -> Split:
        pieces: list[list[int]] = []
        blocks: list[list[int]] = [[]] if is_open else []
        at = 0
        for begin, end, opens in reply.marks():
            if is_open:  # another opener in a block is no text of it
                blocks[-1] += reply.between(at, begin)
                is_open = opens
            elif opens:
                pieces.append(reply.between(at, begin))
                blocks.append([])
                is_open = True
            else:
                continue
            at = end
        rest = reply.between(at, reply.length)
        if is_open:
            blocks[-1] += rest
        else:
            pieces.append(rest)
        texts = (self._tokenizer.decode(block).strip() for block in blocks)
        text = "\n\n".join(text for text in texts if text)
        found = text if text or is_open else None
        return Split(found, is_open, [piece for piece in pieces if piece])


class _Ids:
    """A reply whose markers are ids; places are indexes."""

    def __init__(self, ids: list[int], markers: tuple[int, int]) -> None:
        self._of, self._opener = ids, markers[0]
        self._known = frozenset(markers)
        self.length = len(ids)

    def marks(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (begin, end, whether it opens) of each marker."""
        for place, number in enumerate(self._of):
            if number in self._known:
                yield place, place + 1, number == self._opener

    def between(self, begin: int, end: int) -> list[int]:
        """Return the ids between two places."""
        return self._of[begin:end]


class _Text(_Ids):
    """A reply whose markers are spelled; places are characters of its tokens' texts.

    Markers are ASCII, so that they are found although the texts of tokens that hold a part of a
    character are not those of the whole. Tokens that are partly a marker's are encoded anew from
    what is left of them: nothing of this is trained on.
    """

    def __init__(self, ids: list[int], markers: tuple[str, str], tokenizer: Tokenizer) -> None:
        self._of, self._markers, self._tokenizer = ids, markers, tokenizer
        texts = [tokenizer.decode([number]) for number in ids]
        self._text = "".join(texts)
        self._starts = [0, *accumulate(map(len, texts))]
        self.length = len(self._text)

    def marks(self) -> Iterator[tuple[int, int, bool]]:
        places = {marker: self._text.find(marker) for marker in self._markers}
        while True:
            found = [(place, marker) for marker, place in places.items() if place >= 0]
            if not found:
                return
            begin, marker = min(found)
            end = begin + len(marker)
            yield begin, end, marker == self._markers[0]
            places[marker] = self._text.find(marker, end)

    def between(self, begin: int, end: int) -> list[int]:
        first = bisect_left(self._starts, begin)
        last = bisect_right(self._starts, end) - 1
        if last < first:
            return list(self._tokenizer.encode_plain(self._text[begin:end]))
        before = self._text[begin : self._starts[first]]
        behind = self._text[self._starts[last] : end]
        encode = self._tokenizer.encode_plain
        return [
            *(encode(before) if before else ()),
            *self._of[first:last],
            *(encode(behind) if behind else ()),
        ]


def joined(contents: Iterable[str]) -> str:
    """Return the texts of pieces as one content."""
    return "\n".join(text for text in (content.strip() for content in contents) if text)
