"""Which row a group index stands for.

Owns the mapping, both ways of nothing else: group_index = epoch * rows + position, where position
is the row's place in the seeded shuffle of that epoch. Never does I/O, keeps no position.
Invariant: a pure function of (rows, epochs, seed), the same in every process and release, because
a restarted producer must enqueue under an id exactly what it stood for before.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rollstream.errors import ConfigError
from rollstream.group import INDEX_STRIDE

MAX_GROUPS = 2**63 // INDEX_STRIDE
"""The `index` of the last sample must still be an int64."""
KEPT_SHUFFLES = 2
"""A scan crosses from one epoch to the next, never further at once."""


class GroupOrder(Protocol):
    """Which row each group index stands for."""

    @property
    def total(self) -> int:
        """Number of group indexes: they are 0..total-1."""
        ...

    def row(self, group_index: int) -> int:
        """Return the number of the row.

        Raises:
            IndexError: no group of this run.
        """
        ...


class Order:
    """The order of all groups of a run.

    Raises:
        ConfigError: there would be more than `MAX_GROUPS`.
    """

    def __init__(
        self,
        rows: int,
        *,
        epochs: int = 1,
        shuffle_seed: int | None = None,
        salt: int | None = None,
    ) -> None:
        """Begin.

        Args:
            rows: how many there are.
            epochs: how often each is used.
            shuffle_seed: None keeps the order of the source.
            salt: tells the shuffles of several orders with one seed apart.
        """
        self.rows, self.epochs, self.shuffle_seed = rows, epochs, shuffle_seed
        self._salt = () if salt is None else (salt,)
        self._shuffles: dict[int, np.ndarray[Any, np.dtype[np.uint32]]] = {}
        check_total(rows, epochs)

    @property
    def total(self) -> int:
        """Number of group indexes: they are 0..total-1."""
        return self.rows * self.epochs

    def row(self, group_index: int) -> int:
        """Return the row of a group."""
        if not 0 <= group_index < self.total:
            raise IndexError(f"group {group_index} of a run of {self.total}")
        return self.cycle(group_index)

    def cycle(self, place: int) -> int:
        """Return the row of a place in the order of all epochs, which has no end."""
        epoch, position = divmod(place, self.rows)
        if self.shuffle_seed is None:
            return position
        shuffle = self._shuffles.get(epoch)
        if shuffle is None:
            if len(self._shuffles) >= KEPT_SHUFFLES:
                self._shuffles.pop(next(iter(self._shuffles)))
            shuffle = permutation(self.rows, self.shuffle_seed, epoch, *self._salt)
            self._shuffles[epoch] = shuffle
        return int(shuffle[position])


def check_total(rows: int, epochs: int) -> None:
    """Refuse more groups than a run can number.

    Raises:
        ConfigError: there would be more than `MAX_GROUPS`.
    """
    if rows * epochs > MAX_GROUPS:
        raise ConfigError(
            f"producer.epochs = {epochs}: {rows} rows make {rows * epochs} groups, more than a "
            f"run can number ({MAX_GROUPS})"
        )


def permutation(
    rows: int, seed: int, epoch: int, *salt: int
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the shuffle of one epoch: [rows] uint32, 4 bytes a row.

    numpy's `RandomState` is frozen for ever (NEP 19); its newer generators may change.
    """
    entropy = (seed, epoch, *salt)
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(entropy)))
    order = np.arange(rows, dtype=np.uint32)
    state.shuffle(order)
    order.setflags(write=False)
    return order
