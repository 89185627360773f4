"""KV of requests that ended, kept for the next turn of their trajectory.

Owns the kept entries and their bytes. Never computes KV, and never decides what may be shared: a
key (salt of the request) does, and the engine empties the store whenever weights change.
Invariant: what `best` returns is a prefix of the prompt, id by id; the bytes stay within the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .task import Experts

Ids = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Kept:
    """The KV of one sequence."""

    salt: str
    ids: Ids
    kv: Any
    num_bytes: int
    whole: bool
    """Only all of it can be used, and only once (a state that cannot be cut or copied)."""
    experts: Experts | None


def num_common(a: Ids, b: Ids) -> int:
    """Return how many ids two sequences begin with alike."""
    num = min(len(a), len(b))
    different = np.flatnonzero(a[:num] != b[:num])
    return int(different[0]) if len(different) else num


class PrefixStore:
    """Kept entries, the least recently used dropped first.

    Attributes:
        num_bytes: held now.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def keep(self, entry: Kept) -> None:
        """Add an entry, in place of those that it extends; too large a one is dropped."""
        if entry.num_bytes > self._max_bytes:
            return
        for key, other in list(self._entries.items()):
            covered = other.salt == entry.salt and len(other.ids) <= len(entry.ids)
            if covered and num_common(other.ids, entry.ids) == len(other.ids):
                self._drop(key)
        self._entries[id(entry)] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def best(
        self, prompt: Sequence[int], salt: str, limit: int, *, experts: bool
    ) -> tuple[Kept, int] | None:
        """Return the entry that shares the longest usable prefix, and its length.

        Args:
            prompt: of the new request.
            salt: its own.
            limit: a longer prefix is of no use.
            experts: entries without routed experts are of no use.
        """
        wanted = np.asarray(prompt, dtype=np.int64)
        found: tuple[Kept, int] | None = None
        for entry in self._entries.values():
            if entry.salt != salt or (experts and entry.experts is None):
                continue
            num = min(num_common(entry.ids, wanted), limit)
            if entry.whole and num < len(entry.ids):
                continue
            if num > (found[1] if found else 0):
                found = entry, num
        if found is not None:
            key = id(found[0])
            if found[0].whole:
                self._drop(key)
            else:
                self._entries.move_to_end(key)
        return found

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.num_bytes = 0

    def _drop(self, key: int) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
