"""Pause, resume, withdraw and requeue from the trainer: what they change, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.errors import ConsumerTaken, RunFailed, RunLost, StreamError
from rollstream.queue import calls
from rollstream.stream import GroupStream
from rollstream.trainer.control import PauseMode
from tests.backstage import Backstage
from tests.integration.stream.crew import audited
from tests.proxy import Proxy

Connect = Callable[..., GroupStream]


def state_of(run: Backstage) -> str:
    info = run.queue.info()
    assert info is not None
    return info.state


def ops(run: Backstage) -> list[str]:
    _, entries = run.queue.read_control("0", block_s=0)
    return [f"{entry['op']} {entry['arg']}" for entry in entries]


# --- pause and resume ----------------------------------------------------------------------------
def test_pause_stops_leases_until_resume_and_says_so_once(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.enqueue(0)
    stream.pause("abort")
    stream.pause("abort")
    assert (state_of(run), run.lease()) == ("paused", [])
    stream.resume()
    stream.resume()
    assert state_of(run) == "running"
    assert len(run.lease()) == 2
    assert [op for op in ops(run) if "connect" not in op] == ["pause abort", "resume "]


def test_pause_in_another_mode_is_heard_of(run: Backstage, connect: Connect) -> None:
    stream = connect()
    stream.pause("keep")
    stream.pause("abort")
    assert state_of(run) == "paused"
    assert [op for op in ops(run) if "connect" not in op] == ["pause keep", "pause abort"]
    stream.resume()
    assert state_of(run) == "running"


def test_paused_run_still_delivers_what_is_finished(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0)
    stream.pause()
    batch = stream.next_batch(1, 5)
    assert batch is not None
    batch.ack()
    assert state_of(run) == "paused"


def test_pause_refuses_a_mode_that_is_none(run: Backstage, connect: Connect) -> None:
    with pytest.raises(ValueError, match="expected 'keep' or 'abort'"):
        connect().pause(cast(PauseMode, "drop"))
    assert state_of(run) == "running"


def test_pause_says_that_the_run_has_ended(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.queue.call(calls.fail_run("no engine answered"))
    for change in (stream.pause, stream.resume):
        with pytest.raises(RunFailed, match="no engine answered"):
            change()


def test_pause_of_a_vanished_run_is_lost_within_its_timeout(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.queue.client.delete(*run.keys())
    with pytest.raises(RunLost):
        stream.pause(timeout_s=0.2)
    with pytest.raises(RunLost):
        stream.requeue(0, timeout_s=0.2)


# --- withdraw ------------------------------------------------------------------------------------
def test_withdraw_drops_a_group_in_every_state_but_a_batch(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(0, 1, 2)
    batch = stream.next_batch(1, 5)
    assert batch is not None  # 0 is handed out; 1 may be in the buffer, or ready
    run.enqueue(3)
    assert [stream.withdraw(g) for g in (0, 1, 2, 3)] == [False, True, True, True]
    assert [stream.withdraw(g) for g in (1, 9)] == [False, False]
    batch.ack()
    assert stream.withdraw(0) is False
    assert run.queue.counters()["dropped:withdrawn"] == 3
    run.end_of_data()
    assert stream.next_batch(1, 5) is None
    audited(run)


def test_withdraw_takes_a_group_out_of_the_buffer(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0, 1)
    batch = stream.next_batch(2, 5)
    assert batch is not None
    stream.take_back(batch)
    assert stream.withdraw(0) is True
    left = stream.next_batch(1, 5)
    assert left is not None
    assert left.group_indexes == [1]
    audited(run)


def test_withdraw_drops_what_a_dead_trainer_held(run: Backstage, connect: Connect) -> None:
    run.finish(0)
    dead = connect()
    assert dead.next_batch(1, 5) is not None
    dead.close()
    stream = connect()
    assert stream.withdraw(0) is True
    run.end_of_data()
    assert stream.next_batch(1, 5) is None
    audited(run)


def test_withdraw_of_a_held_group_is_refused_to_an_older_trainer(
    run: Backstage, connect: Connect
) -> None:
    run.finish(0)
    older = connect()
    batch = older.next_batch(1, 5)
    assert batch is not None
    older.take_back(batch)
    connect()
    with pytest.raises(ConsumerTaken):
        older.withdraw(0)
    assert "dropped:withdrawn" not in run.queue.counters()


# --- requeue -------------------------------------------------------------------------------------
def test_requeue_runs_a_group_again_from_its_prompt(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0, 1)
    batch = stream.next_batch(2, 5)
    assert batch is not None
    stream.take_back(batch)
    run.enqueue(2)
    held = run.lease()
    assert [stream.requeue(g) for g in (0, 1, 2, 9)] == [True, True, True, False]
    # The lease of the earlier life is fenced; the new ones come before what is younger.
    run.enqueue(3)
    call = calls.complete([calls.Completion(lease, b"h", b"b") for lease in held])
    assert {a.outcome for a in run.queue.call(call)} == {"fenced"}
    again = run.lease(limit=6)
    assert [lease.group_index for lease in again] == ["0", "0", "1", "1", "2", "2"]
    run.complete(again)
    run.judge()
    again_batch = stream.next_batch(3, 5)
    assert again_batch is not None
    assert again_batch.group_indexes == [0, 1, 2]
    again_batch.ack()
    assert run.queue.counters()["requeued"] == 3
    audited(run)


def test_requeue_leaves_a_handed_out_batch_alone(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.finish(0)
    batch = stream.next_batch(1, 5)
    assert batch is not None
    assert stream.requeue(0) is False
    batch.ack()
    assert stream.requeue(0) is False
    assert run.queue.counters()["acked"] == 1
    audited(run)


def test_requeue_is_false_once_the_run_permits_no_more(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.queue.call(calls.set_budget("max_requeues", 2))
    run.enqueue(0)
    assert [stream.requeue(0) for _ in range(4)] == [True, True, False, False]
    assert len(run.lease()) == 2
    audited(run)


async def test_async_stream_controls_the_run_as_the_stream_does(
    run: Backstage, valkey_url: str
) -> None:
    async with await AsyncGroupStream.connect(valkey_url, run=run.queue.run) as stream:
        run.enqueue(0, 1)
        await stream.pause("keep")
        assert state_of(run) == "paused"
        await stream.resume()
        assert state_of(run) == "running"
        assert await stream.withdraw(0) is True
        assert await stream.requeue(1) is True
    assert run.queue.counters()["dropped:withdrawn"] == 1


def test_a_closed_stream_calls_nothing_any_more_and_says_so(
    run: Backstage, valkey_url: str
) -> None:
    run.finish(0, 1)
    with Proxy(int(valkey_url.rpartition(":")[2])) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with GroupStream.connect(url, run=run.queue.run) as stream:
            batch = stream.next_batch(1, 5)
            assert batch is not None
        connections = proxy.num_connections
        calls_made: list[Callable[[], object]] = [
            batch.ack, stream.resume, stream.pause, stream.state_dict, stream.abort_run,
            lambda: stream.set_weight_version(9), lambda: stream.withdraw(1),
            lambda: stream.requeue(1), lambda: stream.next_batch(1, 5),
        ]  # fmt: skip
        for call in calls_made:
            with pytest.raises(StreamError):
                call()
        assert "stream/live" not in stream.metrics()
        assert proxy.num_connections == connections
    info = run.queue.info()
    assert info is not None
    assert (info.state, info.version, run.queue.counters().get("acked", 0)) == ("running", 0, 0)
