"""Which row a group index stands for: the same for ever."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from producer.order import MAX_GROUPS, Order, permutation
from rollstream.errors import ConfigError
from rollstream.group import INDEX_STRIDE, sample_index


def test_order_without_a_seed_is_the_files_own_in_every_epoch() -> None:
    order = Order(3, epochs=2)
    assert order.total == 6
    assert [order.row(g) for g in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_order_uses_every_row_once_an_epoch_and_shuffles_each_differently(rows: int) -> None:
    order = Order(rows, epochs=3, shuffle_seed=5)
    epochs = [[order.row(e * rows + p) for p in range(rows)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    if rows == 1000:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert epochs[0] != list(range(rows))


def test_order_of_a_seed_is_what_it_was_in_earlier_releases() -> None:
    # Golden: a change here would train running jobs on other prompts than their ids stand for.
    order = Order(10, epochs=2, shuffle_seed=7)
    assert [order.row(g) for g in range(20)] == GOLDEN


GOLDEN = [4, 5, 9, 8, 1, 7, 6, 0, 2, 3, 8, 6, 9, 5, 0, 7, 3, 4, 1, 2]


def test_order_is_the_same_in_another_process() -> None:
    code = (
        "from producer.order import Order; o = Order(50, epochs=2, shuffle_seed=3);"
        "print([o.row(g) for g in range(100)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    order = Order(50, epochs=2, shuffle_seed=3)
    assert done.stdout.strip() == str([order.row(g) for g in range(100)])


def test_order_differs_by_seed() -> None:
    assert not np.array_equal(permutation(100, 1, 0), permutation(100, 2, 0))


def test_permutation_costs_four_bytes_a_row() -> None:
    assert permutation(1000, 1, 0).nbytes == 4000


def test_order_refuses_more_groups_than_an_index_can_number() -> None:
    assert sample_index(MAX_GROUPS - 1, INDEX_STRIDE - 1) == 2**63 - 1
    Order(1, epochs=MAX_GROUPS)
    with pytest.raises(ConfigError, match=r"producer\.epochs"):
        Order(2, epochs=MAX_GROUPS)


@pytest.mark.parametrize("group_index", [-1, 6])
def test_order_refuses_an_index_outside_the_run(group_index: int) -> None:
    with pytest.raises(IndexError):
        Order(3, epochs=2).row(group_index)
