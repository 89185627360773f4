"""Where rows come from: one table of schemes, one protocol.

Owns the closed table `SCHEMES` and what a source promises. Never turns a row into a group: that
is `producer.rows`. Invariant: row k of a source is the same row for the whole run, so the
fingerprint stands for all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.errors import ConfigError

MAX_REASON = 400
"""Characters of a reason that are kept: its beginning and its end."""


class BadRow(ConfigError):
    """A row cannot be a prompt group.

    Attributes:
        where: file and line, or the source's own words.
        reason: what is wrong with it.
    """

    def __init__(self, where: str, reason: str) -> None:
        if len(reason) > MAX_REASON:
            # It repeats what was wrong, which may be a whole row of megabytes.
            reason = f"{reason[: MAX_REASON // 2]} … {reason[-MAX_REASON // 2 :]}"
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the source has it."""

    where: str
    """For people: `prompts.jsonl:17`."""
    values: dict[str, Any]
    env: str = ""
    """The environment whose source it comes from; empty where rows name theirs."""


class Rows(Protocol):
    """Rows by number, of one source or of several."""

    @property
    def fingerprint(self) -> str:
        """Short and readable: the scheme and a hash of everything that decides the rows."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def row(self, number: int) -> Row:
        """Return row `number`.

        Raises:
            BadRow: it cannot be read.
            ConfigError: the source itself is not what it was when it was opened.
        """
        ...

    def close(self) -> None:
        """Give back what reading needs; no row can be read afterwards."""
        ...


class Source(Rows, Protocol):
    """Rows of one file or data set."""

    @property
    def num_checked(self) -> int:
        """How many rows (from 0) are cheap enough to be checked before anything is enqueued."""
        ...


def open_source(spec: str, key: str = "producer.source") -> Source:
    """Open `scheme:rest`, as it stands under `key` of the configuration.

    Raises:
        ConfigError: no source, an unknown scheme, or what the source says is wrong with it.
    """
    scheme, colon, rest = spec.partition(":")
    if not spec:
        raise ConfigError(f"{key} is empty: give jsonl:PATH or reasoning_gym:NAME?size=…&seed=…")
    opener = SCHEMES.get(scheme)
    if opener is None or not colon or not rest:
        near = difflib.get_close_matches(scheme, SCHEMES, 1)
        hint = f"; did you mean {near[0]}:…?" if near and opener is None else ""
        raise ConfigError(
            f"{key} = {spec!r}: expected jsonl:PATH or reasoning_gym:NAME?size=…&seed=…{hint}"
        )
    try:
        return opener(rest)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _open_jsonl(rest: str) -> Source:
    from .jsonl import JsonlSource

    return JsonlSource(rest)


def _open_reasoning_gym(rest: str) -> Source:
    from .gym import GymSource  # imports reasoning_gym, which takes most of a second

    return GymSource(rest)


SCHEMES: dict[str, Callable[[str], Source]] = {
    "jsonl": _open_jsonl,
    "reasoning_gym": _open_reasoning_gym,
}
"""Closed on purpose: a source runs in the producer, so data never names one."""
