"""How far two sequences of ids agree: the one comparison that merges and histories rest on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from worker.tito.ids import as_ids, first_difference, prompt_ids, same_memory, shared_length
from worker.tito.trajectory import Trajectory

LENGTH = 20_000
"""More than the first blocks in which ids are compared."""


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 1025, 9215, 9216, 9217, LENGTH - 1])
def test_the_first_difference_is_found_wherever_it_is(at: int) -> None:
    a = np.arange(LENGTH, dtype=np.int32)
    b = a.copy()
    b[at] += 1
    assert shared_length(a, b) == shared_length(b, a) == at
    assert first_difference(a, b) == at
    b[min(at + 1, LENGTH - 1) :] += 1
    assert shared_length(a, b) == at


@pytest.mark.parametrize("length", [0, 1, 1024, 5000])
def test_a_shorter_sequence_is_shared_whole_and_its_end_is_a_difference(length: int) -> None:
    a = np.arange(LENGTH, dtype=np.int32)
    short = a[:length].copy()
    assert shared_length(a, short) == shared_length(short, a) == length
    assert first_difference(short, a) == -1
    assert first_difference(a, short) == length


def test_views_agree_only_where_they_are_of_the_same_ids() -> None:
    a = np.arange(10, dtype=np.int32)
    assert same_memory(a[:3], a[:7])
    assert not same_memory(a, a[1:])
    assert not same_memory(a, a[::2])
    assert not same_memory(a, a.view(np.int16))
    assert shared_length(a, a[::2]) == 1


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5, 2**32 + 5]), np.array([2**31], np.uint32), np.array([1.7, 2.0]), [1, 2.5],
        [1, 2**40], np.array([True]),
    ],
)  # fmt: skip
def test_ids_that_a_cast_would_turn_into_others_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers of 32 bits"):
        as_ids(ids)
    with pytest.raises(ValueError, match="whole numbers of 32 bits"):
        Trajectory(prompt_ids([1]), ()).add_observation(ids)
    with pytest.raises(ValueError, match="whole numbers of 32 bits"):
        prompt_ids(ids)


@pytest.mark.parametrize(
    "ids", [[3, 4], (3, 4), np.array([3, 4]), np.array([3, 4], ">i4"), np.array([3, 0, 4])[::2]]
)
def test_ids_of_any_integer_type_are_what_they_were(ids: Any) -> None:
    assert (as_ids(ids).tolist(), as_ids(ids).dtype) == ([3, 4], np.int32)
    held = Trajectory(prompt_ids([1]), ())
    held.add_observation(ids)
    assert held.request().pieces == (b"1", b"3,4")
    assert len(as_ids([])) == 0
