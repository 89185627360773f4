"""Somebody else writes into the run's keys, or removes parts of them, while it goes on."""

from __future__ import annotations

import contextlib

import pytest
import redis

from rollstream.cli.__main__ import main
from rollstream.errors import MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import CompleteAnswer, Lease
from rollstream.queue.calls import Completion
from rollstream.stream import GroupStream
from tests.backstage import Backstage, Connect, wait_until


def train_all(stream: GroupStream, groups: int = 2) -> list[int]:
    """Train until the run is over; the ids in the order in which they came."""
    trained: list[int] = []
    for batch in stream.batches(groups=groups, timeout_s=45):
        trained += batch.group_indexes
        batch.ack()
    return trained


# --- the trainer's stream ------------------------------------------------------------------------
def test_groups_behind_foreign_entries_reach_the_trainer_that_starts_again(
    run: Backstage, connect: Connect
) -> None:
    """A page of foreign entries only was taken for the end, and the run for over."""
    for _ in range(9):
        run.queue.client.xadd(f"{run.queue.prefix}ready", {"x": "1"})
    run.finish(0, 1)
    run.end_of_data()
    first = connect()
    assert first.next_batch(2, 5) is not None
    first.close()

    assert train_all(connect()) == [0, 1]


def test_groups_that_a_deleted_consumer_had_taken_reach_the_next_trainer(
    run: Backstage, connect: Connect
) -> None:
    """redis/redis#9745: XGROUP DELCONSUMER forgets what was pending."""
    run.finish(0, 1)
    first = connect()
    assert first.next_batch(2, 5) is not None
    first.close()
    run.queue.client.xgroup_delconsumer(f"{run.queue.prefix}ready", "trainer", "trainer")
    run.end_of_data()

    assert train_all(connect()) == [0, 1]
    assert run.queue.call(calls.audit(deep=True)).problems == []


@pytest.mark.parametrize("n", [1, 4, 9])
def test_an_entry_that_somebody_copied_trains_its_group_once_and_whole(
    run: Backstage, connect: Connect, n: int
) -> None:
    """With another n it was trained with one of its four samples."""
    for gid in ("0", "1"):
        run.queue.client.xadd(f"{run.queue.prefix}ready", {"g": gid, "n": n})
    run.finish(0, 1, n=4)
    for gid in ("0", "1"):
        run.queue.client.xadd(f"{run.queue.prefix}ready", {"g": gid, "n": n})
    run.end_of_data()
    trained = []
    for batch in connect().batches(groups=2, timeout_s=45):
        trained += [(group.group_index, len(group.samples)) for group in batch.groups]
        batch.ack()
    assert sorted(trained) == [(0, 4), (1, 4)]


# --- the aggregators' stream ---------------------------------------------------------------------
FORGETTING = {
    "its consumer is deleted": ("XGROUP", "DELCONSUMER", "{}full", "aggregators", "judge"),
    "the group is set to the end": ("XGROUP", "SETID", "{}full", "aggregators", "$"),
    "the group is destroyed": ("XGROUP", "DESTROY", "{}full", "aggregators"),
    "the stream is trimmed": ("XTRIM", "{}full", "MAXLEN", 0),
    "the stream is deleted": ("DEL", "{}full"),
}


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("how", FORGETTING)
def test_a_full_group_is_judged_although(
    run: Backstage, connect: Connect, how: str, is_read: bool
) -> None:
    """redis/redis#9745 and worse: its entry was pending, or waiting, and then it was not."""
    run.enqueue(0, 1)
    run.complete(run.lease())
    if is_read:
        assert len(run.queue.read_full("judge", count=9, block_s=0)) == 2
    command = [str(part).format(run.queue.prefix) for part in FORGETTING[how]]
    run.queue.client.execute_command(*command)
    wait_until(lambda: swept_and_judged(run) == 2)
    run.end_of_data()
    assert train_all(connect()) == [0, 1]
    assert run.queue.call(calls.audit(deep=True)).problems == []


def swept_and_judged(run: Backstage) -> int:
    """Sweep, judge and take over as a worker does; how many groups are ready."""
    run.queue.call(calls.sweep())
    with contextlib.suppress(redis.ResponseError):  # NOGROUP, until a sweep made it anew
        run.judge()
        for entry in run.queue.claim_full("judge", idle_s=0.5, count=9):
            run.queue.call(calls.verdict(entry.group_index, entry.message_id))
    return run.queue.depths()["ready"]


# --- members -------------------------------------------------------------------------------------
def test_a_member_that_somebody_queued_twice_counts_once(run: Backstage) -> None:
    """Its second result made the group full while another member was still running."""
    run.enqueue(0, n=3)
    first = run.lease()
    run.queue.client.zadd(f"{run.queue.prefix}q", {"0:0": 1})
    (again,) = run.lease()
    assert (again.member, again.token != first[0].token) == (0, True)

    def submit(lease: Lease) -> CompleteAnswer:
        (answer,) = run.queue.call(calls.complete([Completion(lease, b"h", b"b")]))
        return answer

    assert submit(first[0]) == CompleteAnswer("ok", 2)
    assert submit(again).outcome == "fenced"
    run.queue.client.zadd(f"{run.queue.prefix}q", {"0:0": 1})
    (third,) = run.lease()
    failure = calls.fail(third, Report.FINAL, MemberReason.ENGINE_ERROR, "it broke")
    run.queue.call(failure)
    (group,) = run.queue.groups([("0", 3)])
    assert (group.state, group.errors) == ("open", [None] * 3)
    assert [submit(lease).left for lease in first[1:]] == [1, 0]
    assert run.queue.call(calls.audit(deep=True)).problems == []


def test_names_that_are_no_members_are_leased_to_nobody_and_stop_nothing(run: Backstage) -> None:
    """One garbage name in the queue lost every member that was popped with it."""
    run.enqueue(0, 1, n=2)
    foreign = {"garbage": -1, "0:7": 0, "99:0": 0, ":": 0, "0:0:token": 0, "": 0}
    for members in ("q", "s", "d", "l"):
        run.queue.client.zadd(run.queue.prefix + members, foreign)
    leases: list[Lease] = []

    def all_leased() -> bool:
        run.queue.call(calls.sweep())
        leases.extend(run.lease())
        return len(leases) >= 4

    wait_until(all_leased)
    assert sorted((lease.group_index, lease.member) for lease in leases) == [
        ("0", 0), ("0", 1), ("1", 0), ("1", 1),
    ]  # fmt: skip
    run.complete(leases)
    run.judge()
    assert run.queue.depths()["ready"] == 2
    counters = run.queue.counters()
    assert (counters["completed"], counters.get("crashes", 0)) == (4, 0)


@pytest.mark.parametrize("deleted", ["q", "l"])
def test_members_that_lost_their_place_are_named_by_audit_and_healed_by_requeue(
    run: Backstage, connect: Connect, deleted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing heals that by itself: nobody can tell it from a member that somebody took."""
    run.enqueue(0, 1)
    if deleted == "l":
        run.lease()
    run.queue.client.delete(run.queue.prefix + deleted)
    port = run.queue.client.connection_pool.connection_kwargs["port"]
    where = ("--redis", f"redis://127.0.0.1:{port}", "--run", run.queue.run)
    assert main(["audit", "--deep", *where]) == 1
    assert "is in 0 sets" in capsys.readouterr().out
    for gid in ("0", "1"):
        assert main(["requeue", gid, *where]) == 0
    run.work()
    run.end_of_data()
    assert train_all(connect()) == [0, 1]
    assert main(["audit", "--deep", *where]) == 0
