"""Keys of the run that are another program's: a script refuses, and leaves nothing half done."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.calls import Completion, ScriptCall
from rollstream.queue.scripts import load_scripts
from tests.queue_bench import Bench
from tests.unit.queue.test_repeats import CASES

TYPES = {name: kind for s in load_scripts().values() for name, kind in s.header.keys
         if name != "m" and ":" not in name}  # fmt: skip
NO_CHANGE = {"seq", "cursor", "cursor_clock"}
"""Of `m`: a number that is skipped, and where a walk stands."""
NO_PROMISE = {"w", "wp", "wa", "wh", "bell", "room"}
"""Who was seen, and tokens that wake: true, or harmless, whatever comes of the call."""


def _spoil(bench: Bench, name: str) -> bool:
    """Overwrite a key; False where it has content, which nobody could keep then."""
    if name in bench.key_names():
        return False
    if TYPES[name] == "LIST":
        bench.client.set(bench.key + name, "another program's")
    else:
        bench.client.rpush(bench.key + name, "another program's")
    return True


def _content(bench: Bench, spoiled: str) -> dict[str, Any]:
    dump = {k: v for k, v in bench.dump().items() if k not in NO_PROMISE | {spoiled}}
    dump["m"] = {k: v for k, v in dump.get("m", {}).items() if k.decode() not in NO_CHANGE}
    dump["c"] = {k: v for k, v in dump.get("c", {}).items() if v != b"0"}
    for key in [key for key in dump if key.startswith("g:")]:
        # A token that no lease has is nobody's.
        dump[key] = {k: v for k, v in dump[key].items() if not re.fullmatch(rb"t\d+", k)}
    # What is due may move on by itself.
    dump["waiting"] = sorted(x for key in "qsd" for x, _ in dump.pop(key, []))
    return dump


def _more_cases() -> dict[str, Callable[[Bench], ScriptCall[Any]]]:
    def due(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0)
        bench.fail(bench.lease(limit=1)[0], Report.BACK, MemberReason.SHUTDOWN, delay_s=1)
        bench.set_clock(bench.now_ms + 5000)
        return calls.lease("w", 1, 9)

    def first(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0, 1, timeout_ms=5000)
        return calls.lease("w", 1, 9)

    def too_late(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0, timeout_ms=1000)
        bench.lease(limit=1)
        bench.set_clock(bench.now_ms + 5000)
        return calls.lease("w", 1, 9)

    def last(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0, n=1)
        (lease,) = bench.lease()
        return calls.complete([Completion(lease, b"h", b"b", b"t")])

    def last_fails(bench: Bench) -> ScriptCall[Any]:
        bench.enqueue(0, n=1)
        return calls.fail(bench.lease()[0], Report.FINAL, MemberReason.TOOL_ERROR, "no")

    def retire(bench: Bench) -> ScriptCall[Any]:
        bench.connect()
        bench.bring(0, "delivered")
        return calls.retire("trainer", "0", DropReason.STALE)

    def evaluation(bench: Bench) -> ScriptCall[Any]:
        return calls.enqueue("e:x:1", 2, b"p")

    def aborted(bench: Bench) -> ScriptCall[Any]:
        bench.connect()
        bench.bring(0, "delivered")
        bench.bring(1, "full")
        bench.bring(2, "open")
        bench.call(calls.abort_run())
        return calls.sweep()

    return {"lease, due": due, "lease, first": first, "lease, too late": too_late,
            "complete, last": last, "fail, last": last_fails, "retire, held": retire,
            "enqueue, evaluation": evaluation, "sweep, aborting": aborted}  # fmt: skip


PREPARE = {name: case.prepare for name, case in CASES.items()} | _more_cases()


@pytest.mark.parametrize("name", PREPARE)
def test_a_script_that_is_refused_has_changed_nothing(bench: Bench, name: str) -> None:
    script = name.partition(",")[0]
    for key, _ in load_scripts()[script].header.keys:
        if key not in TYPES:
            continue
        bench.client.flushall()
        bench.set_clock(bench.now_ms)
        bench.__init__(bench.client)  # type: ignore[misc]  # a new run on the emptied server
        call = PREPARE[name](bench)
        if not _spoil(bench, key):
            continue
        before = _content(bench, key)
        problem = ""
        try:
            bench.call(call)
        except ResponseError as error:
            problem = str(error)
        if problem:
            assert "WRONGTYPE" in problem, key
            # What these do to many, they do to each by itself.
            assert script in ("complete", "sweep") or _content(bench, key) == before, key
        bench.client.delete(bench.key + key)
        assert bench.call(calls.audit(deep=True)).problems == [], key


def test_a_verdict_that_cannot_take_its_entry_away_writes_none(bench: Bench) -> None:
    entry = bench.full(0)
    bench.client.set(f"{bench.key}full", "another program's")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        bench.judge(entry)
    assert (bench.state(0), bench.client.xlen(f"{bench.key}ready")) == ("full", 0)
    bench.client.delete(f"{bench.key}full")
    bench.advance(7500)
    bench.audit()
