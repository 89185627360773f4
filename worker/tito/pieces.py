"""What one token id stands for, as bytes, and how the texts of ids become one.

Owns how a vocabulary spells bytes. Never decodes a sequence, never encodes. Invariant: the bytes of
the ids of a reply, joined, are the UTF-8 of its text (but for a space that a decoder leaves out at
the very beginning), so half a character is told as what it is and not as U+FFFD.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE = "\u2581"


class Joins(Enum):
    """What decoding several ids at once means for the text of each."""

    BYTES = auto()
    """Their bytes are joined: only a character across a cut sees its neighbours."""
    RUNS = auto()
    """So are runs of ids that are one byte each, which are text as a whole or not at all; a space
    at the very beginning is left out."""
    UNKNOWN = auto()


def joins_of(inner: tokenizers.Tokenizer) -> Joins:
    """Return how a vocabulary's decoder joins texts."""
    if inner.decoder is None:
        return Joins.UNKNOWN
    made_of = json.loads(inner.decoder.__getstate__())
    parts = made_of.get("decoders", [made_of])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return Joins.BYTES
    ends = any(part.get("stop") for part in parts)
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    return Joins.RUNS if known and not ends and "ByteFallback" in kinds else Joins.UNKNOWN


def is_byte(token: str) -> bool:
    """Return whether a token is spelled as one byte."""
    return _BYTE.match(token) is not None


class PieceBytes:
    """The bytes of each id of one vocabulary."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Find out how the vocabulary spells bytes: by its decoder, which undoes it."""
        self._inner = inner
        self._added = {
            number: token.content.encode("utf-8", "replace")
            for number, token in inner.get_added_tokens_decoder().items()
        }
        # What a decoder is made of is only in its own JSON; a vocabulary without one is plain text.
        made_of = b"" if inner.decoder is None else inner.decoder.__getstate__()
        self._alphabet = _alphabet() if b'"ByteLevel"' in made_of else None
        self._falls_back = b'"ByteFallback"' in made_of

    def of(self, number: int) -> bytes:
        """Return the bytes of one id, none for an id that the vocabulary lacks."""
        if number in self._added:
            return self._added[number]
        token = self._inner.id_to_token(number)
        if token is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:  # a token that is spelled as text
                return token.encode("utf-8", "replace")
        if self._falls_back and (found := _BYTE.match(token)):
            return bytes.fromhex(found[1])
        return token.replace(_SPACE, " ").encode("utf-8", "replace")


def _alphabet() -> dict[str, int]:
    """Return the byte of every character of the byte-level alphabet.

    Source: GPT-2's `bytes_to_unicode`: printable bytes are themselves, the others follow U+0100.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
