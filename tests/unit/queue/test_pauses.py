"""Pauses and their deadlines, what workers confirm, and what the run says of its weights."""

from __future__ import annotations

import pytest

from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer
from rollstream.queue.keys import MAX_ENGINES_BYTES
from rollstream.queue.reads import RunInfo
from tests.queue_bench import Bench

LEASE_MS = 15_000


def _info(bench: Bench) -> RunInfo:
    info = bench.queue.info()
    assert info is not None
    return info


def _words(bench: Bench) -> list[tuple[str, str]]:
    _, words = bench.queue.read_control("0-0", block_s=0)
    return [(word["op"], word["arg"]) for word in words]


# --- pauses --------------------------------------------------------------------------------------
def test_a_pause_ends_at_its_deadline_and_everybody_hears_so(bench: Bench) -> None:
    bench.enqueue(0)
    seq = bench.call(calls.pause("abort", 20)).control_seq
    bench.advance(19_999)
    assert (_info(bench).state, _info(bench).pause_mode) == ("paused", "abort")
    assert _info(bench).paused_s == pytest.approx(19.999, abs=0.001)
    assert _info(bench).pause_left_s == pytest.approx(0.001, abs=0.001)
    bench.advance(1)
    info = _info(bench)
    assert (info.state, info.pause_mode, info.paused_s) == ("running", "", 0.0)
    assert info.pause_left_s is None
    assert info.control_seq == seq + 1
    assert _words(bench) == [("pause", "abort"), ("resume", "")]
    assert bench.counters() == {"enqueued": 1, "pauses": 1, "pauses_expired": 1}
    assert len(bench.lease()) == 2


def test_a_deadline_of_a_group_goes_on_where_an_expired_pause_stopped_it(bench: Bench) -> None:
    bench.enqueue(0, timeout_ms=10_000)
    bench.lease()
    bench.advance(4_000)
    bench.call(calls.pause("keep", 60))
    bench.advance(60_000)
    assert _info(bench).state == "running"
    assert bench.state(0) == "open"
    bench.advance(5_999)
    assert bench.state(0) == "open"
    bench.advance(1)
    assert bench.state(0) == "full"


def test_a_pause_without_a_deadline_lasts(bench: Bench) -> None:
    bench.call(calls.pause())
    bench.advance(100 * LEASE_MS)
    assert (_info(bench).state, _info(bench).pause_left_s) == ("paused", None)


def test_a_second_pause_replaces_mode_and_deadline(bench: Bench) -> None:
    first = bench.call(calls.pause("keep", 10)).control_seq
    bench.advance(9_000)
    assert bench.call(calls.pause("keep", 10)).control_seq == first, "nothing new to hear"
    bench.advance(9_000)
    assert _info(bench).state == "paused", "its deadline began anew"
    assert bench.call(calls.pause("abort", 0)).control_seq == first + 1
    bench.advance(10 * LEASE_MS)
    assert (_info(bench).state, _info(bench).pause_mode) == ("paused", "abort")
    assert bench.counters()["pauses"] == 1
    assert bench.call(calls.resume()).state == "running"
    bench.call(calls.pause("keep"))
    assert bench.m("pause_until") == "0"


def test_a_deadline_does_not_run_while_the_server_is_away(bench: Bench) -> None:
    bench.call(calls.pause("keep", 60))
    bench.set_clock(bench.now_ms + 3_600_000)
    bench.sweep()
    assert _info(bench).state == "paused"


@pytest.mark.parametrize("end", [calls.abort_run("x"), calls.fail_run("x")])
def test_an_overdue_pause_of_a_run_that_ended_resumes_nothing(
    bench: Bench, end: calls.ScriptCall[str]
) -> None:
    bench.call(calls.pause("keep", 1))
    state = bench.call(end)
    bench.advance(2_000)
    assert _info(bench).state in (state, "ended")
    assert "pauses_expired" not in bench.counters()


