"""Evaluation groups: first in the queue, beyond capacity, and apart from the training identity."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.keys import EVALUATION_PRIORITY
from tests.queue_bench import Bench, fake_bench

E = "e:gsm8k:0"


def _ids(bench: Bench, worker: str = "w", limit: int = 256) -> list[str]:
    return [f"{lease.group_index}.{lease.member}" for lease in bench.lease(worker, limit)]


def _training_counts(bench: Bench) -> dict[str, int]:
    return {name: n for name, n in bench.counters().items() if not name.startswith("e.")}


def test_an_evaluation_comes_before_training_that_waited_longer(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    bench.enqueue(1, n=1, priority=0)
    assert bench.enqueue(E, n=2) == ["new"]
    bench.enqueue("e:gsm8k:1", n=1)
    assert _ids(bench) == [f"{E}.0", f"{E}.1", "e:gsm8k:1.0", "0.0", "1.0"]


def test_the_priority_of_evaluations_is_below_every_row_s() -> None:
    assert EVALUATION_PRIORITY < 0
    assert calls.enqueue(E, 1, b"").args[2] == EVALUATION_PRIORITY
    assert calls.enqueue(3, 1, b"").args[2] == 0
    assert calls.enqueue(E, 1, b"", priority=2).args[2] == 2


def test_a_group_of_no_members_is_refused() -> None:
    with pytest.raises(ValueError, match="n = 0"):
        calls.enqueue(0, 0, b"")


def test_an_evaluation_that_comes_back_is_before_training_again(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    bench.enqueue(E, n=4)
    back, delayed, retried, expired = bench.lease("dead", 4)
    bench.fail(back, Report.BACK, MemberReason.SHUTDOWN)
    bench.fail(retried, Report.RETRY)
    bench.fail(delayed, Report.BACK, MemberReason.SHUTDOWN, delay_s=20)
    assert expired.member == 3
    bench.advance(20_001)
    assert _ids(bench) == [f"{E}.0", f"{E}.1", f"{E}.2", f"{E}.3", "0.0"]


def _suspects(bench: Bench, *groups: str) -> None:
    """Let the members of groups crash twice."""
    bench.enqueue(*(int(g) if g.isdigit() else g for g in groups), n=1)
    for crash in range(2):
        bench.lease(f"dead{crash}")
        bench.advance(15_001)
    assert {bench.where(group, 0) for group in groups} == {"s"}


def test_a_suspect_evaluation_comes_before_suspects_of_training(bench: Bench) -> None:
    _suspects(bench, "0", "1", E)
    assert _ids(bench, limit=1) == [f"{E}.0"]


def test_an_evaluation_comes_before_suspects_of_training(bench: Bench) -> None:
    _suspects(bench, "0", "1")
    bench.enqueue(E, n=2)
    bench.enqueue(2, n=2)
    assert _ids(bench, limit=2) == [f"{E}.0", f"{E}.1"]
    assert _ids(bench, limit=3) == ["0.0", "1.0", "2.0"]


def test_evaluations_leave_the_rest_of_a_lease_to_suspects_of_training(bench: Bench) -> None:
    _suspects(bench, "0", "1")
    bench.enqueue(E, n=2)
    assert set(_ids(bench, limit=3)) == {f"{E}.0", f"{E}.1", "0.0"}


def test_lease_rings_for_what_suspects_left_waiting(bench: Bench) -> None:
    _suspects(bench, "0", "1")
    bench.enqueue(2)
    while bench.queue.wait_bell(0.01):
        pass
    assert _ids(bench, limit=2) == ["0.0", "1.0"]
    assert bench.queue.wait_bell(0.01)


def test_evaluations_need_no_capacity_and_take_none() -> None:
    bench = fake_bench(cap=1)
    assert bench.enqueue(0, E, "e:gsm8k:1", 1) == ["new", "new", "new", "full"]
    bench.call(calls.withdraw("0"))
    assert bench.enqueue(1) == ["new"]
    bench.audit()


@pytest.mark.parametrize("state", ["queued", "open", "ready", "delivered"])
@pytest.mark.parametrize("end", ["ack", "withdraw", "verdict", "abort", "new version", "requeue"])
def test_the_end_of_an_evaluation_is_counted_apart(state: str, end: str) -> None:
    bench = fake_bench(max_stale=0)
    bench.connect()
    bench.ready(1)
    bench.deliver(1)
    _bring(bench, state)
    before = _training_counts(bench)
    delivered = bench.m("delivered")
    assert delivered == "1"
    ended = _end(bench, end, state)
    after = _training_counts(bench)
    if end == "abort":
        assert after.pop("dropped:run_aborted") == 1
    else:
        assert bench.m("delivered") == delivered
    assert after == before
    assert bench.terminal() == set()
    counts = {name: n for name, n in bench.counters().items() if name.startswith("e.")}
    assert counts == {"e.enqueued": 1} | ({f"e.{ended}": 1} if ended else {})
    assert (bench.state(E) is None) == (bool(ended) and ended != "requeued")
    bench.audit()


def _bring(bench: Bench, state: str) -> None:
    bench.enqueue(E)
    if state == "queued":
        return
    leases = bench.lease(limit=1 if state == "open" else 9)
    if state == "open":
        return
    bench.complete(leases)
    assert bench.queue.read_full("a", count=9, block_s=0) == []
    if state == "delivered":
        assert bench.call(calls.deliver("trainer", [E])) == ["ok"]


def _end(bench: Bench, end: str, state: str) -> str:
    """Try to end the evaluation; return the counter that says so, if it ended."""
    if end == "ack":
        assert bench.call(calls.ack("trainer", [E])) == ["acked"]
        return "acked"
    if end == "withdraw":
        answer = bench.call(calls.withdraw(E))
        assert answer == ("held" if state == "delivered" else "dropped")
        return "" if state == "delivered" else "dropped:withdrawn"
    if end == "verdict":
        entries = bench.queue.read_eval(block_s=0)
        assert [entry.group_index for entry in entries] == (
            [] if state in ("queued", "open") else [E]
        )
        assert {bench.judge(entry, DropReason.ZERO_STD) for entry in entries} <= {"noop"}
        return ""
    if end == "abort":
        bench.call(calls.abort_run())
        bench.sweep()
        return "dropped:run_aborted"
    if end == "requeue":
        assert bench.call(calls.requeue(E, 0)) == "requeued"
        return "requeued"
    bench.call(calls.set_version(3))
    assert bench.sweep().evicted == 0, "an evaluation is never stale"
    answer = "ok" if state in ("ready", "delivered") else "gone"
    assert bench.call(calls.deliver("trainer", [E])) == [answer]
    return ""


def test_a_deadline_ends_members_of_an_evaluation_like_any_other(bench: Bench) -> None:
    bench.enqueue(E, timeout_ms=1000)
    bench.lease(limit=1)
    bench.advance(1001)
    assert bench.state(E) == "ready"
    assert bench.queue.groups([(E, 2)])[0].why == "deadline"
    bench.audit()


def test_an_evaluation_that_ended_is_ready_at_once_and_stays_until_its_ack(bench: Bench) -> None:
    bench.connect()
    bench.enqueue(E, "e:gsm8k:1", n=1)
    bench.complete(bench.lease())
    first, second = bench.queue.read_eval(block_s=0)
    assert [first.group_index, second.group_index] == [E, "e:gsm8k:1"]
    assert bench.queue.read_eval(first.message_id, block_s=0) == [second]
    assert bench.queue.read_eval(second.message_id, block_s=0) == []
    assert bench.queue.read_eval(count=1, block_s=0) == [first], "a new reader finds it again"
    assert bench.queue.read_ready(count=9, block_s=0) == []
    delivery = bench.queue.deliver_and_fetch("trainer", [first, second])
    assert delivery.answers == ["ok", "ok"]
    assert [group.bodies for group in delivery.groups if group] == [[b"body"], [b"body"]]
    assert bench.ack(E) == ["acked"]
    assert bench.queue.read_eval(block_s=0) == [second]
    assert bench.queue.depths()["eval"] == 1
    bench.audit()


def test_an_entry_of_eval_that_is_none_of_ours_is_passed(bench: Bench) -> None:
    bench.client.xadd(f"{bench.key}eval", {"x": "y"})
    bench.enqueue(E, n=1)
    bench.complete(bench.lease())
    foreign, ours = bench.queue.read_eval(block_s=0)
    assert (foreign.group_index, ours.group_index) == ("", E)
    assert bench.queue.read_eval(foreign.message_id, block_s=0) == [ours]


LEASE_MS = 15_000


@pytest.mark.parametrize("state", ["open", "ready", "delivered"])
def test_an_evaluation_that_nobody_acks_is_forgotten_a_lease_after_its_deadline(
    bench: Bench, state: str
) -> None:
    bench.connect()
    bench.enqueue(E, timeout_ms=20_000)
    leases = bench.lease()
    if state == "open":
        bench.complete(leases[:1])
    else:
        bench.complete(leases)
        if state == "delivered":
            assert bench.deliver(E) == ["ok"]
    bench.advance(20_000 + LEASE_MS - 200)
    assert bench.state(E) == ("delivered" if state == "delivered" else "ready")
    assert len(bench.queue.read_eval(block_s=0)) == 1
    bench.audit()
    bench.advance(LEASE_MS)
    assert bench.state(E) is None
    assert bench.queue.read_eval(block_s=0) == []
    assert bench.counters()["e.dropped:deadline"] == 1
    assert bench.queue.past()[0]["detail"] == "nobody acked the evaluation"
    assert bench.client.zcard(f"{bench.key}dl") == 0
    bench.audit()


def test_an_evaluation_without_a_deadline_stays_until_somebody_acks_it(bench: Bench) -> None:
    bench.enqueue(E)
    bench.complete(bench.lease())
    bench.advance(20 * LEASE_MS)
    assert bench.state(E) == "ready"
    bench.audit()


def test_a_deadline_of_an_evaluation_stands_still_while_the_run_is_paused(bench: Bench) -> None:
    bench.enqueue(E, timeout_ms=1000)
    bench.complete(bench.lease())
    bench.call(calls.pause())
    bench.advance(10 * LEASE_MS)
    assert bench.state(E) == "ready"
    bench.call(calls.resume())
    bench.advance(1001 + LEASE_MS)
    assert bench.state(E) is None


def test_an_evaluation_that_begins_anew_has_no_entry_and_no_deadline(bench: Bench) -> None:
    bench.enqueue(E, timeout_ms=1000)
    bench.complete(bench.lease())
    assert bench.call(calls.requeue(E, 0)) == "requeued"
    assert bench.queue.read_eval(block_s=0) == []
    assert bench.client.zcard(f"{bench.key}dl") == 0
    bench.audit()
    bench.complete(bench.lease())
    assert [entry.group_index for entry in bench.queue.read_eval(block_s=0)] == [E]
    bench.audit()


def test_an_evaluation_in_the_trainer_s_hands_keeps_no_training_run_from_its_end(
    bench: Bench,
) -> None:
    """The trainer counts live groups less those that it holds."""
    bench.connect()
    _bring(bench, "delivered")
    bench.enqueue(0)
    info, depths = bench.queue.info(), bench.queue.depths()
    assert info is not None
    assert (info.delivered, depths["live"]) == (0, 1)


# --- evaluations whose keys vanish ---------------------------------------------------------------
def _walk(bench: Bench) -> int:
    """Let the walk over everything begin, and end; returns how many groups it ended."""
    ended = 0
    for _ in range(2):
        bench.set_clock(bench.now_ms + LEASE_MS // 2)
        ended += bench.sweep().vanished
    return ended


def _ended(bench: Bench, timeout_ms: int = 0) -> None:
    bench.connect()
    bench.enqueue(E, "e:gsm8k:1", n=1, timeout_ms=timeout_ms)
    bench.complete(bench.lease())


def test_an_evaluation_that_lost_its_entry_gets_another(bench: Bench) -> None:
    _ended(bench)
    bench.client.delete(f"{bench.key}eval")
    assert _walk(bench) == 0
    assert {entry.group_index for entry in bench.queue.read_eval(block_s=0)} == {E, "e:gsm8k:1"}
    assert bench.queue.read_ready(count=9, block_s=0) == []
    bench.audit()
    assert bench.ack(E, "e:gsm8k:1") == ["acked", "acked"]
    assert bench.queue.read_eval(block_s=0) == []


@pytest.mark.parametrize("timeout_ms", [0, 60_000])
def test_an_evaluation_whose_record_vanished_is_taken_out_of_everything(
    bench: Bench, timeout_ms: int
) -> None:
    _ended(bench, timeout_ms)
    bench.client.delete(f"{bench.key}g:{E}")
    assert _walk(bench) == 1
    assert [entry.group_index for entry in bench.queue.read_eval(block_s=0)] == ["e:gsm8k:1"]
    counters = bench.counters()
    assert (counters["e.vanished"], counters["e.dropped:withdrawn"]) == (1, 1)
    assert bench.m("epoch") == "1", "no producer has to scan for it"
    assert bench.client.zcard(f"{bench.key}dl") == (1 if timeout_ms else 0)
    bench.audit()


def test_an_evaluation_whose_results_vanished_is_dropped(bench: Bench) -> None:
    _ended(bench)
    bench.client.delete(f"{bench.key}b:{E}")
    assert _walk(bench) == 1
    assert [entry.group_index for entry in bench.queue.read_eval(block_s=0)] == ["e:gsm8k:1"]
    bench.audit()


def test_an_entry_in_eval_that_its_group_does_not_name_is_removed(bench: Bench) -> None:
    _ended(bench)
    bench.bring(0, "full")
    good = bench.queue.read_eval(block_s=0)
    for gid in (E, "e:nobody:1", "0"):
        bench.client.xadd(f"{bench.key}eval", {"g": gid, "n": 1})
    bench.client.xadd(f"{bench.key}ready", {"g": E, "n": 1})
    assert _walk(bench) == 0
    assert bench.queue.read_eval(block_s=0) == good
    assert bench.client.xlen(f"{bench.key}ready") == 0
    bench.audit()


def test_the_audit_finds_an_evaluation_without_its_entry(bench: Bench) -> None:
    _ended(bench)
    (first, _) = bench.queue.read_eval(block_s=0)
    bench.client.xdel(f"{bench.key}eval", first.message_id)
    assert bench.call(calls.audit(deep=True)).problems == [
        f"group {E} has no entry in eval", "eval has 1 entries, groups account for 2",
    ]  # fmt: skip


@pytest.mark.parametrize("script", ["complete", "fail", "sweep", "ack", "withdraw"])
def test_a_foreign_key_in_place_of_eval_changes_nothing(bench: Bench, script: str) -> None:
    bench.connect()
    bench.enqueue(E, n=1, timeout_ms=1_000)
    (lease,) = bench.lease()
    if script in ("ack", "withdraw"):
        bench.complete([lease])
        bench.client.delete(f"{bench.key}eval")
    bench.client.set(f"{bench.key}eval", "somebody's")
    before = bench.dump()
    call: calls.ScriptCall[Any] = {
        "complete": calls.complete([calls.Completion(lease, b"h", b"b")]),
        "fail": calls.fail(lease, Report.FINAL, MemberReason.TOOL_ERROR, "no"),
        "sweep": calls.sweep(),
        "ack": calls.ack("trainer", [E]),
        "withdraw": calls.withdraw(E),
    }[script]
    if script == "sweep":
        bench.set_clock(bench.now_ms + 1_001)
    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE|wrong kind"):
        bench.call(call)
    after = bench.dump()
    assert {k: v for k, v in after.items() if k not in ("m", "l")} == {
        k: v for k, v in before.items() if k not in ("m", "l")
    }
    assert len(after.get("l", [])) == len(before.get("l", [])), "the lease is still there"
    bench.client.delete(f"{bench.key}eval")
    if script in ("ack", "withdraw"):
        _walk(bench)
    bench.call(call)
    bench.audit()
