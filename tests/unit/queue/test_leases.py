"""Leases: who gets what, the fence, budgets, and the poison rule."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from rollstream.errors import MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease, LeaseAnswer
from rollstream.queue.calls import Completion
from tests.queue_bench import Bench, fake_bench


def test_lease_gives_the_prompt_once_per_group_and_what_is_left_of_the_deadline(
    bench: Bench,
) -> None:
    bench.enqueue(7, n=3, timeout_ms=4000)
    answer = bench.call(calls.lease("w", 1, 2))
    (group,) = answer.groups
    assert (group.group_index, group.n, group.prompt) == ("7", 3, b"prompt 7")
    assert group.remaining_s == 4.0
    assert [m.lease for m in group.members] == [Lease("7", 0, "w-1-1"), Lease("7", 1, "w-1-2")]
    bench.advance(1500)
    (group,) = bench.call(calls.lease("w", 2, 2)).groups
    assert group.remaining_s == 2.5
    assert [m.lease.member for m in group.members] == [2]


def test_lease_goes_by_priority_then_by_age(bench: Bench) -> None:
    bench.enqueue(0, 1, n=1)
    bench.enqueue(2, n=1, priority=-1)
    bench.enqueue(3, n=1, priority=1)
    assert [lease.group_index for lease in bench.lease()] == ["2", "0", "1", "3"]


def test_lease_has_no_deadline_where_none_was_asked(bench: Bench) -> None:
    bench.enqueue(0)
    assert bench.call(calls.lease("w", 1, 1)).groups[0].remaining_s is None
    bench.advance(1_000_000)
    assert bench.state(0) == "open"


def test_lease_repeated_gives_only_what_is_still_leased(bench: Bench) -> None:
    bench.enqueue(0, n=3)
    first = bench.call(calls.lease("w", 1, 3)).groups[0].members
    bench.complete([first[1].lease])
    bench.fail(first[2].lease, Report.BACK)
    again = bench.call(calls.lease("w", 1, 3)).groups[0].members
    assert again == [first[0]]


def test_lease_with_an_older_call_number_is_old(bench: Bench) -> None:
    bench.enqueue(0)
    bench.call(calls.lease("w", 2, 1))
    assert bench.call(calls.lease("w", 1, 1)).state == "old"
    assert bench.where(0, 1) == "q"


def test_lease_repeated_survives_that_its_group_lives_anew(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(0, timeout_ms=1000)
    bench.call(calls.lease("w", 1, 2))
    bench.call(calls.withdraw("0"))
    bench.call(calls.rewind("trainer", "r", 0, b""))
    assert bench.enqueue(0, timeout_ms=1000) == ["new"]
    assert bench.call(calls.lease("w", 1, 2)).groups == []
    assert bench.where(0, 0) == "q"


def test_lease_shares_fairly_and_never_more_than_256(bench: Bench) -> None:
    bench.enqueue(0, n=4096)
    assert len(bench.lease("a", 4096)) == 256
    bench.enqueue(1, n=24)
    for worker in "bcdefgh":
        bench.call(calls.beat(worker, []))
    queued = 4096 - 256 + 24
    assert len(bench.lease("a", 4096)) == 256 < -(-queued // 8)
    small = fake_bench()
    small.enqueue(0, n=24)
    for worker in "abc":
        small.call(calls.beat(worker, []))
    assert len(small.lease("a", 100)) == 8
    assert len(small.lease("b", 3)) == 3


def test_lease_rings_again_while_members_are_left(bench: Bench) -> None:
    bench.enqueue(0, n=3)
    assert bench.queue.wait_bell(0.01)
    bench.lease(limit=2)
    assert bench.queue.wait_bell(0.01)
    bench.lease(limit=2)
    assert not bench.queue.wait_bell(0.01)


def _enqueue_large(bench: Bench, *ids: int) -> None:
    for gid in ids:
        bench.call(calls.enqueue(gid, 2, b"p" * (1 << 20)))


def _lease_ids(answer: LeaseAnswer) -> list[str]:
    return [member.lease.id for group in answer.groups for member in group.members]


def test_lease_takes_no_further_group_once_its_prompts_exceed_4_mb(bench: Bench) -> None:
    _enqueue_large(bench, *range(12))
    waiting = bench.client.zrange(f"{bench.key}q", 0, -1, withscores=True)
    bench.client.delete(f"{bench.key}bell")
    first = bench.call(calls.lease("w", 1, 256))
    assert [group.group_index for group in first.groups] == ["0", "1", "2", "3", "4"]
    assert bench.client.zrange(f"{bench.key}q", 0, -1, withscores=True) == waiting[10:]
    assert bench.queue.wait_bell(0.01)
    assert _lease_ids(bench.call(calls.lease("w", 1, 256))) == _lease_ids(first)
    rest = [
        group.group_index for no in (2, 3) for group in bench.call(calls.lease("w", no, 256)).groups
    ]
    assert rest == ["5", "6", "7", "8", "9", "10", "11"]
    bench.audit()


def test_lease_gives_a_group_whose_prompt_alone_exceeds_4_mb(bench: Bench) -> None:
    for gid in range(2):
        bench.call(calls.enqueue(gid, 2, b"p" * (5 << 20)))
    assert [len(bench.lease()) for _ in range(3)] == [2, 2, 0]


def test_lease_beyond_its_prompts_gives_suspects_back_and_keeps_every_token(bench: Bench) -> None:
    _enqueue_large(bench, *range(8))
    for gid in range(8):
        # Member 0 of each is a suspect.
        bench.client.hset(f"{bench.key}g:{gid}", "x0", 2)
        bench.client.zrem(f"{bench.key}q", f"{gid}:0")
        score = bench.client.hget(f"{bench.key}g:{gid}", "score")
        bench.client.zadd(f"{bench.key}s", {f"{gid}:0": float(score or 0)})
    first = bench.call(calls.lease("w", 1, 256))
    assert _lease_ids(first) == [
        f"{gid}:{i}:w-1-{place}"
        for gid in range(5) for i, place in ((0, gid + 1), (1, gid + 9))
    ]  # fmt: skip
    assert [bench.where(5, 0), bench.where(5, 1)] == ["s", "q"]
    assert bench.call(calls.lease("w", 1, 256)) == first
    second = bench.call(calls.lease("w", 2, 256))
    assert [lease.rsplit(":", 1)[0] for lease in _lease_ids(second)] == [
        "5:0",
        "5:1",
        "6:0",
        "6:1",
        "7:0",
        "7:1",
    ]
    bench.audit()


def test_lease_that_cannot_give_back_takes_nothing(bench: Bench) -> None:
    _enqueue_large(bench, *range(8))
    bench.client.delete(f"{bench.key}bell")
    bench.client.set(f"{bench.key}bell", "another program's")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        bench.call(calls.lease("w", 1, 256))
    assert bench.client.zcard(f"{bench.key}q") == 16
    bench.client.delete(f"{bench.key}bell")
    bench.audit()
    assert len(bench.call(calls.lease("w", 1, 256)).groups) == 5


def test_lease_gives_nothing_in_a_run_that_does_not_run(bench: Bench) -> None:
    bench.enqueue(0)
    bench.call(calls.pause())
    assert bench.call(calls.lease("w", 1, 1)).state == "paused"
    bench.call(calls.fail_run("broken"))
    assert bench.call(calls.lease("w", 1, 1)).state == "failed"
    bench.client.flushall()
    bench.set_clock(bench.now_ms)
    assert bench.call(calls.lease("w", 1, 1)).state == "lost"
    assert bench.key_names() == set()


def test_lease_of_an_evaluation_keeps_its_colons_and_has_no_age(bench: Bench) -> None:
    bench.enqueue("e:gsm8k:4", n=2, priority=-1)
    leases = bench.lease()
    assert [lease.group_index for lease in leases] == ["e:gsm8k:4"] * 2
    assert "age" not in bench.key_names()
    assert bench.complete(leases) == ["ok", "ok"]
    assert bench.counters()["e.enqueued"] == 1
    bench.audit()


def test_beat_extends_live_leases_and_reports_the_others(bench: Bench) -> None:
    bench.enqueue(0)
    kept, lost = bench.lease()
    for _ in range(4):
        bench.advance(5000)
        bench.call(calls.beat("worker", [kept.id]))
    assert bench.where(0, kept.member) == "l"
    assert bench.where(0, lost.member) == "q"
    assert bench.call(calls.beat("worker", [kept.id, lost.id])).lost == [lost.id]


def test_beat_after_the_end_of_a_group_creates_no_key_of_it(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(0)
    leases = bench.lease()
    bench.call(calls.withdraw("0"))
    before = bench.key_names()
    answer = bench.call(calls.beat("worker", [lease.id for lease in leases]))
    assert answer.lost == [lease.id for lease in leases]
    assert bench.key_names() == before
    assert not {key for key in before if key.startswith(("g:", "b:", "l"))} & {"l", "g:0", "b:0"}


def test_complete_stores_header_body_and_text_apart(bench: Bench) -> None:
    bench.enqueue(0)
    a, b = bench.lease()
    results = [Completion(a, b"ha", b"ba", b"ta"), Completion(b, b"hb", b"bb")]
    assert [x.left for x in bench.call(calls.complete(results))] == [1, 0]
    (group,) = bench.queue.groups([("0", 2)], text=True)
    assert (group.headers, group.bodies, group.texts) == (
        [b"ha", b"hb"], [b"ba", b"bb"], [b"ta", None]
    )  # fmt: skip
    assert (group.state, group.prompt, group.version_at_lease) == ("full", b"prompt 0", 0)
    assert bench.queue.read_full("a", count=9, block_s=0)[0].n == 2


def test_complete_of_an_expired_lease_is_fenced_and_changes_no_body(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    (zombie,) = bench.lease("dead")
    bench.advance(16_000)
    (lease,) = bench.lease("alive")
    assert bench.complete([zombie], b"late") == ["fenced"]
    assert bench.complete([lease], b"right") == ["ok"]
    assert bench.complete([zombie], b"late") == ["fenced"]
    assert bench.queue.groups([("0", 1)])[0].bodies == [b"right"]
    assert bench.counters()["fenced"] == 2


def test_complete_is_fenced_where_the_hash_of_the_group_is_gone(bench: Bench) -> None:
    bench.enqueue(0)
    leases = bench.lease()
    bench.client.delete(f"{bench.key}g:0")
    assert bench.complete(leases) == ["fenced", "fenced"]
    assert bench.call(calls.beat("worker", [leases[0].id])).lost == [leases[0].id]
    bench.sweep()


def test_complete_over_the_limit_fails_that_member_and_the_group_goes_on() -> None:
    bench = fake_bench(max_body=20)
    bench.enqueue(0)
    a, b = bench.lease()
    assert bench.complete([a], b"x" * 100) == ["too_large"]
    assert bench.complete([b], b"x") == ["ok"]
    (group,) = bench.queue.groups([("0", 2)])
    assert group.state == "full"
    assert group.why == "too_large"
    assert group.errors == [("too_large", "110 bytes, allowed are 20"), None]
    assert group.bodies == [None, b"x"]
    bench.audit()


def test_fail_retries_until_the_budget_and_only_the_last_error_stands(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    for attempt in range(3):
        answer = bench.call(calls.lease("w", attempt + 1, 1))
        (member,) = answer.groups[0].members
        assert (member.attempts, member.crashes) == (attempt, 0)
        assert bench.fail(member.lease) == ("failed" if attempt == 2 else "again")
    assert bench.queue.groups([("0", 1)])[0].errors == [("engine_error", "it broke")]
    assert bench.state(0) == "full"
    assert bench.counters() == {
        "enqueued": 1, "attempts": 3, "member_failed:engine_error": 1
    }  # fmt: skip


def test_fail_final_does_not_wait_for_the_budget(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    assert bench.fail(bench.lease()[0], Report.FINAL, MemberReason.MERGE_ERROR) == "failed"
    assert bench.state(0) == "full"


def test_fail_back_is_never_charged_however_often(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    for _ in range(50):
        assert bench.fail(bench.lease()[0], Report.BACK, MemberReason.SHUTDOWN) == "back"
    (group,) = bench.call(calls.lease("w", 1, 1)).groups
    assert (group.members[0].attempts, group.members[0].crashes) == (0, 0)


def test_fail_with_a_delay_waits_in_d_until_it_is_due(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    bench.fail(bench.lease()[0], Report.BACK, delay_s=2.0)
    assert bench.where(0, 0) == "d"
    assert bench.lease() == []
    bench.advance(1999)
    assert bench.where(0, 0) == "d"
    bench.advance(1)
    assert bench.where(0, 0) == "q"


def test_lease_promotes_what_is_due_without_a_sweep(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    bench.fail(bench.lease()[0], Report.BACK, delay_s=2.0)
    bench.set_clock(bench.now_ms + 2000)
    assert len(bench.lease()) == 1


def test_an_error_of_a_retried_attempt_is_not_an_error_of_the_member(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    bench.fail(bench.lease()[0])
    bench.complete(bench.lease())
    assert bench.queue.groups([("0", 1)])[0].errors == [None]


# --- crashes and poison --------------------------------------------------------------------------
def _crash(bench: Bench, worker: str, limit: int = 256) -> list[Lease]:
    """Let a new worker take what it gets, and die."""
    leases = bench.lease(worker, limit)
    bench.advance(15_001)
    return leases


def test_a_crash_is_charged_by_expiry_and_four_are_the_end(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    for crash in range(4):
        (lease,) = _crash(bench, f"w{crash}")
        assert lease.member == 0
    text = "its worker died 4 times, the last one was w3"
    assert bench.queue.groups([("0", 1)])[0].errors == [("crashed", text)]
    assert bench.counters()["crashes"] == 4
    bench.audit()


def test_a_crash_says_where_the_worker_ran_and_what_went_wrong_before() -> None:
    bench = fake_bench(max_crashes=1)
    bench.enqueue(0, n=1)
    bench.fail(bench.lease("w1")[0])
    bench.call(calls.present("worker", "w2", about="node-7:123"))
    _crash(bench, "w2")
    text = "its worker died 1 time, the last one was w2 (node-7:123); before that: "
    assert bench.queue.groups([("0", 1)])[0].errors == [("crashed", text + "engine_error it broke")]
    bench.advance(60_000)
    assert "wh" not in bench.key_names()


def test_suspects_are_apart_and_eight_share_a_worker() -> None:
    bench = fake_bench(lease_ms=1000)
    bench.enqueue(0, n=20)
    for crash in range(2):
        assert len(bench.lease(f"w{crash}")) == 20
        bench.advance(1001)
        bench.call(calls.present("worker", f"w{crash}", leaving=True))
    assert {bench.where(0, i) for i in range(20)} == {"s"}
    bench.enqueue(1, n=4)
    leases = bench.lease("a", 64)
    assert [lease.group_index for lease in leases].count("0") == 8
    assert [lease.group_index for lease in bench.lease("a", 64)].count("0") == 0
    assert len([x for x in bench.lease("b", 3) if x.group_index == "0"]) == 3
    bench.complete([x for x in leases if x.group_index == "0"][:2])
    assert len([x for x in bench.lease("a", 64) if x.group_index == "0"]) == 2


def test_a_suspect_with_three_crashes_is_the_only_one_of_its_worker() -> None:
    bench = fake_bench(lease_ms=1000)
    bench.enqueue(0, n=4)
    for crash in range(3):
        assert len(bench.lease(f"w{crash}")) == 4
        bench.advance(1001)
    assert [x.member for x in bench.lease("a")] == [0]
    assert bench.lease("a") == []
    assert [x.member for x in bench.lease("b")] == [1]


def test_a_poison_takes_nobody_with_it() -> None:
    """Whoever runs with member 0 dies; only member 0 fails in the end."""
    bench = fake_bench(lease_ms=1000)
    bench.enqueue(0, n=64)
    for round_no in range(40):
        leases = bench.lease(f"w{round_no}", 64)
        if any(lease.member == 0 for lease in leases):
            bench.advance(1001)
        else:
            bench.complete(leases)
        if bench.state(0) == "full":
            break
    errors = bench.queue.groups([("0", 64)])[0].errors
    assert [i for i, error in enumerate(errors) if error] == [0]


def test_a_suspect_that_comes_back_stays_a_suspect(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    _crash(bench, "w0")
    _crash(bench, "w1")
    bench.fail(bench.lease()[0], Report.BACK)
    assert bench.where(0, 0) == "s"
    bench.fail(bench.lease()[0], Report.RETRY, delay_s=1.0)
    bench.advance(1000)
    assert bench.where(0, 0) == "s"


def test_a_lease_of_a_dead_worker_ends_in_time_after_leases_became_shorter() -> None:
    bench = fake_bench()
    bench.call(calls.set_budget("lease_ms", 3_600_000))
    bench.enqueue(0, n=2)
    bench.lease("dead")
    bench.call(calls.set_budget("lease_ms", 1000))
    bench.budgets["lease_ms"] = 1000
    bench.advance(2001)
    assert bench.counters()["crashes"] == 2
    assert len(bench.lease("healthy")) == 2
    bench.audit()
