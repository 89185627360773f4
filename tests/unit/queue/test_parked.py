"""What a member parked: who reads it, how long it waits, and when it is forgotten."""

from __future__ import annotations

import pytest

from rollstream.errors import MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import LeasedMember
from tests.queue_bench import Bench

ENGINE = MemberReason.ENGINE_ERROR


def _next(bench: Bench, number: int) -> LeasedMember:
    answer = bench.call(calls.lease("next", number, 1))
    return answer.groups[0].members[0]


def test_whoever_leases_a_parked_member_reads_what_it_has(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    (lease,) = bench.lease()
    assert bench.queue.parked(lease) is None
    bench.call(calls.park(lease, b"half"))
    member = _next(bench, 1)
    assert member.parked_bytes == 4
    assert bench.queue.parked(member.lease) == b"half"
    bench.call(calls.park(member.lease, b"three quarters"))
    again = _next(bench, 2)
    assert bench.queue.parked(again.lease) == b"three quarters"
    assert bench.complete([again.lease]) == ["ok"]
    assert bench.queue.parked(again.lease) is None
    assert bench.counters()["parked"] == 2
    bench.audit()


def test_a_member_that_parks_for_a_while_is_leased_no_earlier(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    (lease,) = bench.lease()
    bench.call(calls.park(lease, b"half", delay_s=2))
    assert bench.where(0, 0) == "d"
    bench.audit()
    bench.advance(1_999)
    assert bench.call(calls.lease("next", 1, 1)).groups == []
    bench.advance(1)
    assert _next(bench, 2).parked_bytes == 4


@pytest.mark.parametrize(
    ("report", "answer"), [(Report.RETRY, "again"), (Report.BACK, "back"), (Report.FINAL, "failed")]
)
def test_a_failure_may_forget_what_was_parked(bench: Bench, report: Report, answer: str) -> None:
    bench.enqueue(0, n=2)
    first, other = bench.lease()
    for lease in (first, other):
        bench.call(calls.park(lease, b"half"))
    members = bench.call(calls.lease("next", 1, 2)).groups[0].members
    kept, forgotten = members[0].lease, members[1].lease
    assert bench.call(calls.fail(forgotten, report, ENGINE, "no", forget=True)) == answer
    assert bench.queue.parked(forgotten) is None
    assert bench.queue.parked(kept) == b"half"
    bench.audit()
    if answer != "failed":
        assert _next(bench, 2).parked_bytes == 0


def test_a_failure_keeps_what_was_parked_unless_it_is_to_be_forgotten(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    (lease,) = bench.lease()
    bench.call(calls.park(lease, b"half"))
    member = _next(bench, 1)
    bench.call(calls.fail(member.lease, Report.RETRY, ENGINE, "no"))
    member = _next(bench, 2)
    assert (member.attempts, bench.queue.parked(member.lease)) == (1, b"half")


def test_a_failure_of_another_lease_forgets_nothing(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    (lease,) = bench.lease()
    bench.call(calls.park(lease, b"half"))
    assert bench.call(calls.fail(lease, Report.RETRY, ENGINE, "no", forget=True)) == "fenced"
    assert bench.queue.parked(lease) == b"half"
    bench.audit()
