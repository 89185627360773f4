"""How much of a text the model reads: in characters, and in tokens of its own.

Owns the cut and its marker. Never looks at what a text says. Invariants: what comes out is within
both caps, the marker included, and no character is ever split; the marker says how many characters
of the original are gone.

Unit: characters are Unicode code points; tokens are those of the text by itself, without the chat
format around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..offload import call
from ..tito.tokenizer import LONG_TEXT_CHARS
from ..types import CutSide, Renderer
from .text import clean


@dataclass(frozen=True, slots=True)
class Cap:
    """How long a text may be."""

    chars: int
    tokens: int | None = None
    """Needs `renderer`."""
    side: CutSide = "middle"
    """What of a longer one is cut away."""
    renderer: Renderer | None = None
    """Counts tokens."""

    async def of(self, text: str) -> str:
        """Return what of `text` the model reads; a long one is measured in a thread."""
        if self.tokens is None or self.renderer is None or _is_short(text, self):
            return clean(cut(text, self.chars, self.side))
        is_long = min(len(text), self.chars) > LONG_TEXT_CHARS
        return await call(is_long, cut_tokens, text, self.chars, self.tokens, self.renderer,
                          self.side)  # fmt: skip


def _is_short(text: str, cap: Cap) -> bool:
    """Return whether no vocabulary has more tokens for a text than its cap (at most one a byte)."""
    return cap.tokens is not None and len(text) < min(cap.tokens, cap.chars) and text.isascii()


def cut(text: str, limit: int, side: CutSide = "middle") -> str:
    """Return `text` within `limit` characters, with a marker where something was cut away.

    Args:
        text: whatever its length.
        limit: in characters; the marker counts. One that has no room for it keeps text alone.
        side: what is cut away: `middle` keeps a third of the room at the beginning and the rest
            at the end, `left` keeps the end, `right` keeps the beginning.
    """
    if len(text) <= limit:
        return text
    # The marker's own length depends on the number in it, which depends on the marker's length.
    room = max(limit, 0) - len(_marker(len(text)))
    if room <= 0:
        head, tail = _shares(max(limit, 0), side, marked=False)
        return text[:head] + text[len(text) - tail :]
    head, tail = _shares(room, side)
    return text[:head] + _marker(len(text) - room) + text[len(text) - tail :]


def cut_tokens(
    text: str, chars: int, tokens: int, renderer: Renderer, side: CutSide = "middle"
) -> str:
    """Return `text` within `chars` characters and `tokens` tokens, cut between two tokens.

    Args:
        text: whatever its length; what no tokenizer takes is replaced.
        chars: as the limit of `cut`.
        tokens: the marker counts. A cap that has no room for it keeps text alone.
        renderer: of the model.
        side: as in `cut`.
    """
    short = clean(cut(text, chars, side))
    if len(renderer.encode(short)) <= tokens:
        return short
    # What may stay by the cap in characters; the ends of its tokens are where it may be cut.
    most_head, most_tail = len(text), len(text)
    if len(text) > chars:
        most_head, most_tail = _shares(max(0, chars - len(_marker(len(text)))), side)
    head = _Ends(clean(text[:most_head]), renderer)
    tail = _Ends(clean(text[len(text) - most_tail :]), renderer)
    marked = len(renderer.encode(_marker(len(text)))) < tokens
    room = tokens - len(renderer.encode(_marker(len(text)))) if marked else tokens
    while room > 0:
        num_head, num_tail = _shares(room, side, marked=marked)
        before, behind = head.first(num_head), tail.last(num_tail)
        gone = len(text) - len(before) - len(behind)
        found = before + (_marker(gone) if marked else "") + behind
        # Beside the marker a text may have other tokens than by itself.
        over = len(renderer.encode(found)) - tokens
        if over <= 0 and gone > 0 and len(found) <= chars:
            return found
        room -= max(over, 1)
    return ""


class _Ends:
    """Where the tokens of a text end, in characters."""

    def __init__(self, text: str, renderer: Renderer) -> None:
        self._text = text
        pieces = renderer.pieces(renderer.encode(text))
        data = [piece.encode("utf-8", "surrogateescape") for piece in pieces]
        # In bytes: a token may end inside of a character.
        self._at = [0, *accumulate(map(len, data))]
        self._bytes = b"".join(data)

    def first(self, count: int) -> str:
        """Return the text of the first `count` tokens, without a character that is half there."""
        end = self._at[min(count, len(self._at) - 1)]
        return self._text[: len(self._bytes[:end].decode("utf-8", "ignore"))]

    def last(self, count: int) -> str:
        """Return the text of the last `count` tokens, without a character that is half there."""
        start = self._at[max(0, len(self._at) - 1 - count)]
        num_chars = len(self._bytes[start:].decode("utf-8", "ignore"))
        return self._text[max(0, len(self._text) - num_chars) :]


def _marker(num_chars: int) -> str:
    return f"[... {num_chars} characters cut ...]"


def _shares(room: int, side: CutSide, *, marked: bool = True) -> tuple[int, int]:
    """Return how much of `room` the beginning and the end of a text get."""
    head = {"left": 0, "right": room, "middle": room // 3 if marked else 0}[side]
    return head, room - head
