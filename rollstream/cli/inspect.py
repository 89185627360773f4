"""`audit`, `stats`, `runs` and `version`: what a person or a script asks of a server.

Owns which figures are shown. Never writes to a run (`runs --remove` is `rollstream.cli.remove`).
Invariant: `--json` and the text for people say the same.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redis.exceptions import ResponseError

from rollstream import __version__
from rollstream.cli.engines import print_workers, worker_records
from rollstream.cli.exits import OK, PROBLEM
from rollstream.cli.reach import queue_of, reached, the_run, url_of
from rollstream.cli.remove import remove
from rollstream.cli.view import print_json, print_rows, print_text
from rollstream.errors import RunMismatch
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import SCHEMA
from rollstream.queue.reads import RunInfo, all_counters, ends_by_env
from rollstream.runs import list_runs
from rollstream.updates.confirmed import plain
from rollstream.urls import shown_url
from rollstream.wire import WIRE_VERSION


def audit(args: argparse.Namespace) -> int:
    """Prove the accounting identity; exit code 1 where it does not hold."""
    with the_run(args) as (queue, _):
        answer = queue.call(calls.audit(deep=args.deep))
        by_env = _ends_by_env(queue)
    if args.json:
        print_json({"run": queue.run, "deep": args.deep, "ok": not answer.problems}
                   | asdict(answer) | {"by_env": by_env})  # fmt: skip
    else:
        total = answer.acked + answer.dropped + answer.live
        sign = "=" if answer.enqueued == total else "≠"
        print_text(
            f"run {queue.run}: enqueued {answer.enqueued} {sign} acked {answer.acked} + "
            f"dropped {answer.dropped} + live {answer.live}"
        )
        for env, said in _env_rows(by_env).items():
            print_text(f"  {env}: {said}")
        for problem in answer.problems:
            print_text(f"problem: {problem}")
        if not answer.problems:
            print_text("every member and entry is in its one place" if args.deep else "it adds up")
    return PROBLEM if answer.problems else OK


def stats(args: argparse.Namespace) -> int:
    """Show where the groups of a run are, and who is alive."""
    with the_run(args) as (queue, info):
        counters, depths, presence = queue.counters(), queue.depths(), queue.presence()
        found, by_env = queue.confirmations(), _ends_by_env(queue)
        measured = queue.call(calls.measure())
    oldest_s = {} if measured is None else measured.oldest_s
    if args.json:
        shown = asdict(info)
        print_json({"run": queue.run, "info": shown, "counters": counters, "by_env": by_env,
                    "depths": depths, "oldest_s": oldest_s, "presence": presence,
                    "trainer": "none" if measured is None else measured.trainer,
                    "workers": worker_records(found, info)})  # fmt: skip
        return OK
    print_rows(f"run {queue.run}", _run_rows(info, presence))
    print_rows("groups", _group_rows(counters, depths))
    if by_env:
        print_rows("ended, by environment", _env_rows(by_env))
    print_rows("oldest", {name: f"{age:.1f} s" for name, age in oldest_s.items() if age})
    members = {
        "queued": depths["q"],
        "delayed": depths["d"],
        "suspects": depths["s"],
        "leased": depths["l"],
        **_by_reason(counters, "member_failed"),
    }
    print_rows("members", members)
    if counters.get("e.enqueued"):
        print_rows("evaluations", _evaluation_rows(counters))
    print_workers(found, info)
    return OK


def _ends_by_env(queue: BlockingQueue) -> dict[str, dict[str, Any]]:
    """Return by environment how many groups were acked, and dropped for which reason."""
    reply = queue.client.hgetall(f"{queue.prefix}c")
    found: dict[str, dict[str, Any]] = {}
    for (env, outcome), count in sorted(ends_by_env(all_counters(reply)).items()):
        row = found.setdefault(plain(env), {"acked": 0, "dropped": {}})
        if outcome == "acked":
            row["acked"] = count
        else:
            row["dropped"][outcome.removeprefix("dropped:")] = count
    return found


def _env_rows(by_env: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    rows = {}
    for env, row in by_env.items():
        dropped = [f"dropped as {reason} {count}" for reason, count in row["dropped"].items()]
        rows[env] = ", ".join([f"acked {row['acked']}", *dropped])
    return rows


def version(args: argparse.Namespace) -> int:
    """Say what is installed here."""
    known = {"version": __version__, "wire": WIRE_VERSION, "layout": SCHEMA,
             "python": platform.python_version()}  # fmt: skip
    if args.json:
        print_json(known)
    else:
        print_rows("rollstream", known)
    return OK


def _run_rows(info: RunInfo, presence: Mapping[str, int]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "state": _state_of(info),
        "weight version": info.version,
        "epoch, frontier": f"{info.epoch}, {info.frontier}",
        "all prompts enqueued": "yes" if info.done else "no",
        "trainer": f"connected as {info.consumer}" if info.connects else "none yet",
    }
    return rows | {f"{name} alive": count for name, count in presence.items()}


def _state_of(info: RunInfo) -> str:
    if info.state == "paused":
        return f"paused ({info.pause_mode}) since {info.paused_s:.0f} s"
    return info.state + (f" ({info.error})" if info.error else "")


def _evaluation_rows(counters: Mapping[str, int]) -> dict[str, int]:
    ended = {name.removeprefix("e."): n for name, n in counters.items() if name.startswith("e.")}
    return {
        "enqueued": ended.get("enqueued", 0),
        "read": ended.get("acked", 0),
        **_by_reason(ended, "dropped"),
    }


def _group_rows(counters: Mapping[str, int], depths: Mapping[str, int]) -> dict[str, Any]:
    open_groups = depths["live"] - depths["full"] - depths["ready"] - depths["delivered"]
    return {
        "enqueued": counters.get("enqueued", 0),
        "acked": counters.get("acked", 0),
        **_by_reason(counters, "dropped"),
        **_by_reason(counters, "stale"),
        **_by_reason(counters, "requeued"),
        "open": open_groups,
        "full": depths["full"],
        "ready": depths["ready"],
        "delivered": depths["delivered"],
    }


def _by_reason(counters: Mapping[str, int], kind: str) -> dict[str, int]:
    return {
        f"{kind.replace('_', ' ')}, {name.partition(':')[2]}": count
        for name, count in sorted(counters.items())
        if name.startswith(f"{kind}:")
    }


def runs(args: argparse.Namespace) -> int:
    """List the runs on a server, or remove one."""
    if args.remove is not None:
        return remove(args)
    url = url_of(args)
    found: list[dict[str, Any]] = []
    with reached(args, url, "") as queue:
        for name in list_runs(queue.client):
            with contextlib.closing(queue_of(args, url, name)) as one:
                found += _row_of(one)
    if args.json:
        print_json(found)
    elif not found:
        print_text(f"no runs at {shown_url(url)}")
    else:
        for row in found:
            end = ", all prompts enqueued" if row["done"] else ""
            if row["live"] is None:
                print_text(f"{row['run']}: its keys cannot be read")
                continue
            print_text(
                f"{row['run']}: {row['state']}, {row['live']} groups live, "
                f"version {row['version']}{end}"
            )
    return OK


def _row_of(queue: BlockingQueue) -> list[dict[str, Any]]:
    """Return a run's row; none where it ended meanwhile, one that says so where it is damaged."""
    try:
        info = queue.info()
        live = queue.depths()["live"]
    except (ResponseError, LookupError, ValueError, RunMismatch):
        return [{"run": queue.run, "state": "unreadable", "live": None, "version": None,
                 "done": None}]  # fmt: skip
    if info is None:
        return []
    return [{"run": queue.run, "state": info.state, "live": live, "version": info.version,
             "done": info.done}]  # fmt: skip
