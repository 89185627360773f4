"""What of a reply is certain while it is sampled: text that no later id can change.

Owns the reading of a reply that grows, id by id and once each. Never judges a call, never says
anything that `Renderer.parse` of the whole reply would not: what may still become part of a call, a
marker or a character is held back, to the end of the reply if need be. Invariant: the texts of one
kind, joined, are a beginning of what the whole reply has of that kind.

    reasoning      as it comes, but for the space at the end of a block, which may be stripped
    content        up to the first control token that is no marker of reasoning: a call may begin
                   there (or at a text with which the family's calls begin); all behind it is held
    half a UTF-8   until it is whole; as U+FFFD only where its block ends so
    behind a stop  nothing

Cost: linear in the ids; every id is decoded at most a handful of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from .pieces import Joins
from .reasoning import Reasoning
from .tokenizer import Tokenizer

Kind: TypeAlias = Literal["reasoning_content", "content"]
REASONING: Kind = "reasoning_content"
CONTENT: Kind = "content"
Settled: TypeAlias = tuple[Kind, str]

_UNFINISHED = "\ufffd"
_MAX_CHAR_IDS = 3
"""Ids that may be the beginning of one character: a byte each."""


class Settler(Protocol):
    """Reads one reply as it grows."""

    def feed(self, ids: Sequence[int]) -> list[Settled]:
        """Return what the next sampled ids make certain, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Openings:
    """How calls may begin where no control token begins them."""

    texts: tuple[str, ...] = ()
    """Content is held from the first of them on."""
    first: str = ""
    """Content that begins with one of these characters is held as a whole."""


class Nothing:
    """Settles nothing: of formats and vocabularies that nobody here knows."""

    def feed(self, ids: Sequence[int]) -> list[Settled]:
        """Return nothing."""
        del ids
        return []


class Decoding:
    """The text of ids that come bit by bit: what it has said is what decoding all of them says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_runs = tokenizer.joins is Joins.RUNS
        self._waiting: list[int] = []
        self._retry_at = 1
        self._before: list[int] = []
        """What is decoded in front of what comes, so that its first space is no beginning."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` make whole."""
        self._waiting += ids
        if self._has_runs:
            return self._behind_runs(ids)
        if len(self._waiting) < self._retry_at:
            return ""
        for cut in range(min(_MAX_CHAR_IDS, len(self._waiting)) + 1):
            head = self._waiting[: len(self._waiting) - cut]
            text = self._tokenizer.decode(head) if head else ""
            if head and not text.endswith(_UNFINISHED):
                self._waiting = self._waiting[len(head) :]
                self._retry_at = 1
                return text
        # Bytes that are no text, however many: looked at ever less often, so that it stays linear.
        count = len(self._waiting)
        self._retry_at = count + 1 + count // 8 * 4
        return ""

    def end(self) -> str:
        """Return the text of what is left, broken characters as U+FFFD."""
        text = self._decoded(self._waiting)
        self._waiting, self._before, self._retry_at = [], [], 1
        return text

    def _behind_runs(self, ids: Sequence[int]) -> str:
        """Return the text up to the last id that is no byte: a run may go on."""
        in_run = self._tokenizer.in_run
        behind = next((n for n, number in enumerate(reversed(ids)) if not in_run(number)), None)
        if behind is None:
            return ""
        head = self._waiting[: len(self._waiting) - behind]
        text = self._decoded(head)
        self._waiting = self._waiting[len(head) :]
        # Twice, since a space alone is one that is left out.
        shows = (n for n in reversed(head) if not in_run(n) and self._tokenizer.decode([n, n]))
        last = next(shows, None)
        if last is not None:
            self._before = [last]
        elif text:
            self._before = head  # bytes, and ids that are nothing
        return text

    def _decoded(self, ids: list[int]) -> str:
        if not ids:
            return ""
        before = self._tokenizer.decode(self._before) if self._before else ""
        return self._tokenizer.decode([*self._before, *ids])[len(before) :]


class Stripped:
    """Texts that are stripped and joined, as they grow: no space at the ends, parts in between."""

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._has_said = False
        self._in_part = False
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """Return what is certain of the current part."""
        if not self._in_part:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            if text:
                self._space.append(text)
            return ""
        said = "".join(self._space) + kept
        if not self._in_part and self._has_said:
            said = self._separator + said
        self._in_part = self._has_said = True
        self._space = [text[len(kept) :]] if len(kept) < len(text) else []
        return said

    def end_part(self) -> None:
        """Begin another part, once there is text for one."""
        self._in_part, self._space = False, []


