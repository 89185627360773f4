"""How a command reaches a server and a run, and what it says where it cannot.

Owns the connection of the command line. Never writes. Invariant: an unreachable server and an
unknown run are one line on standard error within `--timeout-s`, and exit code 3.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from redis.exceptions import InvalidResponse, ReadOnlyError, ResponseError

from rollstream.cli.exits import PROBLEM, UNREACHABLE, USAGE, CommandError
from rollstream.errors import RunMismatch
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo
from rollstream.runs import OUTAGES, REFUSALS, list_runs
from rollstream.urls import redis_url_problem, shown_url, with_sentinels

DEFAULT_URL = "redis://127.0.0.1:6379"
DAMAGE = (ResponseError, LookupError, ValueError, RunMismatch)
"""What reading a run raises whose keys are not what this version writes."""


def url_of(args: argparse.Namespace) -> str:
    """Return the server's URL: the argument, else what the environment says, else this machine.

    Raises:
        CommandError: the file with the URL cannot be read.
    """
    if args.redis:
        return str(args.redis)
    file = os.environ.get("ROLLSTREAM_REDIS__URL_FILE")
    if file:
        try:
            url = Path(file).read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:  # not UTF-8, or a name that cannot be one
            raise CommandError(f"ROLLSTREAM_REDIS__URL_FILE: {error}", USAGE) from None
    else:
        url = os.environ.get("ROLLSTREAM_REDIS__URL") or DEFAULT_URL
    sentinels = os.environ.get("ROLLSTREAM_REDIS__SENTINEL")
    return with_sentinels(url, sentinels) if sentinels else url


def queue_of(args: argparse.Namespace, url: str, run: str) -> BlockingQueue:
    """Return a queue of `run` that is not connected yet.

    Raises:
        CommandError: the URL or the certificate cannot be one.
    """
    if problem := redis_url_problem(url):
        raise CommandError(f"--redis {shown_url(url)}: expected {problem}", USAGE)
    ca = args.ca or os.environ.get("ROLLSTREAM_REDIS__CA")
    if ca and not Path(ca).is_file():
        raise CommandError(f"--ca {ca}: there is no such file", USAGE)
    return BlockingQueue.connect(url, run, ca=ca, connect_timeout_s=args.timeout_s)


@contextlib.contextmanager
def reached(args: argparse.Namespace, url: str, run: str) -> Iterator[BlockingQueue]:
    """A queue whose outages are one line; a server that hangs is as good as none."""
    started = time.monotonic()
    with contextlib.closing(queue_of(args, url, run)) as queue:
        queue.client.connection_pool.connection_kwargs["socket_timeout"] = args.timeout_s
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
        except ReadOnlyError as error:
            raise CommandError(
                f"Redis at {shown_url(url)} is a replica, which takes no changes ({error}): give "
                "--redis the primary's URL",
                UNREACHABLE,
            ) from None
        except RunMismatch as error:
            raise CommandError(str(error), PROBLEM) from None
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
def the_run(args: argparse.Namespace) -> Iterator[tuple[BlockingQueue, RunInfo]]:
    """The run that was named, or the only one there is."""
    url = url_of(args)
    name = args.run or os.environ.get("ROLLSTREAM_RUN__NAME")
    if not name:
        with reached(args, url, "") as server:
            name = _only_run(list_runs(server.client), url)
    with reached(args, url, name) as queue:
        info = queue.info()
        if info is None:
            raise no_run(queue, url)
        yield queue, info


def no_run(queue: BlockingQueue, url: str) -> CommandError:
    """Return the error of a run that does not exist; it names those that do."""
    others = ", ".join(list_runs(queue.client)) or "none"
    return CommandError(
        f"no run {queue.run!r} at {shown_url(url)}; runs there: {others}", UNREACHABLE
    )


def _only_run(names: list[str], url: str) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise CommandError(f"there is no run at {shown_url(url)}", UNREACHABLE)
    raise CommandError(f"several runs, name one with --run: {', '.join(names)}", USAGE)
