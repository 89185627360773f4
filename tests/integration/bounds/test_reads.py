"""No round trip asks Redis for more than it copies in a moment, whatever the size of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from examples.devserver import DevServer
from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Completion
from rollstream.queue.fetch import MAX_TRIP_BYTES
from rollstream.queue.keys import SCHEMA
from rollstream.queue.queue import Queue
from rollstream.queue.reads import Command, StoredGroup, StreamEntry
from rollstream.queue.scripts import load_scripts
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.builders import budgets
from tests.integration.bounds.meter import Meter

MB = 1 << 20
DELIVER = load_scripts()["deliver"].sha.encode()


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    """A server of its own: its memory goes with it."""
    with DevServer() as server:
        yield server


@pytest.fixture
def meter(server: DevServer) -> Iterator[Meter]:
    with Meter(server.port) as meter:
        yield meter


@pytest.fixture
def queue(server: DevServer, run_name: str) -> Iterator[BlockingQueue]:
    with contextlib.closing(BlockingQueue.connect(server.url, run_name)) as queue:
        queue.call(calls.open_run(SCHEMA, "source", budgets(max_body=32 * MB, cap=4096)))
        queue.call(calls.connect("trainer", 1))
        yield queue
        queue.client.flushall()


@pytest.fixture
def metered(meter: Meter, run_name: str, queue: BlockingQueue) -> Iterator[BlockingQueue]:
    """A second connection to the run, whose round trips are counted from here on."""
    with contextlib.closing(BlockingQueue.connect(meter.url, run_name)) as metered:
        metered.info()
        metered.call(calls.deliver("trainer", []))  # it knows the script from now on
        meter.trips.clear()
        yield metered


def body_of(gid: int, member: int, size: int) -> bytes:
    stamp = b"%d:%d " % (gid, member)
    return (stamp * (size // len(stamp) + 1))[:size]


def ready(
    queue: BlockingQueue, sizes: dict[int, list[int]], *, text: bytes = b"", prompt: int = 100
) -> list[StreamEntry]:
    """Bring groups to `ready`, whose members have bodies of these sizes; their entries."""
    call_no = 0
    for gid, of_members in sizes.items():
        queue.call(calls.enqueue(gid, len(of_members), b"p" * prompt))
    while True:
        call_no += 1
        answer = queue.call(calls.lease("worker", call_no, 256))
        leases = [m.lease for group in answer.groups for m in group.members]
        if not leases:
            break
        for lease in leases:
            gid = int(lease.group_index)
            body = body_of(gid, lease.member, sizes[gid][lease.member])
            complete(queue, lease, body, text)
    for entry in queue.read_full("judge", count=5000, block_s=0):
        assert queue.call(calls.verdict(entry.group_index, entry.message_id)) == "ready"
    return queue.read_ready(count=5000, block_s=0)


def complete(queue: BlockingQueue, lease: Lease, body: bytes, text: bytes = b"") -> None:
    (answer,) = queue.call(calls.complete([Completion(lease, b"h", body, text)]))
    assert answer.outcome == "ok"


def check(groups: list[StoredGroup | None], sizes: dict[int, list[int]], text: bytes = b"") -> None:
    assert len(groups) == len(sizes)
    for group, (gid, of_members) in zip(groups, sizes.items(), strict=True):
        assert group is not None
        assert (group.group_index, group.state) == (str(gid), "delivered")
        assert group.headers == [b"h"] * len(of_members)
        assert group.bodies == [body_of(gid, i, size) for i, size in enumerate(of_members)]
        assert group.texts == ([text] * len(of_members) if text else [])


# --- what the streams say ------------------------------------------------------------------------
def test_entries_say_how_large_their_group_is(queue: BlockingQueue) -> None:
    (entry,) = ready(queue, {7: [1000, 50, 0]}, text=b"some text", prompt=333)
    assert (entry.num_bytes, entry.prompt_bytes) == (1050 + 3 * 9, 333)


def test_full_entry_of_failed_members_counts_only_what_is_there(queue: BlockingQueue) -> None:
    queue.call(calls.enqueue(0, 2, b"prompt", timeout_ms=1))
    (group,) = queue.call(calls.lease("worker", 1, 1)).groups
    complete(queue, group.members[0].lease, b"x" * 70)
    while not (entries := queue.read_full("judge", count=1, block_s=0.02)):
        queue.call(calls.sweep())
    assert (entries[0].num_bytes, entries[0].prompt_bytes) == (70, 6)


# --- the trainer ---------------------------------------------------------------------------------
def test_usual_groups_come_in_one_round_trip_with_their_delivery(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    sizes = {gid: [33_000] * 8 for gid in range(15)}
    entries = ready(queue, sizes)
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    (trip,) = meter.trips
    assert (trip.asks_for(b"EVALSHA"), trip.asks_for(b"HMGET")) == (1, 30)


def test_groups_that_do_not_fit_together_come_in_several_bounded_round_trips(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    sizes = {gid: [150_000] * 8 for gid in range(10)}
    entries = ready(queue, sizes)
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    assert len(meter.trips) == 4  # three groups each
    assert max(trip.reply_bytes for trip in meter.trips) <= MAX_TRIP_BYTES
    assert all(trip.asks_for(b"EVALSHA") == 1 for trip in meter.trips)


@pytest.mark.parametrize("is_said", [True, False])
def test_no_round_trip_reads_a_large_group_at_once(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter, *, is_said: bool
) -> None:
    sizes = {0: [100], 1: [3 * MB, 2 * MB, 1 * MB, 9 * MB, 0, 2 * MB], 2: [200]}
    entries = ready(queue, sizes)
    if not is_said:  # an entry that an older release wrote
        entries = [replace(entry, num_bytes=None) for entry in entries]
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    large = sorted(trip.reply_bytes for trip in meter.trips)[-4:]
    # 3 | 2 + 1 | 9, alone since nothing smaller holds it | 0 + 2
    assert [round(size / MB, 1) for size in large] == [2.0, 3.0, 3.0, 9.0]


def test_texts_count_where_they_are_asked_for(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    text = b"t" * (2 * MB)
    sizes = {0: [MB] * 4}
    entries = ready(queue, sizes, text=text)
    found = metered.deliver_and_fetch("trainer", entries, text=True).groups
    check(found, sizes, text)
    assert max(trip.reply_bytes for trip in meter.trips) < MAX_TRIP_BYTES
    meter.trips.clear()
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    assert sum(trip.reply_bytes for trip in meter.trips) < 5 * MB


def test_large_prompts_count_too(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    sizes = {gid: [10, 10] for gid in range(5)}
    entries = ready(queue, sizes, prompt=1_500_000)
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    assert len(meter.trips) == 3
    assert max(trip.reply_bytes for trip in meter.trips) <= MAX_TRIP_BYTES


def test_a_group_of_thousands_is_read_in_bounded_commands(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    sizes = {0: [2000] * 4096}
    entries = ready(queue, sizes)
    check(metered.deliver_and_fetch("trainer", entries).groups, sizes)
    assert max(trip.reply_bytes for trip in meter.trips) <= MAX_TRIP_BYTES


def test_a_group_that_vanishes_between_two_round_trips_is_gone(
    queue: BlockingQueue, metered: BlockingQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ready(queue, {0: [3 * MB] * 3})
    send, sent = metered._send, []

    def dropping(commands: Sequence[Command], client: redis.Redis | None = None) -> list[Any]:
        sent.append(commands)
        if len(sent) == 3:  # sizes, the first body, and then it is dropped
            assert queue.call(calls.retire("trainer", "0", DropReason.STALE)) == "dropped"
        return send(commands, client)

    monkeypatch.setattr(metered, "_send", dropping)
    found = metered.deliver_and_fetch("trainer", entries)
    assert (found.answers, found.groups) == (["gone"], [None])


def test_stream_takes_one_round_trip_a_step_and_every_group_once(
    server: DevServer, meter: Meter, run_name: str
) -> None:
    with Backstage(server.url, run_name, cap=4096) as run:
        run.open()
        run.finish(*range(300), n=1)
        run.end_of_data()
        with GroupStream.connect(meter.url, run=run_name) as stream:
            meter.trips.clear()
            batch = stream.next_batch(300, 10)
            assert batch is not None
            assert batch.group_indexes == list(range(300))
            # References come 64 at a time, and their groups in one round trip.
            assert len(meter.of(b"XRANGE")) == len(meter.of(DELIVER)) == 5
            batch.ack()
    assert max(trip.reply_bytes for trip in meter.trips) < MAX_TRIP_BYTES


def test_ack_of_a_large_batch_is_no_large_call(
    server: DevServer, meter: Meter, run_name: str
) -> None:
    with Backstage(server.url, run_name, cap=4096) as run:
        run.open()
        run.finish(*range(201), n=1)
        with GroupStream.connect(meter.url, run=run_name) as stream:
            first, batch = stream.next_batch(1, 10), stream.next_batch(200, 10)
            assert first is not None
            assert batch is not None
            first.ack()  # the server knows the script from now on
            meter.trips.clear()
            batch.ack()
            assert [trip.asks_for(b"EVALSHA") for trip in meter.trips] == [1] * 4
            assert run.queue.counters()["acked"] == 201


# --- the aggregator ------------------------------------------------------------------------------
def test_headers_of_large_groups_come_in_bounded_round_trips(
    queue: BlockingQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ready(queue, {0: [1] * 1024})
    send, sent = queue._send, []

    def counting(commands: Sequence[Command], client: redis.Redis | None = None) -> list[Any]:
        sent.append(len(commands))
        return send(commands, client)

    monkeypatch.setattr(queue, "_send", counting)
    found = queue.headers(entries * 20)
    assert [group.headers for group in found] == [[b"h"] * 1024] * 20
    assert sent == [8, 8, 4]  # about 4 MB are 8,192 headers


def test_bodies_are_added_to_headers_and_say_whether_the_group_is_the_same(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    entries = ready(queue, {0: [3 * MB] * 2, 1: [500] * 2}, text=b"text")
    for entry, num_trips in zip(entries, (3, 1), strict=True):
        (group,) = metered.headers([entry])
        meter.trips.clear()
        assert metered.bodies(group, text=True)
        assert [len(body or b"") for body in group.bodies] == [entry.num_bytes // 2 - 4] * 2  # type: ignore[operator]  # known
        assert group.texts == [b"text"] * 2
        assert len(meter.trips) == num_trips
        assert max(trip.reply_bytes for trip in meter.trips) < MAX_TRIP_BYTES
    assert queue.call(calls.requeue("1", 0)) == "requeued"
    assert not metered.bodies(group)


async def test_async_queue_reads_bounded_too(
    queue: BlockingQueue, meter: Meter, run_name: str
) -> None:
    sizes = {0: [3 * MB] * 3}
    entries = ready(queue, sizes)
    other = Queue.connect(meter.url, run_name)
    check((await other.deliver_and_fetch("trainer", entries)).groups, sizes)
    (again,) = await other.groups([("0", 3)])
    check([again], sizes)
    await other.aclose()
    assert max(trip.reply_bytes for trip in meter.trips) < MAX_TRIP_BYTES


# --- people --------------------------------------------------------------------------------------
def test_drops_are_read_a_page_a_round_trip(
    queue: BlockingQueue, metered: BlockingQueue, meter: Meter
) -> None:
    for start in range(0, 250, 50):
        ids = range(start, start + 50)
        queue.call_many([calls.enqueue(gid, 1, b"p") for gid in ids])
        queue.call_many([calls.withdraw(str(gid)) for gid in ids])
    drops = metered.past()
    assert [drop["group_index"] for drop in drops] == [str(gid) for gid in reversed(range(250))]
    assert len(meter.trips) == 4  # 100, 100, 50, and the end
    assert [drop["group_index"] for drop in metered.past(120)] == [
        str(gid) for gid in reversed(range(130, 250))
    ]
