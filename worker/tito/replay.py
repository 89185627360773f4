"""Routed experts (R3) and indexer choices of a trajectory, joined from what its replies brought.

Owns which rows are wanted next, the check that patches join, what is missing, and the one array at
the end. Never decodes a reply, never fills a hole with somebody else's rows. Invariant: row r of
the result is what was routed when token r was fed in, out of the newest reply that fed exactly
these tokens, or -1 throughout where no reply brought it.

The last sampled token was never fed in, so L tokens have L-1 rows. A reply's patch begins at the
row that was asked for and ends before its own last token; one that begins at row 0 is whole and
replaces what is before it. Patches are kept as they came and copied once.

Axes: L tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..types import Replay

Rows: TypeAlias = npt.NDArray[Any]
NOT_FED = -1
"""Every value of a row that no reply brought: of an observation behind the last call, or of a reply
that was aborted before it could say."""
_BLOCK = 1024
_SERVED_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16))
_INT32 = np.iinfo(np.int32)
_SLACK_BYTES = 4096
"""What a payload may have beside its rows (the head of an `.npy` file) and still be kept whole."""


@dataclass(frozen=True, slots=True)
class Patch:
    """What one reply brought, seen from the tokens of the result."""

    replay: Replay | None
    fed: int
    """Where the rows of a whole reply end: at its prompt and sampled ids, less one."""
    valid: int
    """Up to which row the reply fed exactly the result's tokens."""
    needed: int
    """Up to which row the result is incomplete without rows; 0 where it can do without this reply's
    (it sampled nothing, it was aborted, or nothing of it is left)."""
    record: int = 1
    """Number of the reply, from 1, for messages."""


def patch_of(
    replay: Replay | None,
    record: int,
    *,
    start: int,
    count: int,
    size: int | None = None,
    aborted: bool = False,
) -> Patch:
    """Return the patch of one call.

    Args:
        replay: what the reply brought.
        record: its number, from 1.
        start: ids of its prompt.
        count: ids that it sampled.
        size: how many of them the result holds; None is all.
        aborted: it may have ended before it could say what was routed.
    """
    held = count if size is None else size
    needed = 0 if held == 0 or aborted else start + held - 1
    return Patch(replay, start + count - 1, start + held, needed, record)


def check_shapes(patches: Iterable[Patch], name: str = "routed_experts") -> None:
    """Check that every patch has the rows of its reply, all of one (layers, top_k).

    Raises:
        ValueError: names the record, from 1.
    """
    known: tuple[int, ...] | None = None
    for patch in patches:
        if patch.replay is None:
            continue
        record = patch.record
        rows, start = patch.replay.rows, patch.replay.start
        if rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise ValueError(
                f"{name} of record {record} is {rows.dtype} of shape {rows.shape}; expected whole "
                "numbers [rows, layers, top_k]"
            )
        if (
            rows.itemsize > 4
            and rows.size
            and not (_INT32.min <= rows.min() <= rows.max() <= _INT32.max)
        ):
            raise ValueError(f"{name} of record {record} holds numbers that are no int32")
        if len(rows) != patch.fed - start:
            raise ValueError(
                f"{name} of record {record} has {len(rows)} rows from row {start}; its prompt and "
                f"reply fed {patch.fed} tokens"
            )
        if len(rows) == 0:
            continue  # says nothing about how many choices a row has
        if known is not None and rows.shape[1:] != known:
            raise ValueError(
                f"{name} of record {record} has (layers, top_k) {rows.shape[1:]}; the records "
                f"before it have {known}"
            )
        known = rows.shape[1:]


def check_starts(patches: Iterable[Patch], name: str = "routed_experts") -> None:
    """Check that every patch begins at the rows held so far, or is whole.

    Rows of a record that brought nothing are left to later ones; what nobody brings is a gap (see
    `first_gap`), not an error here. Behind trimmed ids a patch may also begin one row earlier:
    their session does not count the last id that it kept as fed.

    Raises:
        ValueError: names the record, from 1, and both rows.
    """
    expected = earliest = 0
    is_open = False
    for patch in patches:
        if patch.replay is None:
            is_open |= patch.needed > expected
            continue
        start = patch.replay.start
        if start in (0, earliest, expected):
            is_open = False
        elif not (is_open and start > expected):
            raise ValueError(
                f"{name} of record {patch.record} starts at row {start}; expected {expected}"
            )
        expected = min(patch.fed, patch.valid)
        earliest = expected if patch.valid > patch.fed else max(0, patch.valid - 1)


def first_gap(patches: Sequence[Patch]) -> int | None:
    """Return the place of the first patch whose rows are not all there; None where none is."""
    _, missing = _pieces(patches, max((patch.needed for patch in patches), default=0))
    if not missing:
        return None
    row = min(start for start, _ in missing)
    return next(place for place, patch in enumerate(patches) if patch.needed > row)


def gap_text(place: int, patches: Sequence[Patch], name: str = "routed_experts") -> str:
    """Return in words what `first_gap` found."""
    patch = patches[place]
    if patch.replay is not None:
        return (
            f"{name} of record {patch.record} starts at row {patch.replay.start}: rows are missing"
        )
    rows = patch.fed - max((one.fed for one in patches[:place]), default=0)
    return f"record {patch.record} has no {name} payload for its {rows} rows"


