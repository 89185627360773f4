"""The verifier: an RQ worker that runs jobs, each in a process that is killed when overdue.

    python -m worker.isolation.verifier [--redis.url URL] [--rq.url URL]

Owns the fork, the kill of its process group, and the word to the waiting worker when a job died.
Never runs a job itself, never imports what a message names (`table` is closed), never serves a
second queue. Invariant: every job ends within its `timeout_s` plus a moment, and its end is told:
by the job, or by this process where the job cannot.

SIGTERM ends it after the job that runs, which is bounded; an outage of Redis does not end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog
from rq import Queue, Worker
from rq.exceptions import DeserializationError
from rq.job import Job

from rollstream import logs
from rollstream.config import Loaded, run_app
from rollstream.queue.connection import Reach, refuse_cluster
from rollstream.settings import Settings

from .messages import MAX_TIMEOUT_S, QUEUE, failure, inbox_key
from .place import Place, settle
from .table import Job as Entry
from .table import perform, table_of, warm

PROG = "python -m worker.isolation.verifier"
INBOX_TTL_S = 600
MAX_JOB_BYTES = 64 << 20
"""Of a job's record, inflated; RQ itself inflates whatever it finds."""
_SOCKET_TIMEOUT_S = 5.0
_MAX_BACKOFF_S = 5.0
_PR_SET_PDEATHSIG = 1
log = structlog.get_logger("verifier")


class Inboxes:
    """Pushes results to the lists that workers read."""

    def __init__(self, url: str, ca: str | None = None) -> None:
        self._url, self._ca = url, ca

    def push(self, run: str, inbox: str, message: bytes) -> None:
        """Append one message, and let the list expire where nobody reads it."""
        key = inbox_key(run, inbox)
        reach = Reach(self._url, key, ca=self._ca)
        with reach.blocking_client(socket_timeout=_SOCKET_TIMEOUT_S) as client:
            pipeline = client.pipeline(transaction=False)
            pipeline.rpush(key, message)
            pipeline.expire(key, INBOX_TTL_S)
            pipeline.execute()


class TableJob(Job):  # type: ignore[misc]  # rq has no types
    """A job whose function is an entry of the closed table, and that calls nothing else.

    RQ's own class imports any dotted path that a job names: its function, its callbacks, its
    webhooks.
    """

    inboxes: Inboxes
    table: Mapping[str, Entry]

    @property
    def func(self) -> Callable[..., None]:
        """What runs the entry that the job names, or says that there is none."""
        name = str(self.func_name)
        if name not in self.table or self.instance:
            return functools.partial(refuse, self.inboxes, name, sorted(self.table))
        return functools.partial(run_job, self.inboxes, self.table[name])

    success_callback = failure_callback = stopped_callback = None

    def restore(self, raw_data: Any) -> None:
        """Read the record; what would inflate to more than a job can be is not inflated."""
        bounded = {name: _unless_bomb(value) for name, value in dict(raw_data).items()}
        super().restore(bounded)

    def send_webhooks(self, *_args: Any, **_kwargs: Any) -> None:
        """Send nothing."""


def run_job(
    inboxes: Inboxes,
    job: Entry,
    *,
    run: str,
    inbox: str,
    token: str,
    payload: Any,
    timeout_s: float,  # the parent's business
) -> None:
    """Run one job and tell, in the forked process."""
    inboxes.push(run, inbox, perform(job, token, payload))


def refuse(inboxes: Inboxes, name: str, known: list[str], *_: Any, **given: Any) -> None:
    """Tell whoever asked that there is no such job.

    Raises:
        ValueError: always; RQ keeps its text.
    """
    text = f"no job is called {name[:80]!r}; this verifier knows {', '.join(known)}"
    with contextlib.suppress(KeyError, ValueError):  # nobody can be told
        inboxes.push(
            str(given["run"]), str(given["inbox"]), failure(given["token"], text, "invalid")
        )
    raise ValueError(text)


