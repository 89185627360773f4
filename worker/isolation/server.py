"""One server of a verifier: an RQ worker whose jobs run in its pen, and whose results are told.

Owns one slot, one process for jobs, and RQ's bookkeeping around them. Never runs a job itself,
never imports what a message names (the table is closed), never serves a second queue. Invariant:
every job that it took ends within its `timeout_s` plus a moment, and its end is told: by the job,
or by this process where the job cannot.

It ends between two jobs when asked to, and with all that its job started when its supervisor is
gone; an outage of Redis does not end it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import re
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog
from rq import Queue, SimpleWorker
from rq.exceptions import StopRequested
from rq.job import Job
from rq.timeouts import BaseDeathPenalty
from rq.utils import now as utcnow

from rollstream.link import OUTAGE
from rollstream.queue.connection import Reach
from rollstream.settings import VerifierTable

from ..functions import describe
from . import leftovers
from .desk import Desk
from .inboxes import Inboxes
from .messages import MAX_TIMEOUT_S, QUEUE, failure
from .pen import Abandoned, Crashed, Overdue, Pen
from .place import Place, settle
from .table import Job as Entry

MAX_JOB_BYTES = 8 << 20
"""Of a job's record, inflated; RQ itself inflates whatever it finds."""
TRIES = 2
"""Of a job whose process dies, within its time."""
TELL_S = 60.0
"""How long a result waits for a Redis that is away."""
_TELL_AGAIN_S = 0.4
_DEQUEUE_S = 1
"""How soon an idle server notices that it shall end."""
_MAX_BACKOFF_S = 5.0
_JOB_ID = re.compile(rb"[0-9A-Za-z_-]{1,160}")
_BEAT_S = 10.0
log = structlog.get_logger("verifier")


class Server:
    """What a server knows of itself, and how it runs one job."""

    def __init__(
        self,
        slot: int,
        desk: Desk,
        table: Mapping[str, Entry],
        inboxes: Inboxes,
        limits: VerifierTable,
        supervisor: int,
    ) -> None:
        self.slot, self.desk, self.table, self.inboxes = slot, desk, table, inboxes
        self.supervisor = supervisor
        self._asked, self.num_taken = False, 0
        self.pen = Pen(table, limits, is_abandoned=lambda: self.is_abandoned)

    @property
    def is_abandoned(self) -> bool:
        """Whether the supervisor is gone."""
        return os.getppid() != self.supervisor

    @property
    def shall_end(self) -> bool:
        """Whether it takes no further job."""
        return self._asked or self.is_abandoned or self.desk.is_retired(self.slot)

    def ask_to_end(self, *_: Any) -> None:
        """Take no further job; the one that runs goes on."""
        self._asked = True

    def run(
        self,
        name: str,
        *,
        run: str,
        inbox: str,
        token: str,
        payload: Any,
        timeout_s: Any,
    ) -> None:
        """Run one job and tell how it ended.

        Raises:
            redis.RedisError: it could not be told.
        """
        self.desk.begin(self.slot, {"run": run, "inbox": inbox, "token": token, "job": name})
        try:
            self._tell(run, inbox, self._message(name, token, payload, _bounded(timeout_s)))
        finally:
            self.desk.end(self.slot)
        with contextlib.suppress(OSError):  # the next job says so, if it still is so
            self.pen.prepare()

    def _tell(self, run: str, inbox: str, message: bytes) -> None:
        """Push a result; an outage is waited for, because the job itself may have taken long.

        Raises:
            redis.RedisError: it could not be told.
        """
        limit, wait_s = time.monotonic() + TELL_S, 0.1
        while True:
            try:
                self.inboxes.push(run, inbox, message)
            except OUTAGE as error:
                if wait_s < _TELL_AGAIN_S:  # not at every try
                    log.warning("result_waits_for_redis", error=str(error))
                if time.monotonic() + wait_s > limit or self.is_abandoned:
                    raise
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _TELL_AGAIN_S)
            else:
                return

    def _message(self, name: str, token: str, payload: Any, timeout_s: float) -> bytes:
        """Return how a job ends; the second try has what the first left of its time."""
        limit = time.monotonic() + timeout_s
        crashed: Crashed | None = None
        for _ in range(TRIES):
            left_s = limit - time.monotonic()
            try:
                return self.pen.run(name, token, payload, max(0.0, left_s))
            except Overdue:
                if crashed is not None:  # it had not all of its time
                    break
                log.warning("job_killed", job=name, timeout_s=timeout_s)
                return failure(token, f"killed after {timeout_s:g} s", "timeout")
            except Crashed as error:
                log.warning("job_crashed", job=name, how=str(error))
                crashed = error
            except leftovers.Unkillable as error:
                self._asked = True  # another server is not held up by what cannot be killed
                return failure(token, str(error), "crashed")
        return failure(token, str(crashed), "crashed")

    def refuse(self, name: str, *_: Any, **given: Any) -> None:
        """Tell whoever asked that there is no such job.

        Raises:
            ValueError: always; RQ keeps its text.
        """
        known = ", ".join(sorted(self.table))
        text = (
            f"no job is called {name[:80]!r}; this verifier knows {known}. A function of yours has "
            "to stand in reward.isolated of the verifier's own configuration"
        )
        with contextlib.suppress(KeyError, ValueError):  # nobody can be told
            message = failure(str(given["token"]), text, "invalid")
            self.inboxes.push(str(given["run"]), str(given["inbox"]), message)
        raise ValueError(text)


