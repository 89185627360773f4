"""The scan: from the frontier on, past what is terminal, back to what was not settled."""

from __future__ import annotations

import pytest

from producer.frontier import Scan
from rollstream.queue.answers import StateAnswer


def a_scan(
    total: int, frontier: int = 0, terminal: frozenset[int] = frozenset(), epoch: int = 1
) -> Scan:
    """Return a scan whose bitmap is written as the `state` script answers it."""
    base = 8 * (frontier // 8)
    top = max(terminal, default=base - 1)
    bitmap = bytearray((top - base) // 8 + 1)
    for group_index in (*range(base, frontier), *terminal):
        if group_index <= top or group_index < frontier:
            while len(bitmap) <= (group_index - base) // 8:
                bitmap.append(0)
            bitmap[(group_index - base) // 8] |= 0x80 >> (group_index - base) % 8
    return Scan(total, StateAnswer(frontier, bytes(bitmap), epoch))


@pytest.mark.parametrize("frontier", [0, 1, 7, 8, 9, 20])
def test_scan_begins_at_the_frontier_and_passes_terminal_ids(frontier: int) -> None:
    terminal = frozenset({frontier + 1, frontier + 2, frontier + 9, frontier + 30})
    scan = a_scan(frontier + 40, frontier, terminal)
    expected = [g for g in range(frontier, frontier + 40) if g not in terminal]
    seen: list[int] = []
    while not scan.finished:
        ids = scan.next_ids(7)
        seen += ids
        scan.settle(ids, [True] * len(ids))
    assert seen == expected


def test_scan_returns_to_the_first_id_that_was_not_settled() -> None:
    scan = a_scan(10)
    assert scan.next_ids(4) == [0, 1, 2, 3]
    scan.settle([0, 1, 2, 3], [True, False, True, False])
    assert scan.next_ids(4) == [1, 2, 3, 4]


def test_scan_is_finished_where_all_that_is_left_is_terminal() -> None:
    scan = a_scan(5, 2, frozenset({2, 3, 4}))
    assert scan.next_ids(4) == []
    assert scan.finished


def test_scan_of_a_frontier_beyond_the_data_is_finished() -> None:
    assert a_scan(3, 8).finished
