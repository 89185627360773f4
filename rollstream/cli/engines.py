"""`engines`: which engines the workers of a run call, and who of the workers obeys.

Owns what of confirmations a person sees. Never talks to an engine. Invariant: `--json` and the
text for people say the same; what a worker wrote is shown without its control characters.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.reach import the_run
from rollstream.cli.view import print_json, print_rows, print_text
from rollstream.queue import calls
from rollstream.queue.reads import Confirmation, RunInfo
from rollstream.updates import confirmed
from rollstream.updates.confirmed import plain
from rollstream.urls import checked_engines


def engines(args: argparse.Namespace) -> int:
    """Show the engines, or name them for every worker."""
    urls: list[str] | None = None
    if args.set is not None:
        try:
            urls = checked_engines(args.set)
        except ValueError as error:
            raise CommandError(str(error), USAGE) from None
    with the_run(args) as (queue, info):
        if urls is not None or args.unset:
            answer = queue.call(calls.set_engines(urls))
            if answer.state not in ("running", "paused"):
                raise CommandError(f"run {queue.run!r} is {answer.state}", PROBLEM)
            named: Sequence[str] | None = urls
        else:
            named = info.engines
        found = queue.confirmations()
    alive = confirmed.live(found, info.lease_s)
    views = confirmed.engine_views(alive)
    if args.json:
        shown = {"run": queue.run, "version": info.version, "set": named,
                 "engines": [_record(view) for view in views],
                 "workers": worker_records(found, info)}  # fmt: skip
        print_json(shown)
        return OK
    print_text(f"run {queue.run}: {_origin(named)}; weight version {info.version}")
    print_rows("engines, as live workers see them", {v.url: _about(v) for v in views})
    print_workers(found, info)
    return OK


def _origin(named: Sequence[str] | None) -> str:
    if named is None:
        return "every worker has the engines of its own configuration"
    return f"engines set for every worker: {', '.join(named)}"


def _record(view: confirmed.EngineView) -> dict[str, Any]:
    return {"url": view.url, "kind": view.kind, "state": view.state, "states": dict(view.states),
            "version": view.version, "in_flight": view.in_flight,
            "problem": view.problem}  # fmt: skip


def _about(view: confirmed.EngineView) -> str:
    version = "no version known" if view.version is None else f"version {view.version}"
    total = view.states.total()
    said = ", ".join(f"{state} for {count} of {total}" for state, count in view.states.items())
    problem = f"; {view.problem}" if view.problem else ""
    return plain(f"{view.state}, {version}, {view.in_flight} calls, {view.kind}; {said}{problem}")


def worker_records(found: Sequence[Confirmation], info: RunInfo) -> list[dict[str, Any]]:
    """Return what each worker confirmed, as plain data."""
    return [
        {
            "worker": one.worker,
            "age_s": round(one.age_s, 3),
            "live": one.age_s <= info.lease_s,
            "control_seq": one.control_seq,
            "obeys": one.control_seq >= info.control_seq,
            "in_flight": one.in_flight,
            "engines": one.engine_states(),
        }
        for one in found
    ]


def print_workers(found: Sequence[Confirmation], info: RunInfo) -> None:
    """Print what each worker confirmed."""
    rows = {plain(row["worker"]): _said(row, info) for row in worker_records(found, info)}
    print_rows("workers", rows or {"none": "is alive"})


def _said(row: Mapping[str, Any], info: RunInfo) -> str:
    if row["control_seq"] < 0:
        word = "confirmed nothing"
    elif row["obeys"]:
        word = "obeys every control word"
    else:
        word = f"heard of {row['control_seq']} of {info.control_seq} control words"
    seen = f"seen {row['age_s']:.1f} s ago" + ("" if row["live"] else ", more than a lease")
    return f"{word}, {row['in_flight']} calls in flight, {seen}"