class TableJob(Job):  # type: ignore[misc]  # rq has no types
    """A job whose function is an entry of the closed table, and that calls nothing else.

    RQ's own class imports any dotted path that a job names: its function, its callbacks, its
    webhooks.
    """

    server: Server

    @property
    def func(self) -> Callable[..., None]:
        """What runs the entry that the job names, or says that there is none."""
        name = str(self.func_name)
        if name not in self.server.table or self.instance:
            return functools.partial(self.server.refuse, name)
        return functools.partial(self.server.run, name)

    success_callback = failure_callback = stopped_callback = None

    def restore(self, raw_data: Any) -> None:
        """Read the record; what would inflate to more than a job can be is not inflated."""
        bounded = {name: _unless_bomb(value) for name, value in dict(raw_data).items()}
        super().restore(bounded)

    def send_webhooks(self, *_args: Any, **_kwargs: Any) -> None:
        """Send nothing."""


class TableQueue(Queue):  # type: ignore[misc]  # rq has no types
    """A queue that is left between two jobs only: one that was taken is never put down."""

    @classmethod
    def dequeue_any(cls, queues: Any, timeout: int | None, **options: Any) -> Any:
        """Wait for a job.

        RQ's own worker leaves by an exception out of its signal handler, and a job that it had just
        taken is lost (rq#2236).

        Raises:
            StopRequested: this server shall end.
        """
        if TableJob.server.shall_end:
            raise StopRequested
        return super().dequeue_any(queues, min(timeout or _DEQUEUE_S, _DEQUEUE_S), **options)

    @classmethod
    def lmove(cls, connection: redis.Redis, queue_key: str, timeout: int | None) -> Any:
        """Take the next name; one that no client of ours gives is thrown away."""
        while True:
            found = super().lmove(connection, queue_key, timeout)
            TableJob.server.num_taken += found is not None
            if found is None or _JOB_ID.fullmatch(found[1]):
                return found
            connection.lrem(f"{queue_key}:intermediate", 1, found[1])
            log.warning("job_unreadable", job=repr(found[1][:80]), error="not a name")

    @classmethod
    def _fetch_dequeued_job(cls, connection: Any, queue_key: str, job_id: str, **how: Any) -> Any:
        """Return the job; a record that cannot be read is no job, and ends no server."""
        try:
            return super()._fetch_dequeued_job(connection, queue_key, job_id, **how)
        except OUTAGE:
            raise
        except Exception as error:  # noqa: BLE001 - RQ parses what anybody may have written
            _throw_away(connection, queue_key, job_id, error)
            return None

    def fetch_job(self, job_id: str) -> Any:
        """Return a job of this queue; one that cannot be read is none."""
        try:
            return super().fetch_job(job_id)
        except OUTAGE:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            _throw_away(self.connection, self.key, job_id, error)
            return None


class NoAlarm(BaseDeathPenalty):  # type: ignore[misc]  # rq has no types
    """No exception in the middle of the server's own work: the pen bounds every job."""

    def setup_death_penalty(self) -> None:
        """Set no alarm."""

    def cancel_death_penalty(self) -> None:
        """There is none."""


