"""`audit`, `stats` and `runs`: what a person or a script asks of a server.

Owns which figures are shown. Never writes to a run. Invariant: an unreachable server and an
unknown run are one line on standard error within `--timeout-s`, and exit code 3.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redis.exceptions import InvalidResponse, ResponseError

from rollstream.cli.exits import OK, PROBLEM, UNREACHABLE, USAGE, CommandError
from rollstream.cli.view import print_json, print_rows
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo
from rollstream.runs import OUTAGES, REFUSALS, list_runs
from rollstream.urls import redis_url_problem, shown_url

DEFAULT_URL = "redis://127.0.0.1:6379"


def audit(args: argparse.Namespace) -> int:
    """Prove the accounting identity; exit code 1 where it does not hold."""
    with _run(args) as (queue, _):
        answer = queue.call(calls.audit(deep=args.deep))
    if args.json:
        print_json({"run": queue.run, "deep": args.deep, "ok": not answer.problems}
                   | asdict(answer))  # fmt: skip
    else:
        total = answer.acked + answer.dropped + answer.live
        sign = "=" if answer.enqueued == total else "≠"
        print(f"run {queue.run}: enqueued {answer.enqueued} {sign} acked {answer.acked} + "
              f"dropped {answer.dropped} + live {answer.live}")  # fmt: skip
        for problem in answer.problems:
            print(f"problem: {problem}")
        if not answer.problems:
            print("every member and entry is in its one place" if args.deep else "it adds up")
    return PROBLEM if answer.problems else OK


def stats(args: argparse.Namespace) -> int:
    """Show where the groups of a run are, and who is alive."""
    with _run(args) as (queue, info):
        counters, depths, presence = queue.counters(), queue.depths(), queue.presence()
    if args.json:
        shown = asdict(info)
        print_json({"run": queue.run, "info": shown, "counters": counters, "depths": depths,
                    "presence": presence})  # fmt: skip
        return OK
    print_rows(f"run {queue.run}", _run_rows(info, presence))
    print_rows("groups", _group_rows(counters, depths))
    members = {
        "queued": depths["q"],
        "delayed": depths["d"],
        "suspects": depths["s"],
        "leased": depths["l"],
        **_by_reason(counters, "member_failed"),
    }
    print_rows("members", members)
    return OK


def _run_rows(info: RunInfo, presence: Mapping[str, int]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "state": info.state + (f" ({info.error})" if info.error else ""),
        "weight version": info.version,
        "epoch, frontier": f"{info.epoch}, {info.frontier}",
        "all prompts enqueued": "yes" if info.done else "no",
        "trainer": f"connect {info.connects}" if info.connects else "none yet",
    }
    return rows | {f"{name} alive": count for name, count in presence.items()}


def _group_rows(counters: Mapping[str, int], depths: Mapping[str, int]) -> dict[str, Any]:
    open_groups = depths["live"] - depths["full"] - depths["ready"] - depths["delivered"]
    return {
        "enqueued": counters.get("enqueued", 0),
        "acked": counters.get("acked", 0),
        **_by_reason(counters, "dropped"),
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
    """List the runs on a server."""
    url = _url(args)
    found: list[dict[str, Any]] = []
    with _reached(args, url, "") as queue:
        for name in list_runs(queue.client):
            with contextlib.closing(_queue(args, url, name)) as one:
                found += _row_of(one)
    if args.json:
        print_json(found)
    elif not found:
        print(f"no runs at {shown_url(url)}")
    else:
        for row in found:
            end = ", all prompts enqueued" if row["done"] else ""
            if row["live"] is None:
                print(f"{row['run']}: its keys cannot be read")
                continue
            print(f"{row['run']}: {row['state']}, {row['live']} groups live, "
                  f"version {row['version']}{end}")  # fmt: skip
    return OK


def _row_of(queue: BlockingQueue) -> list[dict[str, Any]]:
    """Return a run's row; none where it ended meanwhile, one that says so where it is damaged."""
    try:
        info = queue.info()
        live = queue.depths()["live"]
    except (ResponseError, LookupError, ValueError):
        return [{"run": queue.run, "state": "unreadable", "live": None, "version": None,
                 "done": None}]  # fmt: skip
    if info is None:
        return []
    return [{"run": queue.run, "state": info.state, "live": live, "version": info.version,
             "done": info.done}]  # fmt: skip


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "audit": audit,
    "stats": stats,
    "runs": runs,
}


