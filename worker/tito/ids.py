"""Token ids as arrays, and as the JSON that request bodies are joined from.

Owns the two conversions. Never tokenizes. Invariant: ids are int32 arrays in memory, and every id
is written as JSON once in its life, however many requests carry it.

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
    """
    return np.ascontiguousarray(ids, dtype=np.int32)


def ids_json(ids: TokenIds) -> bytes:
    """Return `ids` as comma-separated decimals without brackets; empty for no ids."""
    # msgspec has no use for numpy scalars, and a list that dies here costs the collector nothing.
    return msgspec.json.encode(ids.tolist())[1:-1]


def prompt_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> PromptIds:
    """Return the ids of a rendered prompt with their JSON, to be shared by a group's members.

    The array is read-only: one member must not be able to change what the others hold.
    """
    held = np.array(ids, dtype=np.int32)
    held.flags.writeable = False
    return PromptIds(ids=held, json=ids_json(held))
