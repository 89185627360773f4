"""How far two sequences of ids agree: the one comparison that merges and histories rest on."""

from __future__ import annotations

import numpy as np
import pytest

from worker.tito.ids import first_difference, same_memory, shared_length

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
