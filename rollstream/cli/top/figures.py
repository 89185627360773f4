"""The figures of `top`: one record, for scripts as it is and for people as lines.

Owns the names of the record's keys (docs/cli.md lists them) and the one-line form. Never does I/O.
Invariant: what a person reads is made of this record and of nothing else; text that a worker or a
user's code wrote is shown without its control characters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rollstream.cli.top.diagnosis import Diagnosis
from rollstream.cli.top.snapshot import Spans, Window
from rollstream.updates.confirmed import plain

SENT_BACK = {"retried": "attempts", "crashed": "crashes", "given_back": "given_back",
             "parked": "parked", "requeued": "requeued"}  # fmt: skip
"""Name in the record → counter of the run."""
SPAN_ORDER = ("generate", "tool", "reward", "merge", "submit", "queue_wait")


def figures(window: Window, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what `top --json` prints of a run that was read."""
    last = window.last
    completed = window.gained("completed")
    acked, dropped = window.gained("acked"), window.gained_by("dropped")
    record = _head(last.run, last.state, diagnosis) | {
        "window_s": round(window.seconds, 1),
        "version": last.version,
        "draining": last.draining,
        "pause": None
        if last.state != "paused"
        else {"mode": last.pause_mode, "by_trainer": bool(last.pause_by),
              "since_s": round(last.paused_s, 1)},
        "groups_per_min": _rounded(window.per_minute(window.ended())),
        "acked_per_min": _rounded(window.per_minute(acked)),
        "samples_per_min": _rounded(window.per_minute(completed)),
        "members": {"queued": last.depths.get("q", 0), "delayed": last.depths.get("d", 0),
                    "suspect": last.depths.get("s", 0), "leased": last.leased},
        "groups": {"open": last.open, "full": last.full, "ready": last.ready,
                   "delivered": last.delivered, "live": last.live,
                   "evaluations": last.depths.get("evaluations", 0)},
        "capacity": last.capacity,
        "producer_blocked": last.is_blocked,
        "trainer": last.trainer,
        "alive": {"workers": last.workers, "producers": last.producers,
                  "aggregators": last.aggregators},
        "calls_in_flight": last.in_flight,
        "engines": last.engine_states(),
        "ended": {"acked": acked, "dropped": dropped},
        "failed": window.gained_by("member_failed"),
        "sent_back": {name: window.gained(counter) for name, counter in SENT_BACK.items()},
        "stale": window.gained_by("stale"),
        "oldest_s": {name: round(age, 1) for name, age in last.oldest_s.items()},
        "redis": {"round_trip_ms": round(last.round_trip_ms, 2), "used_memory": last.used_memory,
                  "max_memory": last.max_memory},
        "newest_group": None if window.spans is None else _spans(window.spans),
    }  # fmt: skip
    shown: dict[str, Any] = _plain(record)
    return shown


def _plain(value: Any) -> Any:
    """Return a value whose texts, also the names of counters, cannot write on a terminal."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(name): _plain(one) for name, one in value.items()}
    return value


def unread(run: str, state: str, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what is printed of a run that could not be read: the first keys of `figures`."""
    return _head(run, state, diagnosis)


def _head(run: str, state: str, diagnosis: Diagnosis) -> dict[str, Any]:
    return {"run": run, "unix_s": round(time.time(), 3), "state": state,
            "cause": str(diagnosis.cause), "evidence": plain(diagnosis.evidence),
            "do": diagnosis.do}  # fmt: skip


def _spans(spans: Spans) -> dict[str, Any]:
    speed = spans.tokens_per_s
    known = [name for name in SPAN_ORDER if name in spans.seconds]
    return {
        "group": spans.group_index,
        "samples": spans.samples,
        "seconds": {name: round(spans.seconds[name], 3) for name in known},
        "tokens_per_s": None if speed is None else round(speed, 1),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# --- for people ----------------------------------------------------------------------------------
def line(record: Mapping[str, Any]) -> str:
    """Return the record as one line."""
    at = time.strftime("%H:%M:%S", time.localtime(record["unix_s"]))
    parts = [f"{at} {record['run']} {state_of(record)}"]
    if "version" in record:
        groups, members = record["groups"], record["members"]
        parts += [
            f"v{record['version']}",
            f"{shown_rate(record['groups_per_min'])} groups/min",
            f"{shown_rate(record['samples_per_min'])} samples/min",
            f"queued {members['queued']} leased {members['leased']}",
            f"ready {groups['ready']} delivered {groups['delivered']}",
            f"live {groups['live']}/{record['capacity']}",
            f"calls {record['calls_in_flight']}",
            f"engines {counts(record['engines'])}",
            f"trainer {record['trainer']}",
        ]
    return " | ".join([*parts, cause_of(record)])


def cause_of(record: Mapping[str, Any]) -> str:
    """Return what holds the run up, in one line."""
    do = f" -> {record['do']}" if record["do"] else ""
    return f"{record['cause']}: {record['evidence']}{do}"


def state_of(record: Mapping[str, Any]) -> str:
    """Return the run's state with what of it is out of the ordinary."""
    pause = record.get("pause")
    state = f"paused ({pause['mode']}) {pause['since_s']:.0f} s" if pause else record["state"]
    return f"{state}, draining" if record.get("draining") else str(state)


def counts(by_name: Mapping[str, int]) -> str:
    """Return names with their numbers, `none` where there are none."""
    return ", ".join(f"{n} {name}" for name, n in by_name.items() if n) or "none"


def shown_rate(rate: float | None) -> str:
    """Return a rate for people."""
    if rate is None:
        return "-"
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"
