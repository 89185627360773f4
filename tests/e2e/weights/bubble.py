"""What an update costs beyond the time inside the `with` body, seen from the engines.

Owns the two times of an update. Never asks anybody: it reads the notes that the engines' doors and
the trainer made, on the one wall clock of this machine. Invariant: a worker that had nothing to do
before an update, or has nothing to do after it, says nothing about the update.

The *bubble* of an update is

    (the body's first instant - the call of `updating_weights`)          what entering waits for
    + max over workers of (first request that an engine gets from it behind the body's end
                           - the body's end)                              what going on takes

where a worker counts if an engine had a request of it when the update was asked for, and gets one
again within `LATE_S`; one that has a request in flight when the body ends (`keep` lets them go on)
has never stopped, and adds 0. So an update's bubble holds the confirmation by every worker, the
post of the version to every engine, version and resume over the control stream, and the first new
calls; not the engine's own work on new weights.

Left out are updates that wait for something else, which `longest_pause_s` shows: for a worker that
was killed (for one lease after its last beat it counts as live), and for an engine that somebody
else had paused (it answers an abort when it goes on).

The *pause* of an update is everything from the call of `updating_weights` to its return, body
included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import numpy as np

from tests.e2e.weights.record import EngineCall, Record, Update
from tests.e2e.weights.scenes import LEASE_S

MARGIN_S = 0.2
LATE_S = 5.0
"""Behind an update; a worker that sends nothing for so long has nothing to send."""


def bubbles_ms(record: Record) -> dict[int, float]:
    """Return version → the bubble of its update, of those that a worker says something about."""
    by_pid: dict[int, list[EngineCall]] = defaultdict(list)
    for rid, pid in record.pid_of.items():
        if rid in record.engine_calls:
            by_pid[pid].append(record.engine_calls[rid])
    for calls in by_pid.values():
        calls.sort(key=lambda call: call.started_s)
    found: dict[int, float] = {}
    for update in record.updates:
        waits = [(at_s, at_s + 1.2 * LEASE_S) for at_s in record.killed.values()]
        if any(_meets(update, *wait) for wait in (*waits, *record.stood_still)):
            continue
        delays = [
            delay
            for pid, calls in by_pid.items()
            if pid not in record.killed and (delay := _delay_s(calls, update)) is not None
        ]
        if delays:
            entering_s = update.entered_s - update.asked_s
            found[update.version] = 1000 * (entering_s + max(delays))
    return found


def _meets(update: Update, since_s: float, until_s: float) -> bool:
    """Return whether something that lasted so long may have held it up, or the calls behind it."""
    return since_s <= update.done_s + MARGIN_S and update.asked_s <= until_s


def _delay_s(calls: list[EngineCall], update: Update) -> float | None:
    """Return how long behind the body one worker's first request came; None says nothing."""
    if not _in_flight(calls, update.asked_s):
        return None
    if _in_flight(calls, update.left_s):
        return 0.0
    at = bisect_right(calls, update.left_s, key=lambda call: call.started_s)
    if at == len(calls) or calls[at].started_s - update.left_s > LATE_S:
        return None
    return calls[at].started_s - update.left_s


def _in_flight(calls: list[EngineCall], at_s: float) -> bool:
    return any(
        call.started_s <= at_s and (call.ended_s is None or call.ended_s > at_s) for call in calls
    )


def longest_pause_s(record: Record) -> float:
    """Return the longest update's whole time."""
    return max((update.done_s - update.asked_s for update in record.updates), default=0.0)


def p99(values: list[float]) -> float:
    """Return the 99th percentile, 0 of nothing."""
    return float(np.percentile(values, 99)) if values else 0.0
