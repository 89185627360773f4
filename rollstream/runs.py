"""Which runs a server holds, how a process waits for one, and what it says of the server first.

Owns the scan for runs and the sentences about a server that is away or a run that is missing.
Never creates a run: producers do. Invariant: every wait here is bounded, and says that it waits.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from typing import TYPE_CHECKING

import redis
from redis import exceptions as redis_errors

from rollstream import health
from rollstream.errors import RunLost, StreamError, WireError
from rollstream.queue.connection import each_master
from rollstream.queue.keys import run_of
from rollstream.urls import shown_url

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.queue import Queue
    from rollstream.queue.reads import RunInfo

log = logging.getLogger("rollstream.stream")

OUTAGES = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.BusyLoadingError,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
)
"""What a server answers, or does not, while it is away, loading, or not the master."""
REFUSALS = (redis_errors.AuthenticationError, redis_errors.NoPermissionError)
"""What waiting does not heal (the first is a ConnectionError for redis-py)."""
POLL_S = 0.25
CHECK_TIMEOUT_S = 2.0
"""How long a start waits for what the server says of itself."""
MAX_RUNS = 1000
RUN_NAME = r"[A-Za-z0-9._-]{1,64}"
"""What a producer lets a run be called (`run.name`)."""


def list_runs(client: redis.Redis) -> list[str]:
    """Return the names of the runs on a server or in a cluster, sorted; at most `MAX_RUNS`.

    Keys of other programs may look like ours: what no run can be called is none.
    """
    names: set[str] = set()
    for master in each_master(client):
        for key in master.scan_iter(match="rs:{*}:m", count=1000):
            name = run_of(key.decode(errors="replace"))
            if re.fullmatch(RUN_NAME, name):
                names.add(name)
            if len(names) >= MAX_RUNS:
                return sorted(names)
    return sorted(names)


def say_problems(queue: BlockingQueue) -> None:
    """Log what about the server is to be mended; one that is away now is not judged."""
    try:
        with queue.within(CHECK_TIMEOUT_S):
            facts = health.facts_of(queue.ask(health.COMMANDS))
    except (*OUTAGES, *REFUSALS):
        return
    for finding in health.problems(health.judge(facts)):
        log.warning("Redis is not fit for the run: %s", finding.sentence,
                    extra={"run": queue.run, "check": finding.check})  # fmt: skip


async def problems_of(queue: Queue) -> list[health.Finding]:
    """Return what about the server is to be mended; nothing where it is away."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            facts = health.facts_of(await queue.ask(health.COMMANDS))
    except (*OUTAGES, *REFUSALS, TimeoutError):
        return []
    return health.problems(health.judge(facts))


class Interrupted(Exception):
    """The one who waits was told to stop waiting; nothing was taken or handed out."""


def await_run(
    queue: BlockingQueue, url: str, timeout_s: float, interrupt: threading.Event
) -> RunInfo:
    """Return the run's info as soon as it exists.

    Raises:
        Interrupted: `interrupt` was set.
        StreamError: the server cannot be reached, or refuses us.
        RunLost: there is no such run; names those that exist.
    """
    limit, told = time.monotonic() + timeout_s, False
    while True:
        trouble: Exception | None = None
        if interrupt.is_set():
            raise Interrupted
        try:
            with queue.within(limit - time.monotonic()):
                info = queue.info()
            if info is not None:
                return info
        except REFUSALS as error:
            raise StreamError(f"Redis at {shown_url(url)} refuses this client: {error}") from None
        except OUTAGES as error:
            trouble = error
        except WireError:
            raise  # newer than this library, and says so
        except (redis_errors.ResponseError, LookupError, ValueError) as error:
            raise damaged(queue, url, error) from error
        if time.monotonic() >= limit:
            raise missing(queue, url, timeout_s, trouble) from trouble
        if not told:
            told = True
            log.info(
                "waiting for the run",
                extra={"run": queue.run, "timeout_s": timeout_s, "redis": shown_url(url)},
            )
        interrupt.wait(min(POLL_S, max(0.0, limit - time.monotonic())))


def damaged(queue: BlockingQueue, url: str, error: Exception) -> StreamError:
    """Return the error of a run whose keys are not what we wrote."""
    return StreamError(
        f"run {queue.run!r} at {shown_url(url)} cannot be read: keys under {queue.prefix}* are "
        f"another program's, or damaged ({type(error).__name__}: {error}). Remove them and let a "
        "producer open the run again: a checkpoint keeps its place"
    )


def is_damage(error: Exception) -> bool:
    """Return whether a server says that a key is of another kind than ours."""
    return isinstance(error, redis_errors.ResponseError) and "WRONGTYPE" in str(error)


def missing(
    queue: BlockingQueue, url: str, timeout_s: float, trouble: Exception | None = None
) -> StreamError:
    """Return the error of a run that could not be reached or found within `timeout_s`."""
    where = shown_url(url)
    if trouble is None:
        try:
            others = list_runs(queue.client)
        except REFUSALS:
            return RunLost(
                f"no run {queue.run!r} at {where} after {timeout_s:g} s (this user may not list "
                f"others); a producer opens it: python -m producer --run.name {queue.run}"
            )
        except OUTAGES as error:
            trouble = error
        else:
            if queue.run in others:
                return RunLost(
                    f"run {queue.run!r} at {where} has lost its streams: keys of it were removed. "
                    "Remove the others too, and let a producer open it again"
                )
            known = f"runs there: {', '.join(others)}" if others else "there is no run at all"
            return RunLost(
                f"no run {queue.run!r} at {where} after {timeout_s:g} s ({known}); a producer "
                f"opens it: python -m producer --run.name {queue.run}"
            )
    return StreamError(
        f"Redis at {where} cannot be reached (waited {timeout_s:g} s): {trouble}; start it, or "
        "correct the URL"
    )
