"""Every script once more after a lost reply: the answer by its header, and nothing written twice.

redis-py repeats a command whose reply was lost, so each case here is what a network does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import BlockedTime, Completion, ScriptCall
from rollstream.queue.keys import SCHEMA
from rollstream.queue.scripts import SCRIPT_NAMES
from tests.queue_bench import Bench

Prepare = Callable[[Bench], ScriptCall[Any]]


@dataclass(frozen=True)
class Case:
    prepare: Prepare
    first: Any
    """The raw answer is not compared; this is the parsed one, or a predicate of it."""
    second: Any = None
    """None: the same as the first."""
    counted: tuple[str, ...] = ()
    """Counters that count a repeat."""


def _opened(bench: Bench) -> ScriptCall[Any]:
    return calls.open_run(SCHEMA, "source", bench.budgets)


def _deleted(bench: Bench) -> ScriptCall[Any]:
    bench.client.flushall()
    bench.set_clock(bench.now_ms)
    return calls.open_run(SCHEMA, "source", bench.budgets)


def _attend(**how: Any) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        return calls.attend(bench.connect(), "-", **how)

    return prepare


def _enqueue(bench: Bench) -> ScriptCall[Any]:
    return calls.enqueue(3, 2, b"p", priority=1, timeout_ms=500)


def _lease(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0, 1, timeout_ms=5000)
    return calls.lease("w", 1, 3)


def _lease_paused(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0)
    bench.call(calls.pause())
    return calls.lease("w", 1, 3)


def _beat(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0)
    return calls.beat("worker", [*(lease.id for lease in bench.lease()), "0:7:gone"])


def _complete(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0)
    return calls.complete([Completion(lease, b"h", b"b", b"t") for lease in bench.lease()])


def _complete_large(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0, n=1)
    bench.call(calls.set_budget("max_body", 3))
    return calls.complete([Completion(lease, b"h", b"bbb") for lease in bench.lease()])


def _fail(report: Report, delay_s: float = 0.0, *, forget: bool = False) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0)
        if forget:
            assert {bench.call(calls.park(lease, b"half")) for lease in bench.lease()} == {"parked"}
        reason = MemberReason.ENGINE_ERROR
        lease = bench.lease()[0]
        return calls.fail(lease, report, reason, "no", delay_s=delay_s, forget=forget)

    return prepare


def _park(body: bytes, max_body: int = 1000, delay_s: float = 0.0) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0)
        bench.call(calls.set_budget("max_body", max_body))
        return calls.park(bench.lease()[0], body, delay_s=delay_s)

    return prepare


def _paused(call: ScriptCall[Any]) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.call(calls.pause("keep"))
        return call

    return prepare


def _requeue(state: str, life: int = 0) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.connect()
        bench.bring(0, state)
        return calls.requeue("0", life, "why")

    return prepare


def _sweep(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0, 1, timeout_ms=100)
    bench.lease()
    bench.advance(20_000)
    return calls.sweep()


def _keep(bench: Bench) -> ScriptCall[Any]:
    entry = bench.full(0)
    return calls.verdict(entry.group_index, entry.message_id, headers={1: b"new"})


def _drop(bench: Bench) -> ScriptCall[Any]:
    entry = bench.full(0)
    return calls.verdict(entry.group_index, entry.message_id, drop=DropReason.ZERO_STD)


def _deliver(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0, 1)
    return calls.deliver("trainer", ["0", "1", "2"])


def _deliver_stale(bench: Bench) -> ScriptCall[Any]:
    bench.call(calls.set_budget("max_stale", 0))
    bench.connect()
    bench.ready(0)
    bench.call(calls.set_version(1))
    return calls.deliver("trainer", ["0"])


def _ack(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0, 1)
    bench.deliver(0)
    return calls.ack("trainer", ["0", "1", "9"])


def _retire(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0)
    bench.deliver(0)
    return calls.retire("trainer", "0", DropReason.SEEN)


def _retire_anew(bench: Bench) -> ScriptCall[Any]:
    bench.call(calls.set_budget("on_stale", "requeue"))
    bench.connect()
    bench.bring(0, "delivered")
    return calls.retire("trainer", "0", DropReason.STALE)


def _withdraw(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0)
    return calls.withdraw("0")


def _held(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0)
    bench.deliver(0)
    return calls.withdraw("0")


def _connect(bench: Bench) -> ScriptCall[Any]:
    return calls.connect("trainer", 1)


def _resume(bench: Bench) -> ScriptCall[Any]:
    bench.call(calls.pause("abort"))
    bench.set_clock(bench.now_ms + 300)
    return calls.resume()


def _rewind(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.enqueue(0, 1, 2)
    bench.lease()
    return calls.rewind("trainer", "r1", 1, b"\x40")


def _state(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0, 1)
    bench.ack(1)
    return calls.state()


def _audit(bench: Bench) -> ScriptCall[Any]:
    bench.connect()
    bench.ready(0, 1)
    return calls.audit(deep=True)


def _is(**wanted: Any) -> Callable[[Any], bool]:
    return lambda answer: all(getattr(answer, name) == value for name, value in wanted.items())


def _outcomes(*wanted: str) -> Callable[[Any], bool]:
    return lambda answer: [a.outcome for a in answer] == list(wanted)


CASES: dict[str, Case] = {
    "open": Case(_opened, ["same", "running"]),
    "open, new": Case(_deleted, ["created", "running"], ["same", "running"]),
    "enqueue": Case(_enqueue, "new", "dup"),
    "lease": Case(_lease, lambda a: [len(g.members) for g in a.groups] == [2, 1]),
    "lease, paused": Case(_lease_paused, _is(state="paused", groups=[])),
    "beat": Case(_beat, _is(lost=["0:7:gone"])),
    "complete": Case(_complete, _outcomes("ok", "ok"), _outcomes("dup", "dup")),
    "complete, too large": Case(
        _complete_large, _outcomes("too_large"), _outcomes("fenced"), ("fenced",)
    ),
    "fail, retry": Case(_fail(Report.RETRY), "again", "fenced"),
    "fail, retry later": Case(_fail(Report.RETRY, 1.0), "again", "fenced"),
    "fail, final": Case(_fail(Report.FINAL), "failed", "fenced"),
    "fail, back": Case(_fail(Report.BACK), "back", "fenced"),
    "park": Case(_park(b"half"), "parked", "fenced"),
    "fail, forget": Case(_fail(Report.RETRY, forget=True), "again", "fenced"),
    "park, later": Case(_park(b"half", delay_s=1.0), "parked", "fenced"),
    "park, too large": Case(_park(b"half", 3), "too_large", "fenced"),
    "confirm": Case(lambda _: calls.confirm("w", 0, 3, b"[]"), _is(state="running", control_seq=0)),
    "requeue, open": Case(_requeue("open"), "requeued", "other"),
    "requeue, full": Case(_requeue("full"), "requeued", "other"),
    "requeue, ready": Case(_requeue("ready"), "requeued", "other"),
    "requeue, delivered": Case(_requeue("delivered"), "requeued", "other"),
    "requeue, other": Case(_requeue("open", 1), "other"),
    "requeue, gone": Case(lambda _: calls.requeue("7", 0), "gone"),
    "sweep": Case(_sweep, _is(more=False, expired=0, deadlines=0)),
    "verdict, keep": Case(_keep, "ready", "noop"),
    "verdict, drop": Case(_drop, "dropped", "noop"),
    "deliver": Case(_deliver, ["ok", "ok", "gone"]),
    "deliver, stale": Case(_deliver_stale, ["stale"], ["gone"]),
    "ack": Case(_ack, ["acked", "acked", "lost"], ["done", "done", "done"]),
    "retire": Case(_retire, "dropped", "gone"),
    "retire, stale and begun anew": Case(_retire_anew, "requeued", "gone"),
    "withdraw": Case(_withdraw, "dropped", "gone"),
    "withdraw, held": Case(_held, "held"),
    "withdraw, skip": Case(lambda _: calls.skip(5), "skipped", "done"),
    "control, connect": Case(_connect, _is(consumer="trainer", connects=1)),
    "control, version": Case(lambda _: calls.set_version(3), _is(version=3, control_seq=1)),
    "control, pause": Case(lambda _: calls.pause(), _is(state="paused", control_seq=1)),
    "control, pause with a deadline": Case(lambda _: calls.pause("abort", 5), _is(state="paused")),
    "control, pause in another mode": Case(_paused(calls.pause("abort", 5)), _is(control_seq=2)),
    "control, label": Case(lambda _: calls.set_label(3, "v3"), _is(version=0, control_seq=1)),
    "control, engines": Case(lambda _: calls.set_engines(["http://e:1"]), _is(control_seq=1)),
    "control, own engines": Case(lambda _: calls.set_engines(None), _is(control_seq=0)),
    "control, resume": Case(_resume, _is(state="running", control_seq=2)),
    "control, set": Case(lambda _: calls.set_budget("cap", 7), _is(control_seq=1)),
    "end, done": Case(lambda _: calls.end_of_data(1), "running"),
    "end, abort": Case(lambda _: calls.abort_run("why"), "aborting"),
    "end, fail": Case(lambda _: calls.fail_run("why"), "failed"),
    "state": Case(_state, _is(frontier=0, bitmap=b"\x40", epoch=1)),
    "rewind": Case(
        _rewind, _is(frontier=2, epoch=2, seen=2), _is(frontier=2, epoch=2, seen=0, taken=False)
    ),
    "present": Case(lambda _: calls.present("producer", "p"), _is(state="running")),
    "present, leaving": Case(
        lambda _: calls.present("worker", "p", leaving=True), _is(state="running")
    ),
    "present, blocked": Case(
        lambda _: calls.present("producer", "p", blocked=BlockedTime("here", 0, 400)),
        _is(state="running"),
    ),
    "attend": Case(_attend(), "ok"),
    "attend, waiting": Case(_attend(wait_ms=1500), "ok"),
    "attend, leaving": Case(_attend(leaving=True), "ok"),
    "measure": Case(lambda _: calls.measure(), _is(trainer="none", workers=0)),
    "audit": Case(_audit, _is(problems=[], live=2)),
}


def test_every_script_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} == set(SCRIPT_NAMES)


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_answers_by_the_table_and_writes_nothing(bench: Bench, name: str) -> None:
    case = CASES[name]
    call = case.prepare(bench)
    _expect(bench.call(call), case.first)
    after_first = _without(bench.dump(), case.counted)
    _expect(bench.call(call), case.first if case.second is None else case.second)
    assert _without(bench.dump(), case.counted) == after_first
    bench.audit()


def _expect(answer: Any, wanted: Any) -> None:
    assert wanted(answer) if callable(wanted) else answer == wanted, answer


def _without(dump: dict[str, Any], counted: tuple[str, ...]) -> dict[str, Any]:
    counters = {k: v for k, v in dump.get("c", {}).items() if k.decode() not in counted}
    return {**dump, "c": counters}
