"""Token ids as arrays, and as the JSON that request bodies are joined from.

Owns the two conversions, and how far two sequences agree. Never tokenizes. Invariant: ids are int32
arrays in memory, and every id is written as JSON once in its life, however many requests carry it.

Axis: L ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rollstream.sample import TokenIds

from ..types import PromptIds


def as_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Return `ids` as an int32 array, the same one where it is such an array already.

    Shape: [L]

    Raises:
        ValueError: no whole numbers, or some that int32 cannot hold: a cast would make other ids
            of them, silently.
    """
    array = np.asarray(ids)
    if array.dtype != np.int32 and array.size:
        cast = array.astype(np.int32) if array.dtype.kind in "iu" else None
        if cast is None or not np.array_equal(cast, array):
            raise ValueError(f"token ids must be whole numbers of 32 bits, not {array.dtype}")
        array = cast
    return np.ascontiguousarray(array, dtype=np.int32)


def ids_json(ids: TokenIds) -> bytes:
    """Return `ids` as comma-separated decimals without brackets; empty for no ids."""
    # msgspec has no use for numpy scalars, and a list that dies here costs the collector nothing.
    return msgspec.json.encode(ids.tolist())[1:-1]


def prompt_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> PromptIds:
    """Return the ids of a rendered prompt with their JSON, to be shared by a group's members.

    The array is read-only: one member must not be able to change what the others hold.
    """
    held = np.array(as_ids(ids))
    held.flags.writeable = False
    return PromptIds(ids=held, json=ids_json(held))


def shared_length(a: TokenIds, b: TokenIds) -> int:
    """Return how many ids `a` and `b` have in common from their beginnings.

    Arrays that begin at one address agree as far as both reach, so views of the array that a
    session appends to are never compared with what they share.
    """
    count = min(len(a), len(b))
    if same_memory(a, b):
        return count
    start, block = 0, _FIRST_BLOCK
    while start < count:  # growing blocks: an early difference costs little, a late one few calls
        end = min(start + block, count)
        equal = _compare(a[start:end], b[start:end])
        if not equal.all():
            return start + int(np.argmin(equal))
        start, block = end, block * 8
    return count


def first_difference(expected: TokenIds, got: TokenIds) -> int:
    """Return the first index at which `got` does not have `expected`, -1 where it begins with it.

    The end of `got` is a difference.
    """
    count = shared_length(expected, got)
    return -1 if count == len(expected) else count


def same_memory(a: TokenIds, b: TokenIds) -> bool:
    """Return whether two arrays are views of the same ids from the same one on."""
    return (
        a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.strides == b.strides
        and a.dtype == b.dtype
    )


_FIRST_BLOCK = 1024


def _compare(a: TokenIds, b: TokenIds) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = a == b
    return equal
