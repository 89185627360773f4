"""The server's wall clock is set back a day, and forward, under a run at work."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
import redis

from rollstream.queue import calls
from tests.backstage import wait_until
from tests.queue_bench import Bench

DAY_MS = 86_400_000
NEAR_MS = 60_000
CRC_POLYNOMIAL = 0x95AC9329AC4BC9B5


@pytest.fixture
def bench(valkey_url: str, run_name: str) -> Iterator[Bench]:
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        yield Bench(client, run_name, lease_ms=10_000)


def crc64(data: bytes) -> int:
    """The checksum of DUMP."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (CRC_POLYNOMIAL if crc & 1 else 0)
    return crc


def deliver_tomorrow(client: redis.Redis, key: str) -> int:
    """Make a stream what it is on a server whose clock was set back a day after its deliveries.

    No command sets a delivery time in the future, so the dump of the stream is changed: every
    time near now becomes tomorrow.
    """
    dump = client.dump(key)
    assert isinstance(dump, bytes)
    assert struct.unpack("<Q", dump[-8:])[0] == crc64(dump[:-8])
    data, now, changed = bytearray(dump[:-8]), int(time.time() * 1000), 0
    for at in range(len(data) - 8):
        (value,) = struct.unpack_from("<Q", data, at)
        if abs(value - now) < NEAR_MS:
            struct.pack_into("<Q", data, at, value + DAY_MS)
            changed += 1
    client.delete(key)
    client.restore(key, 0, bytes(data) + struct.pack("<Q", crc64(data)))
    return changed


def test_a_dead_aggregators_group_is_taken_over_although_the_clock_went_back_a_day(
    bench: Bench,
) -> None:
    """Redis measures idleness on its wall clock: nobody would have got the group for a day."""
    entry = bench.full(0)
    assert deliver_tomorrow(bench.client, f"{bench.key}full") > 0
    time.sleep(0.02)
    assert bench.queue.claim_full("aggregator", idle_s=0.01, count=9) == []
    bench.set_clock(bench.now_ms - DAY_MS)
    bench.sweep()
    (claimed,) = wait_until(lambda: bench.queue.claim_full("aggregator", idle_s=0.01, count=9))
    assert (claimed.message_id, claimed.deliveries) == (entry.message_id, 2)
    assert bench.judge(claimed) == "ready"
    bench.audit()


@pytest.mark.parametrize("jump_ms", [-DAY_MS, DAY_MS])
def test_a_clock_that_jumps_a_day_ends_nothing_and_the_run_goes_on(
    bench: Bench, jump_ms: int
) -> None:
    bench.connect()
    bench.enqueue(0, 1, n=2, timeout_ms=60_000)
    leases = bench.lease()
    bench.set_clock(bench.now_ms + jump_ms)
    for _ in range(3):
        bench.sweep()
        assert bench.call(calls.beat("worker", [lease.id for lease in leases])).lost == []
    assert bench.complete(leases[:3]) == ["ok"] * 3
    bench.advance(10_001)
    bench.advance(10_001)  # one lease of grace, then the worker that beats no more is dead
    assert bench.counters()["crashes"] == 1
    (left,) = bench.lease("another")
    assert bench.complete([left]) == ["ok"]
    for entry in bench.queue.read_full("aggregator", count=9, block_s=0):
        assert bench.judge(entry) == "ready"
    assert bench.deliver(0, 1) == ["ok", "ok"]
    assert bench.ack(0, 1) == ["acked", "acked"]
    bench.audit()
