"""Every answer that a header names is given by some call; the same call again changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.calls import Completion, ScriptCall
from rollstream.queue.keys import SCHEMA
from rollstream.queue.scripts import SCRIPT_NAMES, load_scripts
from tests.queue_bench import Bench, fake_bench
from tests.unit.queue.test_repeats import CASES, Prepare

RECORDS = {"state", "enqueued", "more", "frontier", "members", "the"}
"""First words of answers that are values, not words."""
ZOMBIE = Lease("0", 0, "dead-1-1")


def _no_run(call: ScriptCall[Any]) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.client.flushall()
        bench.set_clock(bench.now_ms)
        return call

    return prepare


def _after(act: Callable[[Bench], object], call: ScriptCall[Any]) -> Prepare:
    def prepare(bench: Bench) -> ScriptCall[Any]:
        bench.connect()
        act(bench)
        return call

    return prepare


def _old_lease(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0)
    bench.call(calls.lease("w", 2, 1))
    return calls.lease("w", 1, 1)


def _late_lease(bench: Bench) -> ScriptCall[Any]:
    bench.enqueue(0, timeout_ms=1000)
    bench.call(calls.lease("w", 1, 1))
    bench.set_clock(bench.now_ms + 5000)
    return calls.lease("w", 2, 9)


def _exhausted(bench: Bench) -> None:
    bench.enqueue(0)
    bench.call(calls.requeue("0", 0))


def _full(bench: Bench) -> None:
    bench.call(calls.set_budget("cap", 1))
    bench.enqueue(0)


def _done(bench: Bench) -> None:
    bench.ready(0)
    bench.ack(0)


def _damaged(bench: Bench) -> None:
    bench.enqueue(0)
    bench.client.delete(f"{bench.key}g:0")
    bench.lease()


ENQUEUE, SKIP = calls.enqueue(0, 2, b"p"), calls.skip(0)
FINAL = (ZOMBIE, Report.FINAL, MemberReason.TOOL_ERROR, "no")
RETIRE = calls.retire("trainer", "0", DropReason.STALE)

MORE: dict[str, tuple[Prepare, object, object]] = {
    "open, mismatch": (
        lambda _: calls.open_run(SCHEMA, "other", {}), [b"mismatch", b"1", b"source"], None),
    "enqueue, dup": (_after(lambda b: b.enqueue(0), ENQUEUE), [b"dup"], None),
    "enqueue, done": (_after(_done, ENQUEUE), [b"done"], None),
    "enqueue, full": (_after(_full, calls.enqueue(1, 2, b"p")), [b"full"], None),
    "enqueue, wait": (lambda _: calls.enqueue(70_000, 2, b"p"), [b"wait", b"0"], None),
    "enqueue, aborting": (
        _after(lambda b: b.call(calls.abort_run()), ENQUEUE), [b"aborting"], None),
    "enqueue, lost": (_no_run(ENQUEUE), [b"lost"], None),
    "lease, old": (_old_lease, [b"old"], None),
    "lease, late": (_late_lease, [b"running", b"0", b"0"], None),
    "lease, lost": (_no_run(calls.lease("w", 1, 1)), [b"lost"], None),
    "beat, lost": (_no_run(calls.beat("w", ["x"])), [b"lost"], None),
    "confirm, lost": (_no_run(calls.confirm("w", 1, 0)), [b"lost"], None),
    "complete, fenced": (_after(lambda b: b.enqueue(0), calls.complete(
        [Completion(ZOMBIE, b"h", b"b")])), [b"fenced"], None),
    "fail, fenced": (_after(lambda b: b.enqueue(0), calls.fail(*FINAL)), b"fenced", None),
    "park, fenced": (_after(lambda b: b.enqueue(0), calls.park(ZOMBIE, b"p")), b"fenced", None),
    "sweep, no run": (_no_run(calls.sweep()), [-1], None),
    "sweep, damage": (_after(_damaged, calls.sweep()), [0] * 7 + [1], [0] * 8),
    "verdict, noop": (_after(lambda b: b.full(0), calls.verdict("0", "1-1")), b"noop", None),
    "deliver, taken": (lambda _: calls.deliver("nobody", ["0"]), [b"taken"], None),
    "deliver, open": (_after(lambda b: b.enqueue(0), calls.deliver("trainer", ["0"])),
                      [b"gone"], None),
    "ack, taken": (lambda _: calls.ack("nobody", ["0"]), [b"taken"], None),
    "ack, done": (_after(_done, calls.ack("trainer", ["0"])), [b"done"], None),
    "retire, taken": (lambda _: calls.retire("nobody", "0", DropReason.STALE), b"taken", None),
    "retire, ready": (_after(lambda b: b.ready(0), RETIRE), b"gone", None),
    "requeue, exhausted": (_after(_exhausted, calls.requeue("0", 1)), b"exhausted", None),
    "requeue, lost": (_no_run(calls.requeue("0", 0)), b"lost", None),
    "withdraw, gone": (lambda _: calls.withdraw("0"), b"gone", None),
    "withdraw, skip a live one": (_after(lambda b: b.enqueue(0), SKIP), b"dropped", b"done"),
    "withdraw, skip a held one": (_after(lambda b: b.bring(0, "delivered"), SKIP), b"held", None),
    "withdraw, skip done": (_after(_done, SKIP), b"done", None),
    "withdraw, skip beyond": (lambda _: calls.skip(70_000), b"wait", None),
    "withdraw, skip no run": (_no_run(SKIP), b"lost", None),
    "control, lost": (_no_run(calls.pause()), [b"lost"], None),
    "control, unknown": (lambda _: calls.set_budget("state", 1), [b"unknown"], None),
    "control, unknown on_stale": (
        lambda _: calls.set_budget("on_stale", "keep"), [b"unknown"], None),
    "control, older connect": (_after(lambda b: b.connect("b", 2), calls.connect("a", 1)),
                               [b"running", b"0", b"2", b"1", b"b", b"2", b""], None),
    "end, epoch": (lambda _: calls.end_of_data(7), b"epoch", None),
    "end, lost": (_no_run(calls.abort_run()), b"lost", None),
    "end, ended": (_after(lambda b: (b.call(calls.abort_run()), b.sweep()), calls.fail_run("x")),
                   b"ended", None),
    "state, lost": (_no_run(calls.state()), [b"lost"], None),
    "rewind, taken": (lambda _: calls.rewind("nobody", "r", 3, b""), [b"taken"], None),
    "attend, taken": (
        _after(lambda b: b.connect("other", 2), calls.attend("trainer", "-")), b"taken", None),
    "attend, lost": (_no_run(calls.attend("trainer", "-")), b"lost", None),
    "measure, lost": (_no_run(calls.measure()), [b"lost"], None),
    "present, lost": (_no_run(calls.present("worker", "w")), [b"lost"], None),
    "present, unknown": (lambda _: calls.present("judge", "w"), [b"unknown"], None),
}  # fmt: skip


def _raw(bench: Bench, call: ScriptCall[Any]) -> Any:
    return bench.call(replace(call, parse=lambda answer: answer))


@pytest.mark.parametrize("name", MORE)
def test_a_call_gives_this_answer_and_again_and_writes_nothing(bench: Bench, name: str) -> None:
    prepare, first, second = MORE[name]
    call = prepare(bench)
    assert _raw(bench, call) == first
    before = _without_fenced(bench.dump())
    assert _raw(bench, call) == (first if second is None else second)
    assert _without_fenced(bench.dump()) == before
    bench.audit()


def _without_fenced(dump: dict[str, Any]) -> dict[str, Any]:
    """Leave out the counter of repeats, and who was seen."""
    counters = {k: v for k, v in dump.get("c", {}).items() if k != b"fenced"}
    return {**dump, "c": counters}


@pytest.mark.parametrize("script", SCRIPT_NAMES)
def test_every_answer_of_the_header_is_given_here(script: str) -> None:
    header = load_scripts()[script].header.answer
    parts = re.split(r"[|;]", re.sub(r"\([^)]*\)", "", header))
    words = {re.sub(r"^.*(per \w+:|for skip also)", "", part).split()[0] for part in parts}
    given: set[str] = set()
    everything = [case.prepare for name, case in CASES.items() if name.split(",")[0] == script]
    everything += [row[0] for name, row in MORE.items() if name.split(",")[0] == script]
    for prepare in everything:
        bench = fake_bench()
        call = prepare(bench)
        for answer in (_raw(bench, call), _raw(bench, call)):
            given |= {str(x.decode() if isinstance(x, bytes) else x) for x in _flat(answer)}
    assert {word for word in words if word not in RECORDS} <= given


def _flat(answer: Any) -> list[Any]:
    return [x for part in answer for x in _flat(part)] if isinstance(answer, list) else [answer]