class JobServer(SimpleWorker):  # type: ignore[misc]  # rq has no types
    """RQ's worker without what it does beside jobs."""

    max_connection_wait_time = _MAX_BACKOFF_S
    death_penalty_class = NoAlarm
    _beaten_mono_s = -math.inf

    def check_for_suspension(self, burst: bool) -> None:
        """Never wait for `rq resume`: a verifier is stopped by stopping it."""

    def run_maintenance_tasks(self) -> None:
        """Clean up behind servers that died; what cannot be read there ends no server."""
        try:
            super().run_maintenance_tasks()
        except OUTAGE:
            raise
        except Exception as error:  # noqa: BLE001 - RQ parses what anybody may have written
            self.last_cleaned_at = utcnow()
            log.warning("queue_not_cleaned", error=describe(error))

    def _install_signal_handlers(self) -> None:
        """Leave those of the server."""

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Beat every few seconds, not five times a job: RQ forgets a worker after minutes."""
        due = time.monotonic() - self._beaten_mono_s >= _BEAT_S
        if pipeline is not None or due:
            self._beaten_mono_s = time.monotonic()
            super().heartbeat(timeout, pipeline=pipeline)

    def subscribe(self) -> None:
        """Listen to no commands: whoever writes to Redis ends no verifier."""

    def unsubscribe(self) -> None:
        """Nothing was subscribed to."""


def _throw_away(connection: redis.Redis, queue_key: str, job_id: str, error: Exception) -> None:
    """Forget a name whose record cannot be read, so that nobody meets it again."""
    connection.lrem(f"{queue_key}:intermediate", 1, job_id)
    log.warning("job_unreadable", job=job_id, error=describe(error))


def _unless_bomb(value: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        inflate.decompress(value, MAX_JOB_BYTES)
    except zlib.error:
        return value  # not compressed
    return b"" if inflate.unconsumed_tail else value


def _bounded(timeout_s: Any) -> float:
    if isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return float(timeout_s)
    return MAX_TIMEOUT_S


def serve(
    slot: int,
    desk: Desk,
    table: Mapping[str, Entry],
    inboxes: Inboxes,
    limits: VerifierTable,
    supervisor: int,
    reach: Reach,
) -> None:
    """Run jobs in this forked process until it shall end; a Redis that is away is waited for.

    Args:
        slot: of this server.
        desk: shared with the supervisor.
        table: what may run.
        inboxes: where results go.
        limits: of the processes of jobs.
        supervisor: the process that forked this one.
        reach: of the server that RQ's jobs are in.
    """
    server = TableJob.server = Server(slot, desk, table, inboxes, limits, supervisor)
    os.setpgid(0, 0)  # what is meant for the supervisor's group is the supervisor's to pass on
    signal.signal(signal.SIGTERM, server.ask_to_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leftovers.die_with(supervisor, signal.SIGTERM)
    leftovers.adopt_orphans()
    random.seed()
    settle(Place(slot, limits))
    # No bound on a reply here: RQ sets one, behind its blocking reads.
    connection = reach.blocking_client(socket_timeout=None)
    wait_s = 0.1
    try:
        while not server.shall_end:
            started, num_taken = time.monotonic(), server.num_taken
            try:
                with contextlib.suppress(OSError):
                    server.pen.prepare()
                _worker(connection).work(logging_level="WARNING")
            except redis.RedisError as error:
                log.warning("redis_away", error=str(error))
            # What one job did to RQ is no reason to let the others wait.
            if server.num_taken > num_taken or time.monotonic() - started > _MAX_BACKOFF_S:
                wait_s = 0.1
            if not server.shall_end:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _MAX_BACKOFF_S)
    except Abandoned:
        pass
    finally:
        server.pen.end()


def _worker(connection: redis.Redis) -> JobServer:
    queue = TableQueue(QUEUE, connection=connection, serializer="json", job_class=TableJob)
    return JobServer(
        [queue],
        connection=connection,
        serializer="json",
        job_class=TableJob,
        queue_class=TableQueue,
        worker_ttl=60,
        maintenance_interval=60,
        log_job_description=False,
    )