# --- reaching a run ------------------------------------------------------------------------------
def _url(args: argparse.Namespace) -> str:
    if args.redis:
        return str(args.redis)
    file = os.environ.get("ROLLSTREAM_REDIS__URL_FILE")
    if file:
        try:
            return Path(file).read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:  # not UTF-8, or a name that cannot be one
            raise CommandError(f"ROLLSTREAM_REDIS__URL_FILE: {error}", USAGE) from None
    return os.environ.get("ROLLSTREAM_REDIS__URL") or DEFAULT_URL


def _queue(args: argparse.Namespace, url: str, run: str) -> BlockingQueue:
    if problem := redis_url_problem(url):
        raise CommandError(f"--redis {shown_url(url)}: expected {problem}", USAGE)
    ca = args.ca or os.environ.get("ROLLSTREAM_REDIS__CA")
    if ca and not Path(ca).is_file():
        raise CommandError(f"--ca {ca}: there is no such file", USAGE)
    return BlockingQueue.connect(url, run, ca=ca, connect_timeout_s=args.timeout_s)


@contextlib.contextmanager
def _reached(args: argparse.Namespace, url: str, run: str) -> Iterator[BlockingQueue]:
    """A queue whose outages are one line; a server that hangs is as good as none."""
    started = time.monotonic()
    with contextlib.closing(_queue(args, url, run)) as queue:
        # Three tries of the client share the bound.
        queue.client.connection_pool.connection_kwargs["socket_timeout"] = args.timeout_s / 3
        try:
            yield queue
        except REFUSALS as error:
            raise CommandError(
                f"Redis at {shown_url(url)} refuses this client: {error}", UNREACHABLE
            ) from None
        except InvalidResponse as error:
            raise CommandError(
                f"what answers at {shown_url(url)} is not Redis: {error}", UNREACHABLE
            ) from None
        except (ResponseError, LookupError, ValueError) as error:
            if not run:
                raise CommandError(f"Redis at {shown_url(url)}: {error}", PROBLEM) from None
            raise CommandError(
                f"run {run!r} at {shown_url(url)} cannot be read: its keys are damaged, another "
                f"program's, or of another version ({type(error).__name__}: {error})",
                PROBLEM,
            ) from None
        except OUTAGES as error:
            waited = time.monotonic() - started
            raise CommandError(
                f"Redis at {shown_url(url)} cannot be reached (tried for {waited:.1f} s): {error}; "
                "start it, or give --redis URL",
                UNREACHABLE,
            ) from None


@contextlib.contextmanager
def _run(args: argparse.Namespace) -> Iterator[tuple[BlockingQueue, RunInfo]]:
    url = _url(args)
    name = args.run or os.environ.get("ROLLSTREAM_RUN__NAME")
    if not name:
        with _reached(args, url, "") as server:
            name = _only_run(list_runs(server.client), url)
    with _reached(args, url, name) as queue:
        info = queue.info()
        if info is None:
            others = ", ".join(list_runs(queue.client)) or "none"
            raise CommandError(
                f"no run {name!r} at {shown_url(url)}; runs there: {others}", UNREACHABLE
            )
        yield queue, info


def _only_run(names: list[str], url: str) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise CommandError(f"there is no run at {shown_url(url)}", UNREACHABLE)
    raise CommandError(f"several runs, name one with --run: {', '.join(names)}", USAGE)