def joined(patches: Sequence[Patch], num_rows: int) -> Rows | None:
    """Return the rows of all patches as one new array, -1 where none has them.

    None where no patch has a payload at all: then there is no replay data.

    Shape: [num_rows, layers, top_k], in the dtype in which the engine served them; int32 where rows
        are missing, since a narrower type of an engine's has no -1.
    """
    held = [patch.replay.rows for patch in patches if patch.replay is not None]
    if not held:
        return None
    shape = next((rows.shape[1:] for rows in held if len(rows)), held[0].shape[1:])
    pieces, missing = _pieces(patches, num_rows)
    result = np.empty((num_rows, *shape), _dtype_of(pieces, missing))
    for start, rows in pieces:
        result[start : start + len(rows)] = rows
    for start, end in missing:
        result[start:end] = NOT_FED
    return result


def _dtype_of(pieces: Sequence[tuple[int, Rows]], missing: Sequence[tuple[int, int]]) -> Any:
    """Return the narrowest dtype of a server's that holds every piece, and -1 where that is said.

    Rows that were parked with -1 behind them come back as int32; together with what was served
    since, they are what one reply would have been.
    """
    served = [rows.dtype for _, rows in pieces if rows.dtype in _SERVED_UNSIGNED]
    if missing or not served:
        return np.dtype(np.int32)
    widest = max(served, key=lambda dtype: dtype.itemsize)
    most = np.iinfo(widest).max
    for _, rows in pieces:
        if rows.dtype not in _SERVED_UNSIGNED and not (rows.min() >= 0 and rows.max() <= most):
            return np.dtype(np.int32)
    return widest


def num_known(rows: Rows) -> int:
    """Return how many rows of a joined array are known: all before the -1 rows at its end."""
    end = len(rows)
    if rows.dtype.kind == "u":
        return end
    while end > 0:
        start = max(0, end - _BLOCK)
        known = np.flatnonzero((rows[start:end] != NOT_FED).any(axis=(1, 2)))
        if len(known):
            return start + int(known[-1]) + 1
        end = start
    return 0


class ReplayRows:
    """The patches of one replay field while a trajectory grows."""

    __slots__ = ("_last", "_name", "_patches", "known")

    def __init__(self, name: str) -> None:
        """Begin without rows; `name` is for messages."""
        self._name = name
        self._patches: list[Patch] = []
        self._last: list[Patch] = []
        """The last patch that has rows, if any: later ones must have its shape."""
        self.known = 0
        """Rows that are there, from row 0 on: where the next patch begins."""

    @property
    def is_dormant(self) -> bool:
        """Whether no reply brought anything so far."""
        return all(patch.replay is None for patch in self._patches)

    def resume(self, rows: Rows) -> None:
        """Go on from the joined rows of a sample that was parked; what is -1 at its end is open."""
        self.known = known = num_known(rows)
        patch = Patch(Replay(0, np.array(rows[:known])), known, known, known)
        self._patches.append(patch)
        self._last = [patch] if known else []

    def add(self, given: Replay | None, start: int, count: int, *, aborted: bool) -> None:
        """Take what one reply brought.

        Args:
            given: None where it brought nothing.
            start: ids of its prompt.
            count: ids that it sampled.
            aborted: as for `patch_of`.

        Raises:
            ValueError: it does not join what is there.
        """
        record = len(self._patches) + 1
        patch = patch_of(given, record, start=start, count=count, aborted=aborted)
        if given is not None:
            if given.start not in (0, self.known):
                raise ValueError(
                    f"{self._name} of record {record} starts at row {given.start}; "
                    f"expected {self.known}"
                )
            check_shapes([*self._last, patch], self._name)
            if given.start == 0:  # whole: what was there before can go
                self._patches = [replace(one, replay=None) for one in self._patches]
            patch = replace(patch, replay=Replay(given.start, _own(given.rows)))
            self._last = [patch] if len(given.rows) else self._last
            self.known = patch.fed
        self._patches.append(patch)

    def joined(self, num_rows: int) -> Rows | None:
        """Return the rows of the whole trajectory; None where no reply brought any.

        Raises:
            ValueError: the rows of a reply are missing.
        """
        if self.is_dormant:
            return None
        record = first_gap(self._patches)
        if record is not None:
            raise ValueError(gap_text(record, self._patches, self._name))
        return joined(self._patches, num_rows)


def _own(rows: Rows) -> Rows:
    """Return `rows`, copied where they keep something larger alive; a whole payload is kept."""
    base: Any = rows
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    held = base.nbytes if isinstance(base, np.ndarray | memoryview) else len(base)
    return rows if held <= rows.nbytes + _SLACK_BYTES else rows.copy()


def _pieces(
    patches: Sequence[Patch], num_rows: int
) -> tuple[list[tuple[int, Rows]], list[tuple[int, int]]]:
    """Return what to copy as (first row, rows), each row once, and the stretches without any."""
    missing = [(0, num_rows)] if num_rows > 0 else []
    pieces: list[tuple[int, Rows]] = []
    for patch in reversed(patches):
        if not missing:
            break
        if patch.replay is None:
            continue
        first, rows = patch.replay.start, patch.replay.rows
        left: list[tuple[int, int]] = []
        for start, end in missing:
            low, high = max(start, first), min(end, patch.valid, first + len(rows))
            if low >= high:
                left.append((start, end))
                continue
            pieces.append((low, rows[low - first : high - first]))
            left += [(a, b) for a, b in ((start, low), (high, end)) if a < b]
        missing = left
    return pieces, missing
