"""Redis forgets while trainers live: nothing that this trainer learned comes again, nothing is
skipped, and of several trainers the latest keeps the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollstream.batch import Batch
from rollstream.errors import ConsumerTaken, ProducerGone, StreamStalled
from rollstream.frontier import TerminalIds
from rollstream.queue import calls
from rollstream.stream import GroupStream
from rollstream.trainer.lineage import Lineage
from tests.backstage import Backstage

Connect = Callable[..., GroupStream]


def next_of(stream: GroupStream, groups: int = 1, timeout_s: float = 5.0) -> Batch:
    batch = stream.next_batch(groups, timeout_s)
    assert batch is not None
    return batch


def notice(stream: GroupStream) -> None:
    """Let a stream look at the run until it has found what Redis forgot."""
    with pytest.raises(StreamStalled):
        stream.next_batch(1, 0.6)


def rest_of(stream: GroupStream, groups: int = 2) -> list[int]:
    """Train on everything that comes until the run is over."""
    seen: list[int] = []
    for batch in stream.batches(groups=groups, timeout_s=5):
        seen += batch.group_indexes
        batch.ack()
    return seen


# --- several trainers ----------------------------------------------------------------------------
def test_frozen_trainer_does_not_take_the_run_back_in_an_emptied_redis(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    connect()
    frozen = connect()  # the second connect: one more than what an emptied Redis counts first
    batch = next_of(frozen)
    run.roll_back({})
    run.open().finish(0, 1)
    later = connect(state="fresh")
    # Redis has never heard of the frozen one; it must not read that as its own right to assert.
    for late in (lambda: batch.ack(), lambda: next_of(frozen)):
        with pytest.raises(ConsumerTaken):
            late()
    run.end_of_data()
    assert rest_of(later) == [0, 1]


@pytest.mark.parametrize("first", ["second", "third"])
def test_latest_of_three_trainers_keeps_a_run_that_was_rolled_back_behind_two(
    run: Backstage, connect: Connect, first: str
) -> None:
    run.finish(0, 1, 2)
    connect()
    before = run.keys()
    trainers = {"second": connect(), "third": connect()}
    run.roll_back(before)
    if first == "second":
        # The older one cannot know of the later one yet: it trains, and Redis takes its ack.
        batch = next_of(trainers["second"])
        batch.ack()
        assert batch.group_indexes == [0]
    seen = [next_of(trainers["third"]).group_indexes]
    with pytest.raises(ConsumerTaken):
        next_of(trainers["second"])
    if first == "second":
        # What the older one acked is not the later one's history.
        assert run.enqueue(0, n=2) == ["new"]
        run.work()
    run.end_of_data()
    trainers["third"].ack(trainers["third"]._hold.handed_out[1].batch)
    assert sorted([*seen[0], *rest_of(trainers["third"])]) == [0, 1, 2]


def test_trainer_that_was_taken_over_stays_so_when_redis_forgets_its_successor(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    old = connect()
    batch = next_of(old)
    before = run.keys()
    new = connect()
    with pytest.raises(ConsumerTaken):
        next_of(old)
    run.roll_back(before)
    # Redis would take this ack: it knows the old one only.
    for late in (lambda: batch.ack(), lambda: next_of(old)):
        with pytest.raises(ConsumerTaken):
            late()
    run.end_of_data()
    assert sorted(rest_of(new)) == [0, 1]


def test_ack_of_a_frozen_trainer_in_a_rolled_back_redis_is_not_believed(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    frozen = connect()
    batch = next_of(frozen)
    before = run.keys()
    # The new one starts where the run stands, so there was no rewind that tells them apart.
    new = connect(state=frozen.state_dict() if not frozen._hold.handed_out else None)
    run.roll_back(before)
    batch.ack()
    assert run.queue.counters()["acked"] == 1
    notice_or_take = new.next_batch(1, 5)
    assert notice_or_take is not None
    notice_or_take.ack()
    assert run.enqueue(0) == ["new"]
    run.work()
    run.end_of_data()
    assert [*notice_or_take.group_indexes, *rest_of(new)] == [1, 0]


# --- what is in hand -----------------------------------------------------------------------------
def hold_three(run: Backstage, stream: GroupStream) -> None:
    """Three groups wait in the trainer for a fourth."""
    run.finish(0, 1, 2)
    with pytest.raises(StreamStalled):
        stream.next_batch(4, 0.6)
    assert stream.metrics()["stream/held_groups"] == 3


def test_last_short_batch_is_handed_out_when_redis_was_emptied_while_it_waited(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    hold_three(run, stream)
    run.roll_back({})
    run.open().finish(0, 1, 2)
    run.end_of_data()
    assert rest_of(stream, groups=4) == [0, 1, 2]
    assert run.queue.depths()["live"] == 0


@pytest.mark.slow
def test_last_short_batch_is_handed_out_when_redis_forgot_that_it_was_delivered(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2)
    stream = connect()
    before = run.keys()
    with pytest.raises(StreamStalled):
        stream.next_batch(4, 0.6)
    run.roll_back(before)
    run.end_of_data()
    assert rest_of(stream, groups=4) == [0, 1, 2]


def test_unacked_batch_of_an_emptied_redis_is_trained_once(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    stream = connect()
    batch = next_of(stream, groups=2)
    run.roll_back({})
    run.open().finish(0, 1, 2)
    assert next_of(stream).group_indexes == [2]
    batch.ack()
    run.end_of_data()
    stream.ack(stream._hold.handed_out[2].batch)
    assert list(stream.batches(groups=2, timeout_s=3)) == []
    assert run.queue.call(calls.audit(deep=True)).problems == []


# --- the end -------------------------------------------------------------------------------------
def test_stream_does_not_end_by_a_future_that_redis_fell_back_to(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3)
    first = connect()
    next_of(first, groups=2).ack()
    state = first.state_dict()
    next_of(first, groups=2).ack()
    run.end_of_data()
    first.close()
    finished = run.keys()  # everything is acked, and the producer is done
    stream = connect(state=state)
    run.finish(2, 3)
    run.end_of_data()
    next_of(stream).ack()
    run.roll_back(finished)
    # Redis says that all is over, of another history. Within a pulse nothing else tells.
    with pytest.raises(StreamStalled):
        stream.next_batch(1, 0.6)
    assert run.enqueue(2, 3) == ["done", "new"]
    run.work()
    run.end_of_data()
    assert rest_of(stream) == [3]


def test_stream_does_not_end_while_prompts_are_missing_whatever_the_producer_said(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    with Backstage(valkey_url, run_name, cap=8, lease_ms=500, total=4) as run:
        run.open().finish(0, 1)
        # Said to a server that had just lost the last two: a failover to a replica, say.
        run.end_of_data()
        stream = connect()
        next_of(stream, groups=2).ack()
        with pytest.raises(StreamStalled):
            stream.next_batch(1, 0.7)
        run.queue.call(calls.present("producer", "p", leaving=True))
        with pytest.raises(ProducerGone, match="frontier 2"):
            stream.next_batch(1, 10)
        run.finish(2, 3)
        # It ends with the last batch still out: what is in hand is not missing.
        last = next_of(stream, groups=2)
        assert list(stream.batches(groups=2, timeout_s=3)) == []
        last.ack()
        assert last.group_indexes == [2, 3]


# --- a rollback at the worst moment --------------------------------------------------------------
def test_rollback_between_connect_and_rewind_brings_nothing_of_the_abandoned_future(
    run: Backstage, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.finish(0, 1, 2)
    first = connect()
    next_of(first).ack()
    state = first.state_dict()
    next_of(first).ack()
    moments: list[dict[bytes, bytes]] = []
    server_ids = ["before"]
    rewind = Lineage._rewind

    def remembering(lineage: Lineage) -> None:
        moments.append(run.keys())
        rewind(lineage)

    monkeypatch.setattr(Lineage, "_rewind", remembering)
    monkeypatch.setattr(Lineage, "_read_server_id", lambda _: server_ids[-1])
    stream = connect(state=state)
    # Redis knows this trainer, and counts 1 as done: it has not heard of the rewind.
    run.roll_back(moments[0])
    server_ids.append("after")
    assert next_of(stream).group_indexes == [2]
    assert run.enqueue(0, 1) == ["done", "new"]


@pytest.mark.parametrize("moment", ["_read_terminal", "_rewind"])
def test_connect_survives_a_rollback_in_its_middle(
    run: Backstage, connect: Connect, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run.finish(0, 1, 2)
    first = connect()
    next_of(first).ack()
    state = first.state_dict()
    next_of(first).ack()
    before = run.keys()
    original: Callable[[Lineage], Any] = getattr(Lineage, moment)
    left = [1]

    def forgetful(lineage: Lineage) -> TerminalIds | None:
        if left:
            left.pop()
            run.roll_back(before)
        answer: TerminalIds | None = original(lineage)
        return answer

    monkeypatch.setattr(Lineage, moment, forgetful)
    stream = connect(state=state)
    assert run.enqueue(0, 1, 2) == ["done", "new", "dup"]
    run.work()
    run.end_of_data()
    assert sorted(rest_of(stream)) == [1, 2]
