"""Several environments, each with a source of its own, as one source and one order.

Owns which environment and row a group index stands for where `[env.NAME]` tables have a `source`.
Never reads a file itself. Invariant: a pure function of the index (`rhythm.py` says whose turn it
is, and the k-th turn of an environment is the k-th row of its own endless order), so a restarted
producer enqueues the same; rows of all sources are numbered one behind the other.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.errors import ConfigError
from rollstream.settings import EnvTable, Settings

from .order import GroupOrder, Order, check_total
from .rhythm import Rhythm, whole_weights
from .sources import Row, Source, open_source


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a mixture."""

    env: str
    weight: int
    """Groups of one period."""
    source: Source
    first: int
    """Number of its first row in the mixture."""


class Mixture:
    """Rows of several sources; each belongs to the environment that its source stands in."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        # Shares, not weights: 0.5 and 0.5 make the same groups as 1 and 1.
        told = (f"{part.env}={part.weight} {part.source.fingerprint}" for part in parts)
        self.fingerprint = "; ".join(told)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the groups, by environment."""
        period = sum(part.weight for part in self.parts)
        return {part.env: part.weight / period for part in self.parts}

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return sum(len(part.source) for part in self.parts)

    def row(self, number: int) -> Row:
        """Return a row, with its environment."""
        part = next(part for part in reversed(self.parts) if number >= part.first)
        return dataclasses.replace(part.source.row(number - part.first), env=part.env)

    def close(self) -> None:
        """Close every source."""
        for part in self.parts:
            part.source.close()


AnyRows = Source | Mixture
"""What a run's prompts come from."""


class MixedOrder:
    """The order of all groups of a mixture.

    `epochs` counts groups: as many as all sources have rows, so often. An environment whose weight
    is larger than its share of the rows goes through its own rows more often, each time in another
    shuffle.

    Raises:
        ConfigError: there would be more groups than a run can number.
    """

    def __init__(
        self, mixture: Mixture, *, epochs: int = 1, shuffle_seed: int | None = None
    ) -> None:
        self._total = len(mixture) * epochs
        check_total(len(mixture), epochs)
        self._rhythm = Rhythm([part.weight for part in mixture.parts])
        self._parts = [
            # Its name too decides a shuffle: sources of one length go different ways.
            (part.first, Order(len(part.source), shuffle_seed=shuffle_seed, salt=_salt(part.env)))
            for part in mixture.parts
        ]

    @property
    def total(self) -> int:
        """Number of group indexes: they are 0..total-1."""
        return self._total

    def row(self, group_index: int) -> int:
        """Return the row of a group, numbered as the mixture numbers them."""
        if not 0 <= group_index < self._total:
            raise IndexError(f"group {group_index} of a run of {self._total}")
        whose, before = self._rhythm.turn(group_index)
        first, order = self._parts[whose]
        return first + order.cycle(before)


def open_rows(settings: Settings) -> AnyRows:
    """Open what the configuration names: one source, or those of the environments.

    Raises:
        ConfigError: no source, both kinds, or what is wrong with one of them.
    """
    producer, mixed = settings.producer, settings.mixed_envs()
    if not mixed:
        weighted = [name for name, env in settings.env.items() if "weight" in env.model_fields_set]
        if weighted:
            raise ConfigError(
                f"env.{weighted[0]}.weight is set, and env.{weighted[0]}.source is not: weights "
                "mix the sources of environments; rows of producer.source name theirs"
            )
        return open_source(producer.source)
    if producer.source:
        name = next(iter(mixed))
        raise ConfigError(
            f"producer.source and env.{name}.source are both set: give every environment a "
            "source of its own, or take theirs away and let rows name them (column env)"
        )
    for name, env in settings.env.items():
        if "weight" in env.model_fields_set and name not in mixed:
            raise ConfigError(f"env.{name}.weight needs env.{name}.source: it has no prompts")
    return open_mixture(mixed)


def open_mixture(envs: Mapping[str, EnvTable]) -> Mixture:
    """Open the sources of environments, in the order of their names.

    Raises:
        ConfigError: as `open_source`; a weight that comes to nothing.
    """
    names = sorted(envs)  # not that of the file: moving a table changes no run
    weights = whole_weights({name: envs[name].weight for name in names})
    parts: list[Part] = []
    try:
        first = 0
        for name in names:
            source = open_source(envs[name].source, key=f"env.{name}.source")
            parts.append(Part(name, weights[name], source, first))
            first += len(source)
    except BaseException:
        Mixture(parts).close()
        raise
    return Mixture(parts)


def order_of(settings: Settings, rows: AnyRows) -> GroupOrder:
    """Return which row of `rows` each group index stands for.

    Raises:
        ConfigError: more groups than a run can number.
    """
    producer = settings.producer
    if isinstance(rows, Mixture):
        return MixedOrder(rows, epochs=producer.epochs, shuffle_seed=producer.shuffle_seed)
    return Order(len(rows), epochs=producer.epochs, shuffle_seed=producer.shuffle_seed)


def checked_of(rows: AnyRows) -> list[range]:
    """Return the rows that are cheap enough to check at the start: a range for each source."""
    if isinstance(rows, Mixture):
        return [range(p.first, p.first + p.source.num_checked) for p in rows.parts]
    return [range(rows.num_checked)]


def _salt(env: str) -> int:
    return zlib.crc32(env.encode())
