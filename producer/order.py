"""Which row a group index stands for.

Owns the mapping, both ways of nothing else: group_index = epoch * rows + position, where position
is the row's place in the seeded shuffle of that epoch. Never does I/O, keeps no position.
Invariant: a pure function of (rows, epochs, seed), the same in every process and release, because
a restarted producer must enqueue under an id exactly what it stood for before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from rollstream.errors import ConfigError
from rollstream.group import INDEX_STRIDE

MAX_GROUPS = 2**63 // INDEX_STRIDE
"""The `index` of the last sample must still be an int64."""


class Order:
    """The order of all groups of a run.

    Raises:
        ConfigError: there would be more than `MAX_GROUPS`.
    """

    def __init__(self, rows: int, *, epochs: int = 1, shuffle_seed: int | None = None) -> None:
        self.rows, self.epochs, self.shuffle_seed = rows, epochs, shuffle_seed
        if self.total > MAX_GROUPS:
            raise ConfigError(
                f"producer.epochs = {epochs}: {rows} rows make {self.total} groups, more than a "
                f"run can number ({MAX_GROUPS})"
            )

    @property
    def total(self) -> int:
        """Number of group indexes: they are 0..total-1."""
        return self.rows * self.epochs

    def row(self, group_index: int) -> int:
        """Return the row of a group."""
        epoch, position = divmod(group_index, self.rows)
        if not 0 <= epoch < self.epochs:
            raise IndexError(f"group {group_index} of a run of {self.total}")
        if self.shuffle_seed is None:
            return position
        return int(permutation(self.rows, self.shuffle_seed, epoch)[position])


@lru_cache(maxsize=2)
def permutation(rows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the shuffle of one epoch: [rows] uint32, 4 bytes a row.

    numpy's `RandomState` is frozen for ever (NEP 19); its newer generators may change.
    """
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    order = np.arange(rows, dtype=np.uint32)
    state.shuffle(order)
    order.setflags(write=False)
    return order
