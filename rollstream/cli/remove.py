"""`rollstream runs --remove NAME`: every key of a run, gone.

Owns the question and the refusal; `rollstream.removal` deletes. Never removes anything without a
yes. Invariant: a run that a producer or worker was seen at within four leases stays,
unless `--force`: it would be opened anew, or its work would be lost without anyone having ended it.
"""

from __future__ import annotations

import argparse
import re
import sys

from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.reach import no_run, reached, url_of
from rollstream.cli.view import cleaned, print_json, print_text
from rollstream.log_sink import say
from rollstream.removal import ALIVE_LEASES, keys_of, look, named, remove_run
from rollstream.runs import RUN_NAME


def remove(args: argparse.Namespace) -> int:
    """Delete every key of a run, after showing what it is.

    Raises:
        CommandError: there is no such run, it is in use, or nobody said yes.
    """
    name, url = args.remove, url_of(args)
    if not re.fullmatch(RUN_NAME, name):
        raise CommandError(f"--remove {name!r}: no run is called that ({RUN_NAME})", USAGE)
    with reached(args, url, name) as queue:
        if next(keys_of(queue), None) is None:
            raise no_run(queue, url)
        state, live, alive = look(queue)
        shown = f"run {name}: {state}" + ("" if live is None else f", {live} groups live")
        say(cleaned(shown))
        if alive and not args.force:
            raise CommandError(
                f"run {name!r} is in use: {named(alive)}. End them first, and wait until they "
                f"were not seen for {ALIVE_LEASES} leases where they were killed; or give --force. "
                "Nothing was removed",
                PROBLEM,
            )
        if not (args.yes or _asked(name)):
            raise CommandError("nothing was removed: say y, or give --yes", USAGE)
        removed = remove_run(queue)
    if args.json:
        print_json({"run": name, "state": state, "live": live, "alive": alive, "removed": removed})
    else:
        print_text(f"removed run {name}: {removed} keys")
    return OK


def _asked(name: str) -> bool:
    if not sys.stdin or not sys.stdin.isatty():
        return False
    sys.stderr.write(f"Remove every key of run {name}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
