"""Where the producer is: a scan over all group indexes from the run's frontier on.

Owns the position of one scan. Never keeps it anywhere: it begins again from what Redis says.
Invariant: an index that the scan has passed is terminal or was enqueued, as far as this process
was told; when that may no longer hold (a rewind, another server), a new scan begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.queue.answers import StateAnswer


@dataclass(slots=True)
class Scan:
    """One pass from the frontier to the end of the data."""

    total: int
    """Group indexes are 0..total-1."""
    state: StateAnswer
    """The frontier that it began at."""
    position: int = field(init=False)
    """Every index below was passed."""

    def __post_init__(self) -> None:
        """Begin at the frontier."""
        self.position = min(self.state.frontier, self.total)

    @property
    def epoch(self) -> int:
        """The run's rewind epoch when the scan began."""
        return self.state.epoch

    @property
    def finished(self) -> bool:
        """Whether every index was passed."""
        return self.position >= self.total

    def next_ids(self, count: int) -> list[int]:
        """Return the next indexes to enqueue, at most `count`; those known as terminal are passed.

        (A run's terminal indexes lie scattered above its frontier: their rows are not read again.)
        """
        while not self.finished and self._is_terminal(self.position):
            self.position += 1
        ids: list[int] = []
        index = self.position
        while len(ids) < count and index < self.total:
            if not self._is_terminal(index):
                ids.append(index)
            index += 1
        return ids

    def settle(self, ids: Sequence[int], settled: Sequence[bool]) -> None:
        """Pass the indexes up to the first of `ids` that was not settled.

        Later ones that were settled are asked for again: they answer that they are there.
        """
        for group_index, done in zip(ids, settled, strict=True):
            if not done:
                self.position = group_index
                return
        if ids:
            self.position = ids[-1] + 1

    def _is_terminal(self, group_index: int) -> bool:
        offset = group_index - 8 * (self.state.frontier // 8)
        byte, bit = divmod(offset, 8)
        bitmap = self.state.bitmap
        return byte < len(bitmap) and bool(bitmap[byte] & (0x80 >> bit))
