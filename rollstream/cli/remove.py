"""`rollstream runs --remove NAME`: every key of a run, gone.

Owns the only command that deletes. Never touches a key outside the run's prefix, and nothing
without a yes. Invariant: a run that a producer or worker was seen at within four leases stays,
unless `--force`: it would be opened anew, or its work would be lost without anyone having ended it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any

from redis.exceptions import ResponseError

from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.reach import no_run, reached, url_of
from rollstream.cli.view import print_json
from rollstream.errors import RunMismatch
from rollstream.queue.blocking import BlockingQueue
from rollstream.runs import RUN_NAME

ROLES = {"producer": "wp", "worker": "w", "aggregator": "wa"}
ALIVE_LEASES = 4
"""A process unseen for so many leases is gone, as for `sweep`."""
PAGE = 500
MAX_NAMED = 4


def remove(args: argparse.Namespace) -> int:
    """Delete every key of a run, after showing what it is.

    Raises:
        CommandError: there is no such run, it is in use, or nobody said yes.
    """
    name, url = args.remove, url_of(args)
    if not re.fullmatch(RUN_NAME, name):
        raise CommandError(f"--remove {name!r}: no run is called that ({RUN_NAME})", USAGE)
    with reached(args, url, name) as queue:
        if next(_keys(queue), None) is None:
            raise no_run(queue, url)
        state, live, alive = _look(queue)
        shown = f"run {name}: {state}" + ("" if live is None else f", {live} groups live")
        print(shown, file=sys.stderr)
        if alive and not args.force:
            raise CommandError(
                f"run {name!r} is in use: {_named(alive)}. End them first, and wait until they "
                f"were not seen for {ALIVE_LEASES} leases where they were killed; or give --force. "
                "Nothing was removed",
                PROBLEM,
            )
        if not (args.yes or _asked(name)):
            raise CommandError("nothing was removed: say y, or give --yes", USAGE)
        removed = _unlink(queue)
    if args.json:
        print_json({"run": name, "state": state, "live": live, "alive": alive, "removed": removed})
    else:
        print(f"removed run {name}: {removed} keys")
    return OK


def _keys(queue: BlockingQueue) -> Iterator[bytes]:
    yield from queue.client.scan_iter(match=f"{queue.prefix}*", count=PAGE)


def _look(queue: BlockingQueue) -> tuple[str, int | None, dict[str, list[str]]]:
    """Return the run's state, live groups and who is alive; damaged keys are no reason to stay."""
    try:
        info = queue.info()
        state = "incomplete" if info is None else info.state
        return state, queue.depths()["live"], alive_of(queue)
    except RunMismatch:
        return "of another version", None, alive_of(queue)
    except (ResponseError, LookupError, ValueError):
        return "unreadable", None, {}


def alive_of(queue: BlockingQueue) -> dict[str, list[str]]:
    """Return who was seen within four leases, by role.

    The queue clock stands still where nobody sweeps any more, so the time since its last step
    counts too: processes that were all killed at once must not keep a run for ever.
    """
    client, prefix = queue.client, queue.prefix
    read: list[Any] = client.hmget(f"{prefix}m", ["lease_ms", "clock", "clock_tick"])
    if None in read:
        return {}  # no run that a process could work on
    lease_ms, clock, tick = map(int, read)
    seconds, microseconds = client.time()
    now = clock + int(seconds) * 1000 + int(microseconds) // 1000 - tick
    oldest = now - ALIVE_LEASES * lease_ms
    alive: dict[str, list[str]] = {}
    for role, key in ROLES.items():
        entries: list[Any] = client.zrange(prefix + key, 0, -1, withscores=True)
        names = [name.decode(errors="replace") for name, score in entries if score > oldest]
        if names:
            alive[role] = names
    return alive


def _named(alive: dict[str, list[str]]) -> str:
    parts = []
    for role, names in alive.items():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        parts.append(f"{role} {', '.join(names[:MAX_NAMED])}{more}")
    return "; ".join(parts)


def _asked(name: str) -> bool:
    if not sys.stdin or not sys.stdin.isatty():
        return False
    sys.stderr.write(f"Remove every key of run {name}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _unlink(queue: BlockingQueue) -> int:
    """Delete the run's hash first: from then on every script answers `lost` and writes nothing."""
    removed = int(queue.client.unlink(f"{queue.prefix}m"))
    page: list[Any] = []
    for key in _keys(queue):
        page.append(key)
        if len(page) == PAGE:
            removed += int(queue.client.unlink(*page))
            page.clear()
    return removed + (int(queue.client.unlink(*page)) if page else 0)
