"""The ids that never come again: every id below a frontier, and some above it.

Owns this set in a trainer's memory and its two forms: the queue's bitmap and the checkpoint's
plain data. Never talks to Redis. Invariant: the frontier itself is never in the set, so two equal
sets are equal in both forms.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

MAX_BITMAP_BYTES = 1 << 20
"""A checkpoint whose bitmap inflates beyond this is refused: the window of the largest
`producer.capacity_groups` fits, and reading one costs no more than some hundred megabytes."""
MAX_ID = 1 << 51
"""Ids are lower, so that every `Sample.index` is an int64."""


class TerminalIds:
    """A set of group ids, most of them below its frontier."""

    __slots__ = ("_above", "_frontier")

    def __init__(self, frontier: int = 0, bitmap: bytes = b"") -> None:
        """Take the queue's form.

        Args:
            frontier: every id below it is in the set.
            bitmap: its first byte holds id 8 * (frontier // 8), most significant bit first.
        """
        self._frontier = frontier
        self._above: set[int] = set()
        if bitmap:
            self._above = _ids_of(frontier, bitmap)
            self._settle()

    @property
    def frontier(self) -> int:
        """The lowest id that is not in the set."""
        return self._frontier

    @property
    def num_above(self) -> int:
        """How many ids above the frontier are in the set (what it costs to keep)."""
        return len(self._above)

    def __contains__(self, group_index: int) -> bool:
        return group_index < self._frontier or group_index in self._above

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TerminalIds):
            return NotImplemented
        return self._frontier == other._frontier and self._above == other._above

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"TerminalIds(frontier={self._frontier}, above={len(self._above)})"

    def add(self, group_indexes: Iterable[int]) -> None:
        """Add ids; the frontier moves over everything that is in the set."""
        self._above.update(i for i in group_indexes if i >= self._frontier)
        self._settle()

    def join(self, other: TerminalIds) -> None:
        """Add every id of `other`."""
        self._frontier = max(self._frontier, other._frontier)
        self._above |= other._above
        self._above = {i for i in self._above if i >= self._frontier}
        self._settle()

    def first_missing(self, total: int, besides: Container[int] = ()) -> int | None:
        """Return the lowest id below `total` that is neither in the set nor in `besides`."""
        above = range(self._frontier, total)
        return next((i for i in above if i not in self._above and i not in besides), None)

    def copy(self) -> TerminalIds:
        """Return a set of its own."""
        twin = TerminalIds(self._frontier)
        twin._above = set(self._above)
        return twin

    def bitmap(self) -> bytes:
        """Return the queue's form of what is above the frontier."""
        if not self._above:
            return b""
        base = self._frontier // 8 * 8
        bits = np.zeros(max(self._above) - base + 1, dtype=np.uint8)
        bits[np.fromiter(self._above, dtype=np.int64, count=len(self._above)) - base] = 1
        return np.packbits(bits).tobytes()

    def to_plain(self) -> dict[str, Any]:
        """Return the checkpoint's form: plain data that JSON and pickle keep alike."""
        packed = zlib.compress(self.bitmap(), 6)
        return {"frontier": self._frontier, "above": base64.b64encode(packed).decode()}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> TerminalIds:
        """Return the set that `to_plain` was asked of.

        Raises:
            ValueError: not such data.
        """
        frontier, above = data.get("frontier"), data.get("above")
        if type(frontier) is not int or not 0 <= frontier <= MAX_ID:
            raise ValueError(f"'frontier' is {frontier!r}, expected an integer from 0 to {MAX_ID}")
        if not isinstance(above, str):
            raise ValueError(f"'above' is {type(above).__name__}, expected text")
        inflate = zlib.decompressobj()
        try:
            bitmap = inflate.decompress(base64.b64decode(above, validate=True), MAX_BITMAP_BYTES)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"'above' cannot be read: {error}") from None
        if inflate.unconsumed_tail or inflate.unused_data or not inflate.eof:
            raise ValueError("'above' is truncated, or larger than allowed")
        return cls(frontier, bitmap)

    def _settle(self) -> None:
        while self._frontier in self._above:
            self._above.discard(self._frontier)
            self._frontier += 1


def _ids_of(frontier: int, bitmap: bytes) -> set[int]:
    base = frontier // 8 * 8
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8))) + base
    return {int(i) for i in ids if i >= frontier}
