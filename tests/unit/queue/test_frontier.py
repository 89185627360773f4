"""The frontier and the terminal ids above it: what a checkpoint is, and rewinding to one."""

from __future__ import annotations

import random

import pytest

from rollstream.errors import RunLost
from rollstream.queue import calls
from tests.queue_bench import Bench, clocked_scripts, fake_bench, pack_ids, unpack_ids


def test_frontier_moves_over_everything_terminal_and_stops_at_the_first_gap(bench: Bench) -> None:
    bench.connect()
    for gid, frontier in ((1, 0), (3, 0), (0, 2), (2, 4), (9, 4)):
        bench.ack(gid)
        assert bench.call(calls.state()).frontier == frontier
    assert bench.terminal() == {0, 1, 2, 3, 9}


@pytest.mark.parametrize("rebase", [8, 16, 65_536])
def test_terminal_ids_are_a_set_whatever_their_order_and_the_rebase(rebase: int) -> None:
    change = ("*", "local REBASE_AFTER = 65536", f"local REBASE_AFTER = {rebase}")
    bench = fake_bench(clocked_scripts(change))
    bench.connect()
    rng, model = random.Random(rebase), set[int]()
    for start in range(0, 160, 20):
        ids = list(range(start, start + 20))
        rng.shuffle(ids)
        for gid in ids:
            bench.ack(gid)
            model.add(gid)
            state = bench.call(calls.state())
            assert bench.terminal() == model
            assert state.frontier == next(i for i in range(1000) if i not in model)
            assert state.frontier not in unpack_ids(state.frontier, state.bitmap)
    if rebase < 100:
        assert int(bench.m("base")) >= 152
        assert "cur" not in bench.key_names() or bench.client.strlen(f"{bench.key}cur") <= 3


def test_state_raises_run_lost_where_there_is_no_run(bench: Bench) -> None:
    bench.client.flushall()
    with pytest.raises(RunLost, match="no such run"):
        bench.call(calls.state())


@pytest.mark.parametrize("frontier", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("above", [(), (1,), (3, 20)])
def test_rewind_sets_exactly_the_state_of_the_checkpoint(
    bench: Bench, frontier: int, above: tuple[int, ...]
) -> None:
    bench.connect()
    bench.ack(*range(40))
    ids = {frontier + offset for offset in above}
    answer = bench.call(calls.rewind("trainer", "r1", frontier, pack_ids(frontier, ids)))
    assert (answer.taken, answer.frontier, answer.epoch) == (False, frontier, 2)
    assert bench.terminal() == set(range(frontier)) | ids
    bench.ack(frontier)
    wanted = set(range(frontier + 1)) | ids
    assert bench.terminal() == wanted
    assert bench.call(calls.state()).frontier == next(i for i in range(999) if i not in wanted)
    assert bench.queue.info().rewind_id == "r1"  # type: ignore[union-attr]  # it is open


def test_rewind_joins_a_bitmap_whose_first_ids_are_terminal(bench: Bench) -> None:
    bench.connect()
    answer = bench.call(calls.rewind("trainer", "r1", 10, pack_ids(10, {10, 11, 13})))
    assert answer.frontier == 12
    assert bench.terminal() == set(range(12)) | {13}


def test_rewind_withdraws_what_was_trained_and_what_lies_beyond_the_window() -> None:
    bench = fake_bench(W=16)
    bench.connect()
    bench.ack(*range(8))
    bench.enqueue(8, 9, 10, 22)
    bench.lease(limit=3)
    bench.ready(12)
    bench.deliver(12)
    answer = bench.call(calls.rewind("trainer", "r1", 2, pack_ids(2, {9, 12})))
    assert (answer.seen, answer.beyond) == (2, 1)
    assert bench.terminal() == {0, 1, 9, 12}
    assert [bench.state(g) for g in (8, 9, 10, 12, 22)] == ["open", None, "open", None, None]
    counters = bench.counters()
    assert (counters["dropped:seen"], counters["dropped:withdrawn"]) == (2, 1)
    assert bench.queue.info().delivered == 0  # type: ignore[union-attr]  # it is open
    assert bench.enqueue(2, 9, 17) == ["new", "done", "new"]
    bench.audit()


def test_rewind_of_an_emptied_server_continues_at_the_checkpoint(bench: Bench) -> None:
    bench.client.flushall()
    bench.set_clock(bench.now_ms)
    assert bench.open() == ["created", "running"]
    bench.connect(number=7)
    bench.call(calls.rewind("trainer", "r9", 1_000_000, pack_ids(1_000_000, {1_000_003})))
    assert bench.enqueue(5, 999_999, 1_000_000, 1_000_003) == ["done", "done", "new", "done"]
    assert bench.client.strlen(f"{bench.key}cur") < 10


def test_rewind_again_with_another_id_is_another_rewind(bench: Bench) -> None:
    bench.connect()
    bench.ack(0, 1)
    assert bench.call(calls.rewind("trainer", "r1", 1, b"")).epoch == 2
    assert bench.call(calls.rewind("trainer", "r2", 0, b"")).epoch == 3
    assert bench.terminal() == set()


def test_an_id_far_above_is_never_a_gigantic_bitmap(bench: Bench) -> None:
    bench.connect()
    assert bench.ack(2**33) == ["lost"]
    assert bench.client.strlen(f"{bench.key}cur") == 0
