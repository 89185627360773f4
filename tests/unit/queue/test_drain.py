"""A run that is drained takes no new prompts, and goes on with those it has."""

from __future__ import annotations

from rollstream.queue import calls
from rollstream.queue.reads import RunInfo
from tests.queue_bench import Bench


def _info(bench: Bench) -> RunInfo:
    info = bench.queue.info()
    assert info is not None
    return info


def test_a_drained_run_takes_no_prompts_but_those_of_evaluations(bench: Bench) -> None:
    assert bench.enqueue(0) == ["new"]
    before = _info(bench).control_seq
    for _ in range(2):  # a repeat changes nothing
        assert bench.call(calls.drain()).state == "running"
    assert (_info(bench).draining, _info(bench).control_seq) == (True, before + 1)
    assert bench.enqueue(1) == ["full"]
    assert bench.enqueue(0) == ["dup"]
    assert bench.call(calls.enqueue("e:a", 1, b"prompt")) == "new"
    assert bench.counters()["enqueued"] == 1


def test_members_that_wait_in_a_drained_run_are_leased_and_end(bench: Bench) -> None:
    bench.enqueue(0)
    bench.call(calls.drain())
    leases = bench.lease()
    assert len(leases) == 2
    bench.complete(leases)
    assert bench.queue.depths()["full"] == 1


def test_only_drain_0_ends_a_drain(bench: Bench) -> None:
    bench.call(calls.drain())
    bench.open()  # the producer starts again, with budgets of its own
    bench.call(calls.pause("keep"))
    bench.call(calls.resume())
    bench.call(calls.connect("c", 1))
    assert _info(bench).draining
    assert bench.call(calls.drain(on=False)).state == "running"
    assert not _info(bench).draining
    assert bench.enqueue(0) == ["new"]


def test_control_knows_no_other_word_for_drain(bench: Bench) -> None:
    call = calls.ScriptCall("control", ("drain", "yes"), lambda answer: answer)
    assert bench.call(call) == [b"unknown"]
    assert not _info(bench).draining
