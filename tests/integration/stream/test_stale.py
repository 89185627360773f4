"""Groups that are too old, by `on_stale`: at hand-out, in the trainer's buffer, in a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.cli.__main__ import main
from rollstream.queue import calls
from rollstream.sample import UNKNOWN_VERSION
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.builders import a_sample
from tests.integration.stream.crew import audited

Connect = Callable[..., GroupStream]


def opened(run: Backstage, on_stale: str, **budgets: Any) -> Backstage:
    run.budgets |= {"max_stale": 0, "on_stale": on_stale, **budgets}
    return run.open()


def at(version: int) -> Callable[[int, int], Any]:
    """Make trajectories that one version sampled."""
    return lambda group_index, member: a_sample(group_index, member, versions=version)


def buffered(run: Backstage, connect: Connect) -> GroupStream:
    """Return a stream that has 0 in a batch, and 1 in its buffer, both of version 0."""
    stream = connect()
    run.finish(0, 1, make=at(0))
    first = stream.next_batch(1, 5)
    second = stream.next_batch(1, 5)
    assert first is not None
    assert second is not None
    stream.take_back(second)
    return stream


def test_what_gets_stale_in_the_buffer_is_dropped_and_counted_by_place_and_age(
    run: Backstage, connect: Connect
) -> None:
    opened(run, "drop")
    stream = buffered(run, connect)
    stream.set_weight_version(3)
    run.finish(2, make=at(3))
    batch = stream.next_batch(1, 5)
    assert batch is not None
    assert batch.group_indexes == [2]
    figures = stream.metrics()
    assert figures["stream/dropped/stale"] == 1
    assert figures["stream/stale/hand_out"] == 1
    assert figures["stream/stale_age_mean/hand_out"] == 3
    assert figures["stream/stale_at_hand_out"] == 1
    audited(run)


def test_case_77_a_stale_group_that_is_dropped_leaves_its_members_lengths_and_versions(
    run: Backstage, connect: Connect, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(run, "drop")
    stream = buffered(run, connect)
    run.enqueue(2)
    leases = [lease for lease in run.lease() if lease.group_index == "2"]
    run.complete(leases[:1], make=at(0))
    stream.set_weight_version(3)
    run.queue.call(calls.sweep())
    stream.close()
    main(["show", "--redis", valkey_url, "--run", run.queue.run, "--last", "1000", "--json"])
    drops = {drop["group_index"]: drop for drop in json.loads(capsys.readouterr().out)["drops"]}
    (ended, open_one) = drops["2"]["members"]
    assert {(drop["reason"], drop["n"]) for drop in drops.values()} == {("stale", 2)}
    assert (drops["2"]["state"], open_one["where"]) == ("open", "unfinished")
    length = a_sample(2, 0, versions=0).num_sampled
    known = ("sampled_tokens", "turns", "versions")
    assert [ended["result"][name] for name in known] == [length, 1, [0, 0]]


def test_what_gets_stale_in_the_buffer_begins_anew_and_comes_again(
    run: Backstage, connect: Connect
) -> None:
    opened(run, "requeue", max_requeues=1)
    stream = buffered(run, connect)
    stream.set_weight_version(1)
    run.end_of_data()
    # Let go of before anything of its new life exists, so it is not mistaken for that.
    stream._hold.drop_stale()
    run.work(make=at(1))
    batch = stream.next_batch(1, 5)
    assert batch is not None
    assert batch.group_indexes == [1]
    assert batch.groups[0].staleness == 0
    # Once more is more than the run permits: then it is dropped.
    stream.take_back(batch)
    stream.set_weight_version(2)
    stream.ack(stream._hold.handed_out[1].batch)
    assert stream.next_batch(1, 5) is None
    figures = stream.metrics()
    assert figures["stream/stale/hand_out"] == 2
    assert figures["stream/requeued/stale"] == 1
    assert figures["stream/dropped/stale"] == 1
    assert figures["stream/acked"] == 1
    audited(run)


def test_what_is_stale_is_delivered_where_the_run_says_so_with_its_staleness(
    run: Backstage, connect: Connect
) -> None:
    opened(run, "deliver")
    stream = buffered(run, connect)
    run.finish(2, make=at(0))
    stream.set_weight_version(4)
    batch = stream.next_batch(2, 5)
    assert batch is not None
    assert batch.group_indexes == [1, 2]
    assert [group.staleness for group in batch.groups] == [4, 4]
    assert "stream/dropped/stale" not in stream.metrics()
    audited(run)


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
def test_a_batch_that_is_handed_out_stays_the_trainers_however_old_it_gets(
    run: Backstage, connect: Connect, on_stale: str
) -> None:
    opened(run, on_stale)
    stream = buffered(run, connect)
    batch = stream._hold.handed_out[1].batch
    run.queue.call(calls.present("worker", run.worker, leaving=True))
    with stream.updating_weights(9, ack=batch, post=False):
        stream._hold.drop_stale()
    assert batch.acked
    assert stream.metrics()["stream/acked"] == 1
    audited(run)


@pytest.mark.parametrize(
    ("spans", "oldest"),
    [
        # A call that was sent under 5, and sampled nothing before its engine had 6.
        ([(6, 3, 4), (UNKNOWN_VERSION, 4, 5), (7, 5, 6)], 6),
        ([(5, 3, 3), (UNKNOWN_VERSION, 3, 5), (6, 5, 6)], 5),
    ],
)
def test_tokens_of_no_version_are_as_old_as_what_stands_before_them(
    run: Backstage, connect: Connect, spans: list[tuple[int, int, int]], oldest: int
) -> None:
    def make(group_index: int, member: int) -> Any:
        sample = a_sample(group_index, member, turns=[((4, 5, 6), ())], versions=5)
        sample.calls[0].versions = list(spans)
        return sample

    opened(run, "deliver")
    stream = connect()
    stream.set_weight_version(5)
    run.finish(0, make=make)
    stream.set_weight_version(8)
    batch = stream.next_batch(1, 5)
    assert batch is not None
    assert batch.groups[0].staleness == 8 - oldest
    assert set(batch.to_arrays(pad_id=0)["min_version"].tolist()) == {oldest}


@pytest.mark.parametrize(("on_stale", "left"), [("drop", []), ("requeue", [0, 1])])
def test_what_is_stale_at_its_hand_out_never_comes_in_this_life(
    run: Backstage, connect: Connect, on_stale: str, left: list[int]
) -> None:
    opened(run, on_stale)
    stream = connect()
    run.finish(0, 1, make=at(0))
    stream.set_weight_version(1)
    run.finish(2, make=at(1))
    batch = stream.next_batch(1, 5)
    assert batch is not None
    assert batch.group_indexes == [2]
    run.work(make=at(1))
    batch.ack()
    run.end_of_data()
    again = stream.next_batch(2, 5)
    assert (again.group_indexes if again else []) == left
    assert stream.metrics()["stream/stale/ready"] == 2
    audited(run)
