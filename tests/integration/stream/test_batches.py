"""What a trainer is handed, in which order, and how an iteration ends, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollstream.errors import (
    CapacityTooSmall,
    ProducerGone,
    RunFailed,
    RunLost,
    StopReason,
    StreamError,
    StreamStalled,
    WireTooNew,
)
from rollstream.group import EnvRule, Trajectory, sample_index
from rollstream.queue import calls
from rollstream.stream import GroupStream
from rollstream.wire import encode_envs, encode_header
from tests.backstage import Backstage, wait_until
from tests.builders import a_sample

Connect = Callable[..., GroupStream]


def ids_of(stream: GroupStream, groups: int = 2, timeout_s: float = 5.0) -> list[list[int]]:
    """Drain the stream, acking every batch; the ids per batch."""
    seen = []
    for batch in stream.batches(groups=groups, timeout_s=timeout_s):
        seen.append(batch.group_indexes)
        batch.ack()
    return seen


def test_stream_ends_normally_with_a_short_last_batch(run: Backstage, connect: Connect) -> None:
    run.finish(0, 1, 2, 3, 4)
    run.end_of_data()
    stream = connect()
    assert ids_of(stream, groups=2) == [[0, 1], [2, 3], [4]]
    assert run.queue.depths()["live"] == 0
    audit = run.queue.call(calls.audit(deep=True))
    assert (audit.enqueued, audit.acked, audit.live, audit.problems) == (5, 5, 0, [])


@pytest.mark.parametrize(
    ("groups", "timeout_s"),
    [(0, 1), (-1, 1), (2.5, 1), (float("nan"), 1), ("3", 1), (1, 0), (1, -1), (1, float("nan"))],
)
def test_stream_refuses_a_batch_or_a_wait_that_is_none(
    run: Backstage, connect: Connect, groups: Any, timeout_s: float
) -> None:
    run.finish(0)
    stream = connect()
    with pytest.raises((ValueError, TypeError)):
        stream.batches(groups=groups, timeout_s=timeout_s)
    assert next(stream.batches(groups=1)).group_indexes == [0]


@pytest.mark.parametrize("version", [-1, 1.5, "7", None, 1 << 60])
def test_stream_refuses_a_version_that_is_none_and_keeps_its_own(
    run: Backstage, connect: Connect, version: Any
) -> None:
    stream = connect()
    stream.set_weight_version(np.int64(3))
    with pytest.raises((ValueError, TypeError)):
        stream.set_weight_version(version)
    assert stream.version == 3
    info = run.queue.info()
    assert info is not None
    assert info.version == 3


def test_stream_waits_for_what_is_still_open_before_it_ends(
    run: Backstage, connect: Connect
) -> None:
    run.enqueue(0)
    run.end_of_data()
    stream, found = connect(), []
    trainer = threading.Thread(target=lambda: found.extend(ids_of(stream)))
    trainer.start()
    leases = wait_until(run.lease)
    trainer.join(timeout=0.7)
    assert trainer.is_alive()
    run.complete(leases)
    run.judge()
    trainer.join(timeout=5)
    assert found == [[0]]


def test_stream_ends_at_once_when_everything_was_dropped(run: Backstage, connect: Connect) -> None:
    run.finish(0, 1, drop={0, 1})
    run.end_of_data()
    assert ids_of(connect()) == []


def test_stream_hands_out_lists_mixed_with_scalars_through_to_the_arrays(
    run: Backstage, connect: Connect
) -> None:
    def make(group_index: int, member: int) -> Trajectory:
        if member == 1:
            return a_sample(group_index, member, turns=[([7], [])])
        index = sample_index(group_index, member)
        return [
            a_sample(group_index, member, turns=[(ids, [])], rollout_id=index, reward=0.5)
            for ids in ([4, 5, 6], [8])
        ]

    run.finish(3, make=make)
    run.end_of_data()
    batch = next(connect().batches(groups=1))
    tree, scalar = batch.groups[0].samples
    assert isinstance(tree, list)
    assert not isinstance(scalar, list)
    responses = [s.tokens[3:].tolist() for s in batch.flat()]
    assert responses == [[4, 5, 6], [8], [7]]
    arrays = batch.to_arrays()
    base = sample_index(3, 0)
    assert arrays["rollout_id"].tolist() == [base, base, base + 1]
    assert arrays["rollout_mask_sum"].tolist() == [4, 4, 1]
    assert arrays["reward"].tolist() == [0.5, 0.5, 1.0]


def test_stream_gives_read_only_views_and_writable_arrays(run: Backstage, connect: Connect) -> None:
    run.finish(0)
    batch = next(connect().batches(groups=1))
    sample = batch.flat()[0]
    for wire in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
        assert wire is not None
        with pytest.raises(ValueError, match="read-only"):
            wire[0] = 0
    arrays = batch.to_arrays()
    arrays["tokens"][:] = 0
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]


def test_stream_never_mixes_uneven_groups(run: Backstage, connect: Connect) -> None:
    rewards = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 5.0}

    def make(group_index: int, member: int) -> Trajectory:
        reward = rewards.get((group_index, member))
        reason = StopReason.STOP if reward is not None else StopReason.ENGINE_ERROR
        return a_sample(group_index, member, reward=reward, stop_reason=reason)

    run.enqueue(0, 1)
    leases = run.lease()
    # The members of group 1 end between those of group 0.
    order = [("0", 0), ("1", 0), ("1", 1), ("0", 1)]
    leases.sort(key=lambda lease: order.index((lease.group_index, lease.member)))
    for lease in leases:
        run.complete([lease], make)
    run.judge()
    batch = next(connect().batches(groups=2))
    arrays = batch.to_arrays()
    by_group = {
        int(g): arrays["reward"][arrays["group_index"] == g].tolist()
        for g in np.unique(arrays["group_index"])
    }
    assert by_group == {0: [1.0, 3.0], 1: [5.0]}
    short = next(group for group in batch.groups if group.group_index == 1)
    missing = [(m.member, m.status, m.reason) for m in short.missing]
    assert missing == [(1, "failed", "engine_error")]


def test_stream_reads_rewards_by_the_rule_that_the_producer_stored(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    envs = encode_envs({"default": EnvRule(reward_key="score")})
    with Backstage(valkey_url, run_name, envs=envs) as run:
        run.open().finish(0, make=lambda g, m: a_sample(g, m, reward={"score": 0.25 + m, "x": 9}))
        batch = next(connect().batches(groups=1))
    assert batch.to_arrays()["reward"].tolist() == [0.25, 1.25]
    assert batch.groups[0].missing == []
    assert batch.metrics()["batch/reward_mean"] == 0.75


def test_stream_takes_unscored_members_where_the_trainer_scores(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    envs = encode_envs({"default": EnvRule(needs_reward=False)})
    with Backstage(valkey_url, run_name, envs=envs) as run:
        run.open().finish(0, make=lambda g, m: a_sample(g, m, reward=None))
        batch = next(connect().batches(groups=1))
    assert np.isnan(batch.to_arrays()["reward"]).tolist() == [True, True]


def test_stream_takes_rewards_from_the_verdict_where_it_wrote_them(
    run: Backstage, connect: Connect
) -> None:
    run.enqueue(0)
    run.complete(run.lease(), make=lambda g, m: a_sample(g, m, reward=None))
    (entry,) = run.queue.read_full("judge", count=1, block_s=0)
    headers = {m: encode_header(a_sample(0, m, reward=0.5 + m)) for m in (0, 1)}
    run.queue.call(calls.verdict("0", entry.message_id, headers=headers))
    batch = next(connect().batches(groups=1))
    assert [sample.reward for sample in batch.flat()] == [0.5, 1.5]


def test_stream_reports_spans_and_texts_where_they_are_asked_for(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, make=lambda g, m: a_sample(g, m, response=f"text {m}"))
    batch = next(connect(text=True).batches(groups=1))
    assert [s.response for s in batch.flat()] == ["text 0", "text 1"]
    spans = batch.groups[0].spans
    assert len(spans["group_wait"]) == 2
    assert len(spans["ready_wait"]) == 1
    assert all(0 <= seconds < 20 for values in spans.values() for seconds in values)


def test_stream_needs_a_constant_number_of_round_trips_a_batch(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    batches = stream.batches(groups=4)
    run.finish(0, 1, 2, 3)
    next(batches).ack()
    run.finish(4, 5, 6, 7)
    before = run.queue.client.info("commandstats")
    batch = next(batches)
    batch.ack()
    after = run.queue.client.info("commandstats")

    def calls_of(name: str) -> int:
        return after[f"cmdstat_{name}"]["calls"] - before[f"cmdstat_{name}"]["calls"]

    # Read, deliver with all bodies, ack: and perhaps one pulse (control, sweep) beside them.
    assert calls_of("xreadgroup") + calls_of("xrange") == 1
    assert calls_of("evalsha") <= 2 + 2
    assert len(batch.groups) == 4


def test_stream_stalls_and_keeps_the_half_filled_batch(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0)
    run.enqueue(1)
    run.lease()
    with pytest.raises(StreamStalled) as stalled:
        next(stream.batches(groups=2, timeout_s=0.8))
    message = str(stalled.value)
    assert "Groups in flight: 1 (0 wait for a verdict, 0 are ready)" in message
    assert "members: 2 leased, 0 waiting" in message
    assert "the oldest group, 0" in message
    assert stream.metrics()["stream/held_groups"] == 1
    run.finish(2)
    batch = next(stream.batches(groups=2, timeout_s=5))
    assert batch.group_indexes == [0, 2]


def test_stream_names_the_stage_that_has_nobody_alive(run: Backstage, connect: Connect) -> None:
    run.enqueue(0)
    with pytest.raises(StreamStalled, match=r"no worker is alive \(python -m worker\)"):
        next(connect().batches(groups=1, timeout_s=0.8))


def test_stream_raises_producer_gone_and_goes_on_when_one_is_back(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(0)
    run.queue.call(calls.present("producer", "p", leaving=True))
    with pytest.raises(ProducerGone, match="1 of 2 groups of the batch are here"):
        next(stream.batches(groups=2, timeout_s=1.0))
    run.queue.call(calls.present("producer", "q"))
    run.finish(1)
    assert next(stream.batches(groups=2, timeout_s=5)).group_indexes == [0, 1]


def test_stream_raises_run_failed_with_the_reason(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.queue.call(calls.fail_run("engine says: no such model"))
    with pytest.raises(RunFailed, match="no such model") as failed:
        next(stream.batches(groups=2, timeout_s=5))
    assert failed.value.reason == "engine says: no such model"


def test_stream_raises_run_failed_when_somebody_else_aborts(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(0)
    run.queue.call(calls.abort_run("disk is full"))
    with pytest.raises(RunFailed, match="aborted: disk is full"):
        next(stream.batches(groups=2, timeout_s=5))


def test_stream_that_aborts_the_run_itself_ends_normally(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0, 1, 2)
    assert len(next(stream.batches(groups=2))) == 2
    stream.abort_run("enough")
    assert list(stream.batches(groups=2, timeout_s=5)) == []
    info = run.queue.info()
    assert info is not None
    assert info.state == "ended"
    audit = run.queue.call(calls.audit(deep=True))
    assert (audit.live, audit.dropped, audit.problems) == (0, 3, [])


def test_stream_raises_run_lost_when_the_run_is_gone(run: Backstage, connect: Connect) -> None:
    stream = connect(connect_timeout_s=0.5)
    run.roll_back({})
    with pytest.raises(RunLost, match="a producer opens it"):
        next(stream.batches(groups=2, timeout_s=5))


def test_stream_raises_capacity_too_small_at_once_for_a_batch_beyond_it(
    run: Backstage, connect: Connect
) -> None:
    with pytest.raises(CapacityTooSmall) as small:
        next(connect().batches(groups=9, timeout_s=60))
    assert (small.value.groups, small.value.capacity) == (9, 8)


def test_stream_raises_capacity_too_small_when_unacked_batches_hold_it_all(
    run: Backstage, connect: Connect
) -> None:
    batches = connect().batches(groups=4, timeout_s=1.0)
    run.finish(*range(8))
    held = [next(batches), next(batches)]
    with pytest.raises(CapacityTooSmall) as small:
        next(batches)
    assert (small.value.groups, small.value.capacity, small.value.live) == (4, 8, 8)
    assert [batch.acked for batch in held] == [False, False]


def test_stream_drops_a_group_that_is_stale_when_redis_hands_it_out(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    with Backstage(valkey_url, run_name, max_stale=1) as run:
        run.open().finish(0)
        stream = connect()
        run.queue.call(calls.set_version(2))
        run.finish(1, make=lambda g, m: a_sample(g, m, versions=2))
        batch = next(stream.batches(groups=1, timeout_s=5))
        assert batch.group_indexes == [1]
        assert run.queue.counters()["dropped:stale"] == 1


def test_stream_drops_what_gets_stale_while_it_waits_in_the_stream(
    valkey_url: str, run_name: str, connect: Connect
) -> None:
    with Backstage(valkey_url, run_name, max_stale=1) as run:
        stream = connect_after_open(run, connect)
        run.finish(0, 1, make=lambda g, m: a_sample(g, m, versions=g))
        with pytest.raises(StreamStalled):
            next(stream.batches(groups=3, timeout_s=0.6))
        stream.set_weight_version(2)
        run.finish(2, make=lambda g, m: a_sample(g, m, versions=2))
        batch = next(stream.batches(groups=2, timeout_s=5))
        assert batch.group_indexes == [1, 2]
        assert [group.staleness for group in batch.groups] == [1, 0]
        assert stream.metrics()["stream/dropped/stale"] == 1
        assert run.queue.call(calls.audit(deep=True)).problems == []


def connect_after_open(run: Backstage, connect: Connect) -> GroupStream:
    run.open()
    return connect()


def test_stream_gives_up_a_group_whose_records_are_garbage_and_goes_on(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    run.queue.client.hset(f"{run.queue.prefix}b:0", "1", b"\x80\x04garbage")
    run.end_of_data()
    stream = connect()
    assert ids_of(stream, groups=1) == [[1]]
    assert stream.metrics()["stream/dropped/custom"] == 1
    assert run.queue.call(calls.audit(deep=True)).problems == []


FOREIGN: list[dict[str, Any]] = [
    {"g": "abc", "n": 2}, {"g": "-1", "n": 2}, {"g": "٣", "n": 2}, {"g": "9" * 5000, "n": 2},
    {"g": "e:1", "n": 1}, {"g": "5", "n": 0}, {"g": "5", "n": 10**9},
]  # fmt: skip


def test_stream_passes_over_entries_that_are_none_of_ours(run: Backstage, connect: Connect) -> None:
    ready = f"{run.queue.prefix}ready"
    for fields in FOREIGN:
        run.queue.client.xadd(ready, fields)
    run.finish(0, 1)
    run.end_of_data()
    assert ids_of(connect()) == [[0, 1]]


@pytest.mark.parametrize("key", ["m", "c", "cur", "ready", "g:0", "b:0"])
def test_stream_says_which_run_has_keys_of_another_kind(
    run: Backstage, connect: Connect, key: str
) -> None:
    run.finish(0)
    damaged = f"{run.queue.prefix}{key}"
    run.queue.client.delete(damaged)
    run.queue.client.rpush(damaged, "x")
    with pytest.raises(StreamError, match=rf"run '{run.queue.run}' .* cannot be read: keys under"):
        list(connect().batches(groups=1, timeout_s=3))


def test_stream_refuses_a_newer_wire_version_and_keeps_the_groups(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0)
    key = f"{run.queue.prefix}g:0"
    header = run.queue.client.hget(key, "h0")
    assert header is not None
    run.queue.client.hset(key, "h0", header.replace(b"\xa1v\x01", b"\xa1v\x09"))
    with pytest.raises(WireTooNew, match="wire version 9 is newer"):
        next(connect().batches(groups=1, timeout_s=5))
    run.queue.client.hset(key, "h0", header)
    assert next(connect().batches(groups=1, timeout_s=5)).group_indexes == [0]


def test_ack_refuses_a_batch_of_another_stream(run: Backstage, connect: Connect) -> None:
    run.finish(0)
    first = connect()
    batch = next(first.batches(groups=1))
    second = connect()
    with pytest.raises(ValueError, match="not handed out by this stream"):
        second.ack(batch)


def test_stream_sweeps_while_it_waits_so_no_other_process_need_live(
    run: Backstage, connect: Connect
) -> None:
    run.enqueue(0, timeout_ms=300)
    run.lease()
    run.end_of_data()
    stream, found = connect(), []
    trainer = threading.Thread(target=lambda: found.extend(ids_of(stream)))
    trainer.start()
    wait_until(lambda: run.queue.depths()["full"])
    run.judge(drop={0})
    trainer.join(timeout=5)
    assert found == []
    assert not trainer.is_alive()


def test_connect_names_the_runs_that_exist_when_its_own_does_not(
    run: Backstage, valkey_url: str
) -> None:
    with pytest.raises(RunLost, match=rf"no run 'nobody'.*{run.queue.run}.*python -m producer"):
        GroupStream.connect(valkey_url, run="nobody", connect_timeout_s=0.3)


def test_connect_waits_for_a_run_that_is_opened_late(valkey_url: str, run_name: str) -> None:
    with Backstage(valkey_url, run_name) as run:
        opener = threading.Timer(0.3, run.open)
        opener.start()
        with GroupStream.connect(valkey_url, run=run_name, connect_timeout_s=10) as stream:
            assert stream.info.run == run_name
        opener.join()


def test_connect_says_that_redis_cannot_be_reached_without_the_password() -> None:
    with pytest.raises(StreamError) as away:
        GroupStream.connect("redis://me:secret@127.0.0.1:1", run="x", connect_timeout_s=0.3)
    assert "redis://me:***@127.0.0.1:1 cannot be reached" in str(away.value)
    assert "secret" not in str(away.value)