class Verifier(Worker):  # type: ignore[misc]  # rq has no types
    """RQ's fork worker with a kill that cannot be missed.

    RQ raises an exception in the job at its timeout, which C code never sees and libraries
    swallow, and kills from outside only a minute later.
    """

    max_connection_wait_time = _MAX_BACKOFF_S
    stopping = False
    """Somebody asked this process to end (it also leaves its loop when Redis goes away)."""

    def request_stop(self, signum: int, frame: Any) -> None:
        """Note that the end is wanted."""
        Verifier.stopping = True
        super().request_stop(signum, frame)

    def main_work_horse(self, job: Any, queue: Any) -> None:
        """Run the job in the forked process, which dies with this one."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        super().main_work_horse(job, queue)

    def monitor_work_horse(self, job: Any, queue: Any, execution: Any) -> None:
        """Wait for the job, and kill its process group when it is overdue."""
        group, overdue = self.horse_pid, threading.Event()

        def kill() -> None:
            overdue.set()
            job.retries_left = 0  # the same input would hang again
            _kill_group(group)

        self._overdue = overdue
        timer = threading.Timer(_timeout_of(job), kill)
        timer.daemon = True
        timer.start()
        try:
            super().monitor_work_horse(job, queue, execution)
        finally:
            timer.cancel()
            _kill_group(group)  # whatever the job left running

    def handle_work_horse_killed(self, job: Any, retpid: Any, ret_val: Any, rusage: Any) -> None:
        """Tell the waiting worker that there will be no result, unless the job is tried again."""
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)
        if job.should_retry:
            return
        given = _arguments_of(job)
        detail = "timeout" if self._overdue.is_set() else "crashed"
        text = {
            "timeout": f"killed after {_timeout_of(job):g} s",
            "crashed": f"its process ended with wait status {ret_val}",
        }[detail]
        log.warning("job_killed", job=job.func_name, detail=detail)
        try:
            message = failure(str(given["token"]), text, detail)
            TableJob.inboxes.push(str(given["run"]), str(given["inbox"]), message)
        except (redis.RedisError, KeyError, ValueError) as error:
            log.error("result_not_told", error=str(error))


def _unless_bomb(value: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        inflate.decompress(value, MAX_JOB_BYTES)
    except zlib.error:
        return value  # not compressed
    return b"" if inflate.unconsumed_tail else value


def _arguments_of(job: Any) -> dict[str, Any]:
    try:
        given = job.kwargs
    except DeserializationError:
        return {}  # the forked process fails the job for it; this one goes on watching
    return given if isinstance(given, dict) else {}


def _timeout_of(job: Any) -> float:
    value = _arguments_of(job).get("timeout_s")
    if isinstance(value, int | float) and 0 < value <= MAX_TIMEOUT_S:
        return float(value)
    return MAX_TIMEOUT_S


def _kill_group(group: int) -> None:
    # The group is the forked process's own (it calls setpgrp first), never ours.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def serve(loaded: Loaded) -> int:
    """Run until SIGTERM or SIGINT; a Redis that goes away is waited for.

    Raises:
        redis.RedisError: it cannot be reached at the start.
        ConfigError: it is a cluster.
    """
    settings = loaded.settings
    logs.configure(settings.telemetry.log_format, settings.telemetry.log_level)
    ca = str(settings.redis.ca) if settings.redis.ca else None
    rq_url = settings.rq.url
    url = settings.redis_url() if rq_url is None else rq_url.get_secret_value()
    TableJob.inboxes = Inboxes(settings.redis_url(), ca)
    TableJob.table = table = table_of(_paths(settings))
    settle(Place(0, settings.verifier))
    connection = _connect(url, ca)
    connection.ping()
    refuse_cluster(connection, "redis.url" if rq_url is None else "rq.url")
    signal.signal(signal.SIGTERM, _end)
    warm(table)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    log.info("verifier_ready", queue=QUEUE, jobs=sorted(table))
    wait_s = 0.1
    while not Verifier.stopping:
        started = time.monotonic()
        try:
            _worker(connection).work(logging_level="WARNING")
        except redis.RedisError as error:
            log.warning("redis_away", error=str(error))
        signal.signal(signal.SIGTERM, _end)  # the worker that just ended left its own
        wait_s = 0.1 if time.monotonic() - started > _MAX_BACKOFF_S else wait_s
        if not Verifier.stopping:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_BACKOFF_S)
    log.info("verifier_ended")
    return 0


def _paths(settings: Settings) -> set[str]:
    """Return what any environment runs isolated."""
    return {name for table in settings.envs().values() for name in table.reward.isolated}


def _end(*_: Any) -> None:
    Verifier.stopping = True
    raise SystemExit(0)


def _connect(url: str, ca: str | None) -> redis.Redis:
    # No bound on a reply: RQ blocks for as long as it wants to.
    return Reach(url, "", ca=ca).blocking_client(socket_timeout=None)


def _worker(connection: redis.Redis) -> Verifier:
    queue = Queue(QUEUE, connection=connection, serializer="json", job_class=TableJob)
    return Verifier(
        [queue],
        connection=connection,
        serializer="json",
        job_class=TableJob,
        worker_ttl=60,
        maintenance_interval=60,
        log_job_description=False,
    )


def main() -> int:
    """Run the verifier of this configuration."""
    return run_app(serve, PROG)


if __name__ == "__main__":
    sys.exit(main())