# --- confirmations -------------------------------------------------------------------------------
def test_confirmations_name_every_present_worker_and_what_it_said_last(bench: Bench) -> None:
    bench.enqueue(0)
    bench.lease("silent")
    bench.advance(4_000)
    for in_flight in (3, 0):
        answer = bench.call(calls.confirm("w", 7, in_flight, b'[{"url": "http://e:1"}, 3]'))
        assert (answer.state, answer.version, answer.control_seq) == ("running", 0, 0)
    silent, said = sorted(bench.queue.confirmations(), key=lambda c: c.worker)
    assert (silent.control_seq, silent.in_flight, silent.engines) == (-1, 0, b"")
    assert silent.engine_states() == []
    assert (said.worker, said.control_seq, said.in_flight) == ("w", 7, 0)
    assert said.engine_states() == [{"url": "http://e:1"}]
    assert silent.age_s - said.age_s == pytest.approx(4.0)


def test_a_confirmation_goes_with_its_worker(bench: Bench) -> None:
    for worker in ("leaves", "dies"):
        bench.call(calls.confirm(worker, 1, 0))
    bench.call(calls.present("producer", "dies", leaving=True))
    bench.call(calls.present("worker", "leaves", leaving=True))
    assert [c.worker for c in bench.queue.confirmations()] == ["dies"]
    bench.advance(5 * LEASE_MS)
    assert bench.queue.confirmations() == []
    assert "wc" not in bench.key_names()


def test_engines_that_are_too_many_to_tell_are_left_out(bench: Bench) -> None:
    fits, too_large = b"x" * MAX_ENGINES_BYTES, b"x" * (MAX_ENGINES_BYTES + 1)
    bench.call(calls.confirm("a", 1, 2, fits))
    bench.call(calls.confirm("b", 1, 2, too_large))
    a, b = sorted(bench.queue.confirmations(), key=lambda c: c.worker)
    assert (a.engines, b.engines, b.control_seq, b.in_flight) == (fits, b"", 1, 2)


@pytest.mark.parametrize("record", [b"", b"\xff\xfe", b"one 2 []", b"5", b"-1 0 []"])
def test_a_record_that_is_none_of_ours_confirms_nothing(bench: Bench, record: bytes) -> None:
    bench.call(calls.confirm("w", 1, 0))
    bench.client.hset(f"{bench.key}wc", "w", record)
    (said,) = bench.queue.confirmations()
    assert (said.control_seq, said.in_flight, said.engine_states()) == (-1, 0, [])


def test_there_are_no_confirmations_of_no_run(bench: Bench) -> None:
    bench.client.flushall()
    bench.set_clock(bench.now_ms)
    assert bench.queue.confirmations() == []


# --- labels and engines --------------------------------------------------------------------------
def test_a_label_is_known_before_its_version_is_current(bench: Bench) -> None:
    bench.call(calls.set_version(1, "one"))
    bench.call(calls.set_label(2, "two"))
    info = _info(bench)
    assert (info.version, info.version_label) == (1, "one")
    assert info.labels == {"one": 1, "two": 2}
    bench.call(calls.set_version(2, "two"))
    assert _words(bench) == [("version", "1"), ("label", "2"), ("version", "2")]


def test_a_label_that_comes_back_means_the_newer_version(bench: Bench) -> None:
    bench.call(calls.set_label(3, "again"))
    bench.call(calls.set_label(5, "again"))
    bench.call(calls.set_label(4, "again"))
    assert _info(bench).labels == {"again": 5}


def test_a_number_that_was_a_label_means_its_own_version_once_that_has_no_other_name(
    bench: Bench,
) -> None:
    bench.call(calls.set_version(3, "7"))
    bench.call(calls.set_version(7))
    assert _info(bench).labels == {"7": 7}


