"""How much is in what a template made, parts that are there twice counted twice.

Owns the count. Never changes a value. Invariant: whatever a template prints, compares or joins was
weighed when it was made, so no list of lists of the same list hides 2**60 words in sixty.

Values of a template do not change (the sandbox sees to it), so each is looked into once.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

ONE = 8
"""What anything but a text weighs: a place in a list."""
_MAX_PLACES = 1_000_000


class Weights:
    """The weights of one render."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}  # what is held keeps its id
        self._places = 0

    def of(self, value: Any) -> int:
        """Return the characters of a text, or of what a list, a tuple or an object holds."""
        if self._places > _MAX_PLACES:
            self._known.clear()
            self._places = 0
        return self._of(value)

    def joined(self, made: Any, left: Any, right: Any) -> None:
        """Keep the weight of two lists in one, without a look at what was weighed before."""
        if isinstance(made, list | tuple):
            weight = self.of(left) + self.of(right)
            self._places += len(made) + 1
            self._known[id(made)] = (made, weight)

    def _of(self, value: Any) -> int:
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return ONE
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        parts = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        weight = ONE + sum(ONE + self._of(part) for part in parts)
        self._places += len(value) + 1
        self._known[id(value)] = (value, weight)
        return weight
