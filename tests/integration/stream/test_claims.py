"""Who the run's trainer is, what comes again after a death, and what a checkpoint means."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest

from examples.devserver import DevServer
from rollstream.batch import Batch
from rollstream.errors import ConsumerTaken, RunMismatch, StreamError, StreamStalled
from rollstream.queue import calls
from rollstream.queue.keys import READY_CONSUMER, READY_GROUP
from rollstream.queue.reads import StreamEntry
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until

Connect = Callable[..., GroupStream]


def take(batches: Iterator[Batch], *, ack: bool) -> list[int]:
    batch = next(batches)
    if ack:
        batch.ack()
    return batch.group_indexes


def drained(stream: GroupStream, groups: int = 2) -> list[int]:
    """Train on everything that comes until the stream stalls or ends."""
    seen: list[int] = []
    try:
        for batch in stream.batches(groups=groups, timeout_s=1.0):
            seen += batch.group_indexes
            batch.ack()
    except StreamStalled:
        pass
    return seen


# --- replay and takeover -------------------------------------------------------------------------
def test_connect_hands_out_unacked_groups_again_and_acked_ones_never(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3)
    dead = connect()
    batches = dead.batches(groups=2)
    assert take(batches, ack=True) == [0, 1]
    assert take(batches, ack=False) == [2, 3]
    dead.close()
    run.finish(4, 5)
    run.end_of_data()
    assert drained(connect()) == [2, 3, 4, 5]


def test_connect_hands_out_what_was_read_but_never_delivered(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    run.queue.read_ready(count=1, block_s=0)
    run.end_of_data()
    assert drained(connect(), groups=1) == [0, 1]


def test_connect_takes_a_run_over_and_the_older_trainer_can_do_nothing_more(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2)
    old = connect()
    batch = next(old.batches(groups=1))
    new = connect()
    with pytest.raises(ConsumerTaken):
        batch.ack()
    assert not batch.acked
    with pytest.raises(ConsumerTaken):
        next(old.batches(groups=1))
    assert drained(new, groups=1) == [0, 1, 2]
    counters = run.queue.counters()
    assert (counters["acked"], counters.get("reacked", 0)) == (3, 0)


@pytest.mark.parametrize("knows", [False, True], ids=["unaware", "told before"])
@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.set_weight_version(9),
        lambda s: s.updating_weights(9, post=False).__enter__(),
        lambda s: s.drain(1),
        lambda s: s.pause("abort"),
        lambda s: s.resume(),
        lambda s: s.set_engines(["http://zombie:1"]),
        lambda s: s.withdraw(0),
        lambda s: s.requeue(0),
        lambda s: s.abort_run("old"),
    ],
    ids="version update drain pause resume engines withdraw requeue abort".split(),
)
def test_a_trainer_that_was_taken_over_changes_nothing_of_the_run(
    run: Backstage, connect: Connect, act: Callable[[GroupStream], object], knows: bool
) -> None:
    run.enqueue(0)
    older, newer = connect(), connect()
    newer.pause("keep")
    if knows:
        with pytest.raises(ConsumerTaken):
            older.state_dict()
    names = ("state", "pause_mode", "version", "engines", "control_seq")
    key = f"{run.queue.prefix}m"
    before = run.queue.client.hmget(key, names)
    with pytest.raises(ConsumerTaken):
        act(older)
    assert run.queue.client.hmget(key, names) == before
    assert run.queue.headers([StreamEntry("", "0", 2)])[0].life == 0
    newer.resume()


def test_stream_that_waits_notices_a_takeover(run: Backstage, connect: Connect) -> None:
    old, errors = connect(), []

    def wait() -> None:
        try:
            next(old.batches(groups=1, timeout_s=10))
        except StreamError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    new = connect()
    waiter.join(timeout=5)
    assert [type(error) for error in errors] == [ConsumerTaken]
    run.finish(0)
    assert next(new.batches(groups=1)).group_indexes == [0]


def steal(run: Backstage) -> None:
    """Take an entry as the trainer would, so that its answer never reaches the trainer."""
    key = f"{run.queue.prefix}ready"
    assert run.queue.client.xreadgroup(READY_GROUP, READY_CONSUMER, {key: ">"})


def test_stream_finds_an_entry_whose_answer_was_lost(run: Backstage, connect: Connect) -> None:
    run.finish(0)
    batches = connect().batches(groups=1, timeout_s=5)
    take(batches, ack=True)
    run.finish(1)
    steal(run)
    assert take(batches, ack=True) == [1]


def test_stream_finds_a_delivered_group_whose_answer_was_lost_before_it_ends(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0)
    batches = connect().batches(groups=1, timeout_s=5)
    take(batches, ack=True)
    run.finish(1)
    steal(run)
    info = run.queue.info()
    assert info is not None
    assert run.queue.call(calls.deliver(info.consumer, ["1"])) == ["ok"]
    run.end_of_data()
    assert [batch.group_indexes for batch in batches] == [[1]]


def test_take_back_puts_a_batch_to_the_front_again(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0, 1, 2)
    with pytest.raises(StreamStalled):
        next(stream.batches(groups=4, timeout_s=0.5))
    batch = next(stream.batches(groups=2))
    stream.take_back(batch)
    again = next(stream.batches(groups=3))
    assert again.group_indexes == [0, 1, 2]
    with pytest.raises(ValueError, match="not handed out"):
        batch.ack()


def test_ack_may_be_repeated(run: Backstage, connect: Connect) -> None:
    run.finish(0, 1)
    stream = connect()
    batch = next(stream.batches(groups=2))
    batch.ack()
    batch.ack()
    stream.ack(batch)
    assert run.queue.counters()["acked"] == 2
    assert stream.metrics()["stream/held_groups"] == 0


# --- checkpoints ---------------------------------------------------------------------------------
def test_state_dict_is_refused_while_a_batch_is_out(run: Backstage, connect: Connect) -> None:
    run.finish(0, 1)
    stream = connect()
    batch = next(stream.batches(groups=1))
    with pytest.raises(StreamError, match="batch 1 is handed out and not acked"):
        stream.state_dict()
    batch.ack()
    assert stream.state_dict()["run"] == run.queue.run


def test_state_dict_survives_json_and_pickle_alike(run: Backstage, connect: Connect) -> None:
    run.finish(0, 2, 5)
    stream = connect()
    next(stream.batches(groups=3)).ack()
    state = stream.state_dict()
    assert json.loads(json.dumps(state)) == state == pickle.loads(pickle.dumps(state))


def test_checkpoint_makes_what_was_acked_later_come_again(run: Backstage, connect: Connect) -> None:
    run.finish(0, 1, 2, 3)
    stream = connect()
    batches = stream.batches(groups=2)
    take(batches, ack=True)
    state = stream.state_dict()
    assert take(batches, ack=True) == [2, 3]
    stream.close()
    restored = connect(state=state)
    # The producer scans again from the frontier: what the checkpoint counts as done is refused.
    assert run.enqueue(0, 1, 2, 3, 4) == ["done", "done", "new", "new", "new"]
    run.work()
    run.end_of_data()
    assert drained(restored) == [2, 3, 4]


def test_checkpoint_withdraws_live_groups_that_it_counts_as_trained(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    stream = connect()
    next(stream.batches(groups=2)).ack()
    later = stream.state_dict()
    stream.close()
    # An older checkpoint, then the newer one again: 0 and 1 are live when it is read.
    older = later | {"frontier": 0, "above": connect().state_dict()["above"]}
    connect(state=older)
    run.finish(0, 1)
    restored = connect(state=later)
    run.end_of_data()
    assert drained(restored) == []
    assert run.queue.counters()["dropped:seen"] == 2


def test_checkpoint_of_where_the_run_stands_rewinds_nothing(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    stream = connect()
    next(stream.batches(groups=2)).ack()
    state = stream.state_dict()
    stream.close()
    run.end_of_data()
    before = run.queue.info()
    restored = connect(state=state)
    after = run.queue.info()
    assert before is not None
    assert after is not None
    assert (after.epoch, after.done) == (before.epoch, True)
    assert list(restored.batches(groups=2)) == []


def test_checkpoint_restores_the_place_in_an_emptied_redis(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3, 4)
    stream = connect()
    batches = stream.batches(groups=2)
    take(batches, ack=True)
    take(batches, ack=True)
    stream.set_weight_version(7)
    state = stream.state_dict()
    stream.close()
    run.roll_back({})
    run.open()
    restored = connect(state=state)
    assert run.enqueue(0, 1, 2, 3, 4) == ["done", "done", "done", "done", "new"]
    run.work()
    run.end_of_data()
    assert drained(restored) == [4]
    info = run.queue.info()
    assert info is not None
    assert (info.version, info.frontier) == (7, 5)


def test_checkpoint_of_another_run_is_refused(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    state = connect().state_dict()
    with Backstage(valkey_url, f"{run.queue.run}-b") as other:
        other.open()
        with pytest.raises(RunMismatch, match=f"state is of run '{run.queue.run}'"):
            connect(run=other.queue.run, state=state)


def test_checkpoint_over_other_data_is_refused_and_the_older_trainer_stays(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    state = stream.state_dict()
    with pytest.raises(RunMismatch, match=r"fingerprint 'data'.*'other'"):
        connect(state=state | {"fingerprint": "other"})
    run.finish(0)
    assert next(stream.batches(groups=1)).group_indexes == [0]


@pytest.mark.parametrize(
    "state",
    [
        {}, {"version": 2}, {"version": 0}, {"version": True}, {"version": 1, "run": "x"}, ["no"],
        *(
            {"version": 1, "run": "x", "fingerprint": "x", "weight_version": version}
            for version in (-1, True, 1.0, "1", 1 << 60)
        ),
    ],
)  # fmt: skip
def test_connect_refuses_a_state_that_is_none_of_ours(connect: Connect, state: object) -> None:
    with pytest.raises(ValueError, match="state"):
        connect(state=state)


# --- a server that forgets -----------------------------------------------------------------------
def test_rollback_hands_out_nothing_again_that_was_acked_or_is_held(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3)
    stream = connect()
    batches = stream.batches(groups=2, timeout_s=5)
    before = run.keys()
    assert take(batches, ack=True) == [0, 1]
    held = next(batches)
    run.roll_back(before)
    run.finish(4, 5)
    # The snapshot knows all four as ready: two were trained, two are in hand.
    assert next(batches).group_indexes == [4, 5]
    held.ack()
    assert {0, 1, 2, 3} <= {i for i in range(10) if run.enqueue(i) != ["new"]}


def test_rollback_behind_the_connect_is_healed_and_told_again(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    before = run.keys()
    stream = connect()
    connected = run.queue.info()
    batch = next(stream.batches(groups=2))
    batch.ack()
    stream.set_weight_version(3)
    run.roll_back(before)
    run.finish(2)
    assert next(stream.batches(groups=1, timeout_s=5)).group_indexes == [2]
    info = run.queue.info()
    assert info is not None
    assert connected is not None
    assert (info.version, info.frontier) == (3, 2)
    assert (info.consumer, info.connects) == (connected.consumer, connected.connects)
    assert run.enqueue(0, 1) == ["done", "done"]
    assert stream.metrics()["stream/rollbacks"] == 1


def test_rollback_behind_a_rewind_brings_nothing_of_the_abandoned_future(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1, 2, 3)
    first = connect()
    batches = first.batches(groups=2)
    take(batches, ack=True)
    state = first.state_dict()
    take(batches, ack=True)
    first.close()
    future = run.keys()
    # 2 and 3 are to be trained again; the server then forgets that it was told so.
    stream = connect(state=state)
    run.roll_back(future)
    wait_healed(stream)
    assert run.enqueue(2, 3) == ["new", "new"]
    run.work()
    run.end_of_data()
    assert drained(stream) == [2, 3]


def wait_healed(stream: GroupStream) -> None:
    with pytest.raises(StreamStalled):
        next(stream.batches(groups=1, timeout_s=0.6))
    assert stream.metrics()["stream/rollbacks"] == 1


@pytest.mark.slow
def test_emptied_redis_is_told_everything_again_by_a_live_trainer(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    stream = connect(connect_timeout_s=10)
    next(stream.batches(groups=2)).ack()
    stream.set_weight_version(4)
    run.roll_back({})
    reopened = threading.Timer(0.4, run.open)
    reopened.start()
    with pytest.raises(StreamStalled):
        next(stream.batches(groups=1, timeout_s=1.5))
    reopened.join()
    assert run.enqueue(0, 1, 2) == ["done", "done", "new"]
    run.work()
    run.end_of_data()
    assert drained(stream) == [2]
    info = run.queue.info()
    assert info is not None
    assert info.version == 4


def test_ack_reaches_a_run_that_was_rolled_back(run: Backstage, connect: Connect) -> None:
    before = run.keys()
    stream = connect()
    run.finish(0)
    batch = next(stream.batches(groups=1))
    run.roll_back(before)
    batch.ack()
    assert run.enqueue(0) == ["done"]
    assert run.queue.counters()["reacked"] == 1


def test_state_dict_after_a_rollback_still_counts_what_was_acked(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0, 1)
    stream = connect()
    before = run.keys()
    next(stream.batches(groups=2)).ack()
    run.roll_back(before)
    assert stream.state_dict()["frontier"] == 2


def test_stream_outlasts_a_server_that_is_killed_and_started_again(run_name: str) -> None:
    with DevServer(aof=True) as server, Backstage(server.url, run_name) as run:
        run.queue.client.config_set("appendfsync", "always")
        run.open().finish(0, 1)
        with GroupStream.connect(server.url, run=run_name) as stream:
            batches = stream.batches(groups=1, timeout_s=15)
            batch = next(batches)
            server.kill()
            results: list[list[int]] = []

            def train() -> None:
                batch.ack()
                results.append(next(batches).group_indexes)

            trainer = threading.Thread(target=train)
            trainer.start()
            trainer.join(timeout=0.5)
            assert trainer.is_alive()
            server.start()
            trainer.join(timeout=10)
            assert results == [[1]]
            assert wait_until(lambda: run.queue.counters()["acked"]) == 1


def test_stream_stalls_resumably_when_redis_stays_away(run_name: str) -> None:
    with DevServer() as server, Backstage(server.url, run_name) as run:
        run.open().finish(0)
        with GroupStream.connect(server.url, run=run_name) as stream:
            server.kill()
            with pytest.raises(StreamStalled, match="Redis did not answer"):
                next(stream.batches(groups=1, timeout_s=0.5))
            with pytest.raises(StreamError, match="cannot be reached"):
                stream.state_dict(timeout_s=0.3)
            assert "stream/live" not in stream.metrics()
            assert run.queue.run == run_name


def test_trainer_memory_of_ended_groups_is_folded_into_the_frontier(
    run: Backstage, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.trainer.lineage.MAX_ABOVE", 2)
    run.finish(*range(8), drop={0})
    stream = connect()
    batches = stream.batches(groups=1, timeout_s=2)
    for _ in range(7):
        next(batches).ack()
    run.queue.call(calls.end_of_data(1))
    assert list(batches) == []
    lineage = stream._hold.lineage
    lineage.fold()
    assert (lineage.terminal.frontier, lineage.terminal.num_above) == (8, 0)


def test_stream_lives_with_a_user_that_may_not_ask_for_the_servers_id(
    run: Backstage, valkey_url: str
) -> None:
    run.finish(0)
    user = {"username": "narrow", "password": "pw"}
    client = run.queue.client
    client.acl_setuser(
        user["username"], enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"],
        commands=["-info"],
    )  # fmt: skip
    try:
        url = valkey_url.replace("redis://", "redis://narrow:pw@")
        with GroupStream.connect(url, run=run.queue.run) as stream:
            batch = next(stream.batches(groups=1, timeout_s=5))
            batch.ack()
        assert batch.group_indexes == [0]
        assert run.queue.counters()["acked"] == 1
    finally:
        client.acl_deluser("narrow")


def test_connect_says_that_redis_refuses_the_password(run: Backstage, valkey_url: str) -> None:
    url = valkey_url.replace("redis://", "redis://nobody:wrong@")
    with pytest.raises(StreamError, match="refuses this client") as refused:
        GroupStream.connect(url, run=run.queue.run, connect_timeout_s=5)
    assert "nobody:***@" in str(refused.value)