class Guard:
    """Text up to where a call may begin."""

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._tail = ""
        self._begun = False
        self.is_shut = False

    def add(self, text: str) -> str:
        """Return what of the text so far cannot be the beginning of a call."""
        if self.is_shut:
            return ""
        if not self._begun and (begins := text.lstrip()[:1]):
            self._begun = True
            if begins in self._openings.first:
                self.is_shut = True
                return ""
        if not self._openings.texts:
            return text
        text = self._tail + text
        places = [at for opening in self._openings.texts if (at := text.find(opening)) >= 0]
        if places:
            self.is_shut = True
            return text[: min(places)]
        held = max(partial(text, opening) for opening in self._openings.texts)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what was held back in vain: the text ended here."""
        tail, self._tail, self._begun = self._tail, "", False
        return "" if self.is_shut else tail


class Marked:
    """Replies whose reasoning stands between markers and whose calls begin with control tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Iterable[int],
        reasoning: Reasoning | None = None,
        window: Sequence[int] = (),
        openings: Openings | None = None,
    ) -> None:
        """Begin a reply.

        Args:
            tokenizer: of the vocabulary.
            stop_ids: that end a turn.
            reasoning: the family's, if it has any.
            window: the tail of what the engine saw; says whether it opened a block.
            openings: of calls without a control token.
        """
        self._stop_ids = frozenset(stop_ids)
        self._special = tokenizer.control_ids | self._stop_ids
        self._reasoning = reasoning
        self._finder = None if reasoning is None else _finder(tokenizer, reasoning)
        self._in_block = reasoning is not None and reasoning.is_open(window)
        self._decoding = Decoding(tokenizer)
        self._thoughts, self._content = Stripped("\n\n"), Stripped("\n")
        self._guard = Guard(openings or Openings())
        self._has_ended = self._is_held = False

    def feed(self, ids: Sequence[int]) -> list[Settled]:
        """Return what the next sampled ids make certain, in order."""
        if self._has_ended:
            return []
        end = next((i for i, number in enumerate(ids) if number in self._stop_ids), len(ids))
        self._has_ended = end < len(ids)
        said: list[Settled] = []
        if self._finder is None:
            self._text(list(ids[:end]), said)
        else:
            for piece in self._finder.add(list(ids[:end]), self):
                if isinstance(piece, bool):
                    self._mark(piece, said)
                else:
                    self._text(piece, said)
        return [(kind, text) for kind, text in said if text]

    @property
    def in_block(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._in_block

    def _mark(self, opens: bool, said: list[Settled]) -> None:
        if self._in_block:
            if not opens:
                said.append((REASONING, self._thoughts.add(self._decoding.end())))
                self._thoughts.end_part()
                self._in_block = False
            return  # another opener in a block is no text of it
        left = self._decoding.end()  # also of what is held: the block is decoded by itself
        if not self._is_held:
            said.append((CONTENT, self._content.add(self._guard.add(left))))
            said.append((CONTENT, self._content.add(self._guard.end())))
            self._content.end_part()
        self._in_block = True

    def _text(self, ids: list[int], said: list[Settled]) -> None:
        if self._in_block:
            said.append((REASONING, self._thoughts.add(self._decoding.add(ids))))
            return
        if self._is_held:
            return
        held = next((i for i, number in enumerate(ids) if number in self._special), len(ids))
        text = self._decoding.add(ids[:held])
        if held < len(ids):
            self._is_held = True
            text += self._decoding.end()
        said.append((CONTENT, self._content.add(self._guard.add(text))))
        self._is_held = self._is_held or self._guard.is_shut


class _IdFinder:
    """Finds markers that are tokens."""

    def __init__(self, markers: tuple[int, int]) -> None:
        self._opener, self._closer = markers

    def add(self, ids: list[int], reader: Marked) -> Iterable[list[int] | bool]:
        """Yield ids between markers, and True or False for one that opens or closes."""
        begin = 0
        for place, number in enumerate(ids):
            is_opener = number == self._opener
            if is_opener or (number == self._closer and reader.in_block):
                if begin < place:
                    yield ids[begin:place]
                yield is_opener
                begin = place + 1
        if begin < len(ids):
            yield ids[begin:]


class _TextFinder:
    """Finds markers that are spelled, in the text of each token.

    Cuts as `reasoning` does: what is left of a token that is partly a marker's is encoded anew.
    """

    def __init__(self, tokenizer: Tokenizer, markers: tuple[str, str]) -> None:
        self._tokenizer, self._markers = tokenizer, markers
        self._tokens: list[tuple[list[int], str]] = []
        """Not given out yet: (its ids, its text)."""
        self._passed = 0
        """So many characters of them are no marker."""

    def add(self, ids: list[int], reader: Marked) -> Iterable[list[int] | bool]:
        """Yield ids between markers, and True or False for one that opens or closes."""
        self._tokens += [([number], self._tokenizer.decode([number])) for number in ids]
        while (found := self._next(in_block=reader.in_block)) is not None:
            begin, marker = found
            before = self._take(begin, cut=True)
            if before:
                yield before
            self._take(len(marker), cut=True)
            self._passed = 0
            yield marker == self._markers[0]
        text = self._waiting()
        held = max(partial(text[self._passed :], marker) for marker in self._markers)
        before = self._take(len(text) - held, cut=False)
        if before:
            yield before

    def _waiting(self) -> str:
        return "".join(text for _, text in self._tokens)

    def _next(self, *, in_block: bool) -> tuple[int, str] | None:
        """Return where the next marker is that counts, and which."""
        text = self._waiting()
        while True:
            places = [(text.find(marker, self._passed), marker) for marker in self._markers]
            found = min(((at, marker) for at, marker in places if at >= 0), default=None)
            if found is None or in_block or found[1] == self._markers[0]:
                return found
            self._passed = found[0] + len(found[1])  # it closes nothing: text

    def _take(self, size: int, *, cut: bool) -> list[int]:
        """Return the ids of the first `size` characters, and let go of them.

        Args:
            size: of the waiting text.
            cut: what is left of a token across the edge is encoded anew, on either side of it;
                else such a token stays whole, and waits.
        """
        ids: list[int] = []
        taken = at = 0
        for own, text in self._tokens:
            if at + len(text) > size:
                break
            ids += own
            at += len(text)
            taken += 1
        self._tokens = self._tokens[taken:]
        if cut and at < size:
            text = self._tokens[0][1]
            encode = self._tokenizer.encode_plain
            ids += encode(text[: size - at])
            self._tokens[0] = (list(encode(text[size - at :])), text[size - at :])
            at = size
        self._passed = max(0, self._passed - at)
        return ids


def partial(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _finder(tokenizer: Tokenizer, reasoning: Reasoning) -> _IdFinder | _TextFinder:
    if reasoning.marker_ids is not None:
        return _IdFinder(reasoning.marker_ids)
    return _TextFinder(tokenizer, reasoning.markers)
