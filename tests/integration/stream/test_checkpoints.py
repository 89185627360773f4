"""Edges of restoring a checkpoint: whatever Redis has become meanwhile, what the checkpoint counts
as done is done, and every other prompt comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollstream.errors import ConsumerTaken, ProducerGone, RunLost, StreamError, StreamStalled
from rollstream.frontier import TerminalIds
from rollstream.group import Trajectory
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.builders import a_sample

Connect = Callable[..., GroupStream]


@pytest.fixture
def small_window(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """A run whose ids may lie at most 16 above its frontier."""
    with Backstage(valkey_url, run_name, cap=8, W=16, lease_ms=1000) as backstage:
        yield backstage.open()


def trained(stream: GroupStream, groups: int = 1, batches: int = 1) -> list[int]:
    """Train on some batches and ack them."""
    seen: list[int] = []
    for _ in range(batches):
        batch = stream.next_batch(groups, 5)
        assert batch is not None
        seen += batch.group_indexes
        batch.ack()
    return seen


def rest_of(stream: GroupStream, groups: int = 2) -> list[int]:
    """Train on everything that comes until the run is over."""
    seen: list[int] = []
    for batch in stream.batches(groups=groups, timeout_s=5):
        seen += batch.group_indexes
        batch.ack()
    return seen


def state_of(stream: GroupStream, ids: set[int]) -> dict[str, Any]:
    """Return a checkpoint of this run that counts exactly these ids as done."""
    terminal = TerminalIds()
    terminal.add(ids)
    return stream.state_dict() | terminal.to_plain()


def produce(run: Backstage, total: int) -> None:
    """Do what a producer does from the frontier to the end of data, and work on all of it."""
    for group_index in range(total):
        assert run.enqueue(group_index)[0] in ("new", "dup", "done")
        run.work()
    assert run.end_of_data() == "running"


# --- where to begin ------------------------------------------------------------------------------
def test_fresh_state_brings_every_prompt_of_a_run_that_was_trained(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2)
    first = connect()
    first.set_weight_version(6)
    assert trained(first, groups=2) == [0, 1]
    first.close()  # it died before its first checkpoint: nobody has learned 0 and 1
    stream = connect(state="fresh")
    assert stream.version == 6
    produce(run, 4)
    assert sorted(rest_of(stream)) == [0, 1, 2, 3]


def test_fresh_state_costs_nothing_on_a_new_run(run: Backstage, connect: Connect) -> None:
    before = run.queue.info()
    run.finish(0)
    stream = connect(state="fresh")
    after = run.queue.info()
    assert before is not None
    assert after is not None
    assert after.epoch == before.epoch
    assert trained(stream) == [0]


@pytest.mark.parametrize("state", ["latest", "", b"fresh"])
def test_connect_refuses_a_state_that_is_another_text(connect: Connect, state: object) -> None:
    with pytest.raises(ValueError, match="'fresh'"):
        connect(state=state)


# --- far away ------------------------------------------------------------------------------------
def test_checkpoint_far_above_an_emptied_redis_goes_on_there(
    run: Backstage, connect: Connect
) -> None:
    far = 3_000_003
    stream = connect()
    state = state_of(stream, set()) | {"frontier": far}
    stream.close()
    run.roll_back({})
    run.open()
    run.enqueue(0, 1)  # the producer was quicker than the trainer
    restored = connect(state=state)
    assert run.queue.counters()["dropped:seen"] == 2
    assert run.enqueue(0, far - 1, far) == ["done", "done", "new"]
    run.work()
    assert trained(restored) == [far]
    assert restored.state_dict()["frontier"] == far + 1


def test_checkpoint_far_below_withdraws_what_lies_beyond_the_window_and_it_comes_again(
    small_window: Backstage, connect: Connect
) -> None:
    run, total = small_window, 24
    stream = connect()
    early = stream.state_dict()
    for start in range(0, 20, 4):
        run.finish(*range(start, start + 4))
        assert trained(stream, groups=4) == list(range(start, start + 4))
    run.finish(20, 21)
    batch = stream.next_batch(1, 5)
    assert batch is not None  # in the hands of the older trainer
    restored = connect(state=early)
    with pytest.raises(ConsumerTaken):
        batch.ack()
    assert run.queue.counters()["dropped:withdrawn"] == 2
    assert run.enqueue(20, 16) == ["wait", "wait"]
    seen: list[int] = []
    for start in range(0, total, 4):
        run.finish(*range(start, start + 4))
        seen += trained(restored, groups=4)
    run.end_of_data()
    assert seen == list(range(total))
    assert rest_of(restored) == []
    assert run.queue.call(calls.audit(deep=True)).problems == []


def test_checkpoint_with_gaps_brings_the_gaps_and_nothing_else(
    run: Backstage, connect: Connect
) -> None:
    state = state_of(connect(), {0, 2, 3, 7, 64, 200})
    stream = connect(state=state)
    answers = run.enqueue(0, 1, 2, 3, 4, 7, 64, 65, 200)
    assert answers == ["done", "new", "done", "done", "new", "done", "done", "new", "done"]
    run.work()
    assert sorted(trained(stream, groups=3)) == [1, 4, 65]
    assert connect(state=stream.state_dict()).state_dict()["frontier"] == 5


# --- what happened after it ----------------------------------------------------------------------
def test_checkpoint_undoes_drops_and_skips_that_came_after_it(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0)
    stream = connect()
    assert trained(stream) == [0]
    state = stream.state_dict()
    run.finish(1, 2, drop={1})
    assert run.queue.call(calls.skip(3)) == "skipped"
    assert run.queue.call(calls.withdraw("2")) == "dropped"
    run.end_of_data()
    assert rest_of(stream) == []
    assert stream.state_dict()["frontier"] == 4
    restored = connect(state=state)
    produce(run, 4)
    assert sorted(rest_of(restored)) == [1, 2, 3]


def test_older_checkpoint_with_redis_rolled_back_behind_it_still_holds(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3)
    stream = connect()
    before = run.keys()
    assert trained(stream, groups=2) == [0, 1]
    state = stream.state_dict()
    assert trained(stream) == [2]
    stream.close()
    run.roll_back(before)  # a host crash: 0 and 1 are ready again, and in the checkpoint
    restored = connect(state=state)
    run.end_of_data()
    assert sorted(rest_of(restored)) == [2, 3]
    assert run.queue.counters()["dropped:seen"] == 2


def test_batch_in_the_hands_of_a_trainer_comes_to_the_one_that_rewinds_the_run(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2)
    old = connect()
    state = old.state_dict()
    assert trained(old) == [0]
    batch = old.next_batch(1, 5)
    assert batch is not None
    new = connect(state=state)
    with pytest.raises(ConsumerTaken):
        batch.ack()
    with pytest.raises(StreamError):
        old.state_dict()
    produce(run, 3)
    assert sorted(rest_of(new)) == [0, 1, 2]


# --- a producer that has finished ----------------------------------------------------------------
@pytest.mark.slow
def test_checkpoint_of_a_finished_run_says_that_a_producer_is_needed(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2)
    stream = connect()
    assert trained(stream) == [0]
    state = stream.state_dict()
    assert trained(stream, groups=2) == [1, 2]
    run.end_of_data()
    assert rest_of(stream) == []
    run.queue.call(calls.present("producer", "p", leaving=True))
    restored = connect(state=state)
    with pytest.raises(ProducerGone, match=r"frontier 1.*python -m producer"):
        restored.next_batch(1, 10)
    # The producer is started again; its old word that it was done is void.
    assert run.queue.call(calls.end_of_data(1)) == "epoch"
    produce(run, 3)
    assert rest_of(restored) == [1, 2]


def test_run_that_vanished_and_that_nobody_opens_again_is_lost(
    run: Backstage, connect: Connect
) -> None:
    stream = connect(connect_timeout_s=0.6)
    run.finish(0)
    assert trained(stream) == [0]
    run.roll_back({})
    with pytest.raises(RunLost, match="python -m producer"):
        stream.next_batch(1, 10)
    with pytest.raises(RunLost, match="python -m producer"):
        stream.state_dict(timeout_s=0.3)
    # It may still come back: the trainer was not told wrong things, and goes on.
    run.open()
    assert stream.state_dict()["frontier"] == 1
    assert run.enqueue(0) == ["done"]


# --- weight versions -----------------------------------------------------------------------------
def sampled_under(version: int) -> Callable[[int, int], Trajectory]:
    def make(group_index: int, member: int) -> Trajectory:
        return a_sample(group_index, member, versions=version)

    return make


def test_versions_count_on_from_the_run_after_a_checkpoint_that_is_older(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    with Backstage(valkey_url, run_name, cap=16, lease_ms=1000, max_stale=2) as run:
        run.open()
        first = connect()
        first.set_weight_version(4)
        state = first.state_dict()
        for version in range(5, 11):
            first.set_weight_version(version)
        first.close()
        stream = connect(state=state)
        # Weights that were abandoned are 5 to 10, for the engines and in samples; ours are others.
        assert (stream.version, stream.info.version) == (10, 10)
        for change in (stream.set_weight_version, stream.updating_weights):
            with pytest.raises(ValueError, match=r"5 is lower than 10.*count on from stream"):
                change(5)
        seen = []
        for version in range(11, 15):
            run.finish(version, make=sampled_under(version - 1))
            batch = stream.next_batch(1, 5)
            assert batch is not None
            seen.append((batch.group_indexes[0], batch.groups[0].staleness))
            batch.ack()
            stream.set_weight_version(version)
        assert seen == [(version, 0) for version in range(11, 15)]
        assert stream.metrics()["stream/dropped"] == 0
        info = run.queue.info()
        assert info is not None
        assert info.version == 14
        assert stream.state_dict()["weight_version"] == 14


def test_bound_on_staleness_holds_over_a_line_that_was_abandoned(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    with Backstage(valkey_url, run_name, cap=16, lease_ms=1000, max_stale=2) as run:
        run.open()
        first = connect()
        state = first.state_dict()
        first.set_weight_version(10)
        first.close()
        stream = connect(state=state)
        run.finish(0, 1, make=sampled_under(8))
        stream.set_weight_version(11)  # three ahead of what sampled these
        with pytest.raises(StreamStalled):
            stream.next_batch(1, 0.6)
        assert run.queue.counters()["dropped:stale"] == 2