def test_the_newest_labels_are_kept(bench: Bench) -> None:
    for version in range(1, 71):
        bench.call(calls.set_version(version, f"step-{version}"))
    assert _info(bench).labels == {f"step-{v}": v for v in range(7, 71)}
    seq = _info(bench).control_seq
    for _ in range(2):
        assert bench.call(calls.set_label(1, "late")).control_seq == seq, "nothing to hear of"
    assert "late" not in _info(bench).labels


def test_a_label_whose_version_is_damaged_goes_first(bench: Bench) -> None:
    for version in range(1, 65):
        bench.call(calls.set_label(version, f"step-{version}"))
    bench.client.hset(f"{bench.key}lb", "step-40", "no number")
    bench.call(calls.set_label(65, "step-65"))
    assert _info(bench).labels == {f"step-{v}": v for v in range(1, 66) if v != 40}


def test_a_version_without_a_label_names_none(bench: Bench) -> None:
    bench.call(calls.set_version(1))
    assert _info(bench).labels == {}
    with pytest.raises(ValueError, match="empty"):
        calls.set_label(2, "")
    with pytest.raises(ValueError, match="201 characters"):
        calls.set_version(2, "x" * 201)


def test_engines_of_the_run_are_none_until_somebody_names_them(bench: Bench) -> None:
    assert _info(bench).engines is None
    bench.call(calls.set_engines(["http://a:1", "http://b:2"]))
    assert _info(bench).engines == ("http://a:1", "http://b:2")
    bench.call(calls.set_engines([]))
    assert _info(bench).engines == ()
    bench.call(calls.set_engines(None))
    assert _info(bench).engines is None
    assert [op for op, _ in _words(bench)] == ["engines"] * 3


def test_what_the_producer_opened_the_run_with_is_told(bench: Bench) -> None:
    info = _info(bench)
    assert (info.on_stale, info.max_requeues, info.weights_mode) == ("drop", 1, "async")
    bench.budgets |= {"on_stale": "requeue", "max_requeues": 3, "weights_mode": "on_policy"}
    bench.open()
    info = _info(bench)
    assert (info.on_stale, info.max_requeues, info.weights_mode) == ("requeue", 3, "on_policy")


# --- in whose name -------------------------------------------------------------------------------
def test_a_trainer_ends_its_own_pause_and_nobody_elses(bench: Bench) -> None:
    bench.call(calls.pause("keep", 0, "trainer"))
    assert _info(bench).pause_by == "trainer"
    assert bench.call(calls.resume("other")).state == "paused"
    bench.call(calls.pause("keep"))  # an operator's, in its place
    assert _info(bench).pause_by == ""
    assert bench.call(calls.resume("trainer")).state == "paused"
    bench.call(calls.pause("keep", 0, "trainer"))
    assert bench.call(calls.resume("trainer")).state == "running"
    assert _info(bench).pause_by == ""
    bench.call(calls.pause("keep", 0, "trainer"))
    assert bench.call(calls.resume()).state == "running", "who says nothing ends any"


@pytest.mark.parametrize(
    "change",
    [
        calls.set_version(5, "five"),
        calls.set_label(5, "five"),
        calls.pause("abort", 9),
        calls.resume(),
        calls.set_engines(["http://zombie:1"]),
        calls.set_budget("cap", 1),
    ],
    ids=lambda change: str(change.args[0]),
)
def test_a_change_in_a_consumers_name_is_made_only_where_that_is_the_runs(
    bench: Bench, change: calls.ScriptCall[ControlAnswer]
) -> None:
    bench.call(calls.connect("newer", 2))
    bench.call(calls.pause("keep"))
    before, words = bench.client.hgetall(f"{bench.key}m"), _words(bench)
    answer = bench.call(calls.by("older", change))
    assert (answer.consumer, answer.state) == ("newer", "paused")
    assert (bench.client.hgetall(f"{bench.key}m"), _words(bench)) == (before, words)
    assert bench.call(calls.by("newer", change)).consumer == "newer"
    assert len(_words(bench)) == len(words) + 1
