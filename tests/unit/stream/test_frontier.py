"""The set of terminal ids: its two forms, and what joins and moves it."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.order import MAX_GROUPS
from rollstream.frontier import MAX_BITMAP_BYTES, MAX_ID, TerminalIds
from rollstream.settings import ProducerTable


def test_terminal_ids_move_the_frontier_over_what_is_in_the_set() -> None:
    ids = TerminalIds()
    ids.add([1, 2, 5])
    assert ids.frontier == 0
    ids.add([0])
    assert (ids.frontier, ids.num_above) == (3, 1)
    assert [i in ids for i in (2, 3, 5)] == [True, False, True]


def test_terminal_ids_read_the_bitmap_of_the_queue_from_the_frontiers_byte_on() -> None:
    # Frontier 10 lies in the byte of 8..15; bits below it are set or not, and mean nothing.
    for first in (0b11000101, 0b00000101):
        ids = TerminalIds(10, bytes([first, 0b10000000]))
        assert [i for i in range(9, 20) if i in ids] == [9, 13, 15, 16]


@given(st.integers(0, 70_000), st.sets(st.integers(0, 3_000)))
def test_terminal_ids_survive_both_forms(frontier: int, offsets: set[int]) -> None:
    ids = TerminalIds(frontier)
    ids.add(frontier + offset for offset in offsets)
    assert TerminalIds(ids.frontier, ids.bitmap()) == ids
    plain = ids.to_plain()
    assert TerminalIds.from_plain(json.loads(json.dumps(plain))) == ids
    assert TerminalIds.from_plain(pickle.loads(pickle.dumps(plain))) == ids


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_terminal_ids_join_is_the_union(left: set[int], right: set[int]) -> None:
    a, b = TerminalIds(), TerminalIds()
    a.add(left)
    b.add(right)
    a.join(b)
    assert {i for i in range(70) if i in a} == left | right
    assert a.frontier not in a


def packed(bitmap: bytes, behind: bytes = b"") -> str:
    return base64.b64encode(zlib.compress(bitmap) + behind).decode()


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"above": ""}, "frontier"),
        ({"frontier": -1, "above": ""}, "frontier"),
        ({"frontier": True, "above": ""}, "frontier"),
        ({"frontier": 1 << 70, "above": ""}, "frontier"),
        ({"frontier": 1}, "above"),
        ({"frontier": 1, "above": "!!"}, "above"),
        ({"frontier": 1, "above": "eJw="}, "above"),
        ({"frontier": 1, "above": packed(b"\x80", b"more")}, "above"),
        ({"frontier": 1, "above": packed(b"\xaa" * (2 << 20))}, "larger than allowed"),
    ],
)
def test_terminal_ids_refuse_garbage_and_name_the_field(
    data: dict[str, object], names: str
) -> None:
    with pytest.raises(ValueError, match=names):
        TerminalIds.from_plain(data)


def test_the_largest_window_fits_into_a_checkpoint() -> None:
    capacity = ProducerTable.model_fields["capacity_groups"]
    largest = next(rule.le for rule in capacity.metadata if hasattr(rule, "le"))
    assert 8 * largest <= 8 * MAX_BITMAP_BYTES
    assert MAX_ID == MAX_GROUPS


def test_first_missing_is_the_lowest_id_that_nobody_accounts_for() -> None:
    ids = TerminalIds(3)
    ids.add([4, 6])
    assert ids.first_missing(8) == 3
    assert ids.first_missing(8, besides={3}) == 5
    assert ids.first_missing(8, besides={3, 5, 7}) is None
    # A total that nobody knows, or that lies behind: nothing can be missing.
    assert ids.first_missing(0) is None
    assert ids.first_missing(3) is None
