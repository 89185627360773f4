"""What a server says of itself, and what is said about it: each fault alone, and none at all."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from rollstream import health

FIT = {
    "redis_version": "7.2.4", "role": "master", "used_memory": "1000000", "maxmemory": "0",
    "maxmemory_policy": "noeviction", "aof_enabled": "1", "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok", "cluster_enabled": "0",
}  # fmt: skip


def findings(
    changes: dict[str, str], *, fsync: Any = b"everysec", save: Any = b""
) -> list[health.Finding]:
    text = "# Server\r\n" + "\r\n".join(f"{k}:{v}" for k, v in (FIT | changes).items())
    replies = [
        text.encode(),
        fsync if isinstance(fsync, Exception) else [b"appendfsync", fsync],
        save if isinstance(save, Exception) else [b"save", save],
        [b"1700000000", b"500000"],
    ]
    return health.judge(health.facts_of(replies))


def test_a_fit_server_has_no_finding() -> None:
    assert findings({}) == []
    assert findings({"maxmemory": "4000000", "redis_version": "6.2.0"}) == []


@pytest.mark.parametrize(
    ("check", "said", "changes", "config"),
    [
        ("version", "Redis 6.0.16 is too old", {"redis_version": "6.0.16"}, {}),
        ("role", "a replica of h:6379", {"role": "slave", "master_host": "h",
                                         "master_port": "6379"}, {}),
        ("eviction", "maxmemory-policy is volatile-lru",
         {"maxmemory": "4000000", "maxmemory_policy": "volatile-lru"}, {}),
        ("memory", "memory is full: 1.0 MB of 1.0 MB", {"maxmemory": "1000000"}, {}),
        ("memory", "nearly full", {"maxmemory": "1100000"}, {}),
        ("persistence", "append-only file is off", {"aof_enabled": "0"}, {}),
        ("persistence", "appendfsync is no", {}, {"fsync": b"no"}),
        ("disk", "could not write its append-only file", {"aof_last_write_status": "err"}, {}),
        ("disk", "could not write a snapshot", {"rdb_last_bgsave_status": "err"}, {}),
    ],
)  # fmt: skip
def test_each_fault_is_one_problem_with_its_reason_and_its_cure(
    check: str, said: str, changes: dict[str, str], config: dict[str, Any]
) -> None:
    (found,) = findings(changes, **config)
    assert (found.check, found.level) == (check, health.PROBLEM)
    assert said in found.what
    assert found.why
    assert found.do
    assert found.sentence.startswith(found.what)


def test_eviction_without_a_limit_of_memory_is_no_problem() -> None:
    assert findings({"maxmemory_policy": "allkeys-lru"}) == []


def test_what_no_snapshot_and_what_snapshots_lose_are_told_apart() -> None:
    (nothing,) = findings({"aof_enabled": "0"}, save=b"")
    (minutes,) = findings({"aof_enabled": "0"}, save=b"3600 1 300 100")
    assert "loses the run" in nothing.why
    assert "since its last snapshot" in minutes.why


def test_a_server_without_config_is_judged_by_info_and_says_so() -> None:
    error = NoPermissionError("User x has no permissions to run the 'config|get' command")
    (note,) = findings({}, fsync=error, save=error)
    assert (note.check, note.level) == ("config", health.NOTE)
    worse = findings({"aof_enabled": "0"}, fsync=error, save=error)
    assert [(f.check, f.level) for f in worse] == [
        ("persistence", health.PROBLEM), ("config", health.NOTE),
    ]  # fmt: skip


def test_a_server_without_info_is_not_judged() -> None:
    refused = NoPermissionError("no")
    (note,) = health.judge(health.facts_of([refused] * 4))
    assert (note.check, note.level) == ("info", health.NOTE)


def test_a_far_clock_and_slow_round_trips_are_found_and_near_ones_are_not() -> None:
    facts = health.facts_of([b"role:master", [], [], [b"1000", b"0"]])
    assert health.clock_finding(facts, 1001.0) == []
    (clock,) = health.clock_finding(facts, 1010.0)
    assert "-10.0 s" in clock.what
    assert health.latency_finding([1.0, 500.0, 2.0]) == []
    (slow,) = health.latency_finding([70.0, 80.0, 1.0])
    assert "70 ms" in slow.what
