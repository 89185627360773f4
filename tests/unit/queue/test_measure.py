"""What scripts keep and answer for those who measure a run: ends by environment, ages, presence."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.answers import Measured
from rollstream.queue.calls import BlockedTime
from rollstream.queue.reads import all_counters, ends_by_env
from tests.queue_bench import Bench, fake_bench


def ends(bench: Bench) -> dict[tuple[str, str], int]:
    return ends_by_env(all_counters(bench.client.hgetall(f"{bench.key}c")))


def entry_ms(bench: Bench, place: int) -> int:
    entries: Any = bench.client.xrange(f"{bench.key}ready")
    return int(entries[place][0].split(b"-")[0])


def measure(bench: Bench) -> Measured:
    measured = bench.call(calls.measure())
    assert measured is not None
    return measured


def finish(bench: Bench, gid: int, env: str, drop: DropReason | None = None) -> None:
    bench.enqueue(gid, env=env)
    bench.complete(bench.lease())
    (entry,) = bench.queue.read_full("a", count=9, block_s=0)
    bench.judge(entry, drop)


# --- ends by environment -------------------------------------------------------------------------
def test_an_end_is_counted_by_environment_beside_the_total(bench: Bench) -> None:
    bench.connect()
    finish(bench, 0, "math")
    finish(bench, 1, "a:b", DropReason.ZERO_STD)
    finish(bench, 2, "")
    bench.ack(0, 2)
    assert ends(bench) == {("math", "acked"): 1, ("a:b", "dropped:zero_std"): 1}
    assert bench.counters()["acked"] == 2
    assert bench.counters()["dropped:zero_std"] == 1
    bench.audit()


def test_counters_are_read_without_those_of_environments(bench: Bench) -> None:
    bench.connect()
    finish(bench, 0, "math")
    bench.ack(0)
    assert not [name for name in bench.counters() if name.startswith("env:")]


def test_an_evaluation_is_not_among_the_ends_of_environments(bench: Bench) -> None:
    bench.connect()
    bench.enqueue("e:1", env="math")
    bench.complete(bench.lease())
    bench.ack("e:1")
    assert bench.counters()["e.acked"] == 1
    assert ends(bench) == {}


@pytest.mark.parametrize("how", ["requeue", "stale"])
def test_a_group_that_begins_anew_keeps_its_environment(how: str) -> None:
    bench = fake_bench(max_stale=0, on_stale="requeue")
    bench.connect()
    bench.enqueue(0, env="math")
    bench.lease()
    if how == "requeue":
        assert bench.call(calls.requeue("0", 0)) == "requeued"
    else:
        bench.call(calls.set_version(5))
        assert bench.sweep().evicted == 1
    bench.call(calls.withdraw("0"))
    assert ends(bench) == {("math", "dropped:withdrawn"): 1}


def test_a_group_whose_hash_vanished_ends_in_no_environment(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(0, env="math")
    bench.client.delete(f"{bench.key}g:0")
    bench.advance(2 * int(bench.budgets["lease_ms"]))
    assert bench.counters()["dropped:withdrawn"] == 1
    assert ends(bench) == {}


# --- ages ----------------------------------------------------------------------------------------
def test_an_empty_run_has_no_ages(bench: Bench) -> None:
    assert measure(bench).oldest_s == {"queued": 0, "full": 0, "ready": 0, "delivered": 0}


def test_the_oldest_queued_group_is_found_behind_a_younger_one_of_a_lower_priority(
    bench: Bench,
) -> None:
    bench.enqueue(0, priority=3)
    bench.set_clock(bench.now_ms + 4000)
    bench.enqueue(1, priority=0)
    bench.enqueue("e:1")
    bench.set_clock(bench.now_ms + 500)
    assert measure(bench).oldest_s["queued"] == 4.5


def test_a_group_that_began_anew_is_as_old_as_its_new_life(bench: Bench) -> None:
    bench.enqueue(0)
    bench.set_clock(bench.now_ms + 4000)
    bench.call(calls.requeue("0", 0))
    bench.set_clock(bench.now_ms + 500)
    assert measure(bench).oldest_s["queued"] == 0.5
    bench.enqueue(1)
    bench.set_clock(bench.now_ms + 1000)
    assert measure(bench).oldest_s["queued"] == 1.5


def test_a_group_in_front_that_began_anew_hides_no_older_one(bench: Bench) -> None:
    bench.enqueue(0)
    bench.set_clock(bench.now_ms + 100)
    bench.enqueue(1)
    bench.set_clock(bench.now_ms + 4000)
    bench.call(calls.requeue("0", 0))
    assert measure(bench).oldest_s["queued"] == 4.0


def test_ready_and_delivered_have_the_ages_of_their_oldest_entries(bench: Bench) -> None:
    bench.connect()
    for gid in (0, 1, 2):
        bench.ready(gid)
    server_ms = entry_ms(bench, 1)
    bench.deliver(0, 2)
    bench.set_clock(server_ms + 7000)
    measured = measure(bench).oldest_s
    assert measured["ready"] == 7.0
    assert measured["delivered"] >= 7.0
    bench.ack(0, 2)
    assert measure(bench).oldest_s["delivered"] == 0
    assert measure(bench).oldest_s["full"] == 0


def test_the_first_ready_group_is_found_behind_a_page_of_delivered_ones() -> None:
    bench = fake_bench(cap=200)
    bench.connect()
    for gid in range(70):
        bench.ready(gid, n=1)
    bench.deliver(*range(69))
    bench.set_clock(entry_ms(bench, -1) + 3000)
    assert measure(bench).oldest_s["ready"] == 3.0


def test_a_foreign_entry_has_no_age(bench: Bench) -> None:
    bench.client.xadd(f"{bench.key}ready", {"x": "y"})
    bench.client.zadd(f"{bench.key}q", {"foreign": 1.0})
    assert measure(bench).oldest_s == {"queued": 0, "full": 0, "ready": 0, "delivered": 0}


# --- who is there --------------------------------------------------------------------------------
def test_who_was_not_seen_for_four_leases_is_not_alive_though_nobody_sweeps(bench: Bench) -> None:
    lease_ms = int(bench.budgets["lease_ms"])
    bench.call(calls.present("producer", "p"))
    bench.call(calls.present("worker", "w"))
    assert (measure(bench).producers, measure(bench).workers) == (1, 1)
    bench.set_clock(bench.now_ms + 3 * lease_ms)
    assert measure(bench).workers == 1
    bench.set_clock(bench.now_ms + 2 * lease_ms)
    assert (measure(bench).producers, measure(bench).workers) == (0, 0)


def test_a_trainer_waits_as_long_as_it_said_and_not_behind_its_end(bench: Bench) -> None:
    assert measure(bench).trainer == "none"
    bench.connect()
    assert measure(bench).trainer == "here"  # of a version that says nothing of itself
    bench.call(calls.attend("trainer", "name", wait_ms=1500))
    assert (measure(bench).trainer, measure(bench).connection) == ("waiting", "name")
    bench.set_clock(bench.now_ms + 1500)
    assert measure(bench).trainer == "here"
    bench.call(calls.attend("trainer", "name", wait_ms=1500))
    bench.call(calls.attend("trainer", "name"))
    assert measure(bench).trainer == "here"
    bench.call(calls.attend("trainer", "name", leaving=True))
    assert measure(bench).trainer == "left"


def test_a_trainer_that_was_taken_over_says_nothing_of_the_next(bench: Bench) -> None:
    bench.connect()
    bench.connect("other", 2)
    assert bench.call(calls.attend("trainer", "-", leaving=True)) == "taken"
    assert measure(bench).trainer == "here"


# --- blocked producers ---------------------------------------------------------------------------
def blocked(bench: Bench, process: str, from_ms: int, to_ms: int) -> int:
    call = calls.present("producer", "host:1", blocked=BlockedTime(process, from_ms, to_ms))
    bench.call(call)
    bench.call(call)  # its answer was lost
    return bench.counters().get("blocked_ms", 0)


def test_blocked_time_is_counted_once_whatever_is_repeated(bench: Bench) -> None:
    assert blocked(bench, "a", 0, 300) == 300
    assert blocked(bench, "a", 300, 350) == 350
    assert blocked(bench, "a", 300, 400) == 400  # the answer before never came
    assert blocked(bench, "b", 0, 10) == 410  # a new process of the same name


def test_blocked_time_that_the_server_forgot_is_counted_again(bench: Bench) -> None:
    blocked(bench, "a", 0, 300)
    before: dict[str, Any] = {key: bench.client.dump(bench.key + key) for key in ("c", "wb")}
    blocked(bench, "a", 300, 900)
    for key, data in before.items():
        bench.client.restore(bench.key + key, 0, data, replace=True)
    assert blocked(bench, "a", 900, 1000) == 1000


def test_nothing_is_kept_of_a_producer_that_left_or_is_gone(bench: Bench) -> None:
    blocked(bench, "a", 0, 300)
    bench.call(calls.present("producer", "host:1", leaving=True))
    assert "wb" not in bench.key_names()
    blocked(bench, "a", 300, 400)
    bench.advance(6 * int(bench.budgets["lease_ms"]))
    assert "wb" not in bench.key_names()
    assert bench.counters()["blocked_ms"] == 400
