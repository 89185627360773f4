"""The verifier: runs jobs that may hang, crash or eat memory, in processes that are killed.

    python -m worker.isolation.verifier [--redis.url URL] [--rq.url URL]

Owns the start and the end. Never runs a job in this process. Invariant: it starts with the table of
its own configuration and takes nothing else from a message.

SIGTERM ends it after the jobs that run, which have half a minute; an outage of Redis does not.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys
from pathlib import Path

import structlog

from rollstream import logs
from rollstream.config import Loaded, run_app
from rollstream.errors import ConfigError
from rollstream.heartbeat import Heartbeat
from rollstream.queue.connection import Reach, refuse_cluster
from rollstream.settings import Settings, VerifierTable

from .confine import hide_memory, layers
from .desk import Desk
from .inboxes import Inboxes
from .messages import QUEUE
from .server import serve as serve_slot
from .supervisor import Supervisor
from .table import table_of, warm

PROG = "python -m worker.isolation.verifier"
_COUNT_TIMEOUT_S = 1.0
log = structlog.get_logger("verifier")


def serve(loaded: Loaded) -> int:
    """Run until SIGTERM or SIGINT; a Redis that goes away is waited for.

    Raises:
        redis.RedisError: it cannot be reached at the start.
        ConfigError: it is a cluster, or a function cannot be found.
    """
    hide_memory()  # the processes of jobs are forked from this one
    settings = loaded.settings
    logs.configure(settings.telemetry.log_format, settings.telemetry.log_level)
    ca = str(settings.redis.ca) if settings.redis.ca else None
    rq_url = settings.rq.url
    reach = Reach(settings.redis_url() if rq_url is None else rq_url.get_secret_value(), "", ca=ca)
    processes, max_processes = num_processes(settings.verifier)
    table = table_of(_isolated(settings))
    with reach.blocking_client() as client:
        client.ping()
        refuse_cluster(client, "redis.url" if rq_url is None else "rq.url")
    warm(table)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    desk, inboxes = Desk(max_processes), Inboxes(settings.redis_url(), ca)
    waiting = reach.blocking_client(socket_timeout=_COUNT_TIMEOUT_S)
    supervisor = Supervisor(
        functools.partial(
            serve_slot,
            desk=desk,
            table=table,
            inboxes=inboxes,
            limits=settings.verifier,
            supervisor=os.getpid(),
            reach=reach,
        ),
        desk=desk,
        inboxes=inboxes,
        heartbeat=Heartbeat(settings.telemetry.heartbeat_file),
        num_waiting=lambda: int(waiting.llen(f"rq:queue:{QUEUE}")),
        processes=processes,
        max_processes=max_processes,
        idle_s=settings.verifier.idle_s,
    )
    log.info(
        "verifier_ready", queue=QUEUE, jobs=sorted(table), processes=processes,
        max_processes=max_processes, programs_have=layers(),
    )  # fmt: skip
    supervisor.run()
    log.info("verifier_ended")
    return 0


def num_processes(table: VerifierTable) -> tuple[int, int]:
    """Return how many servers there are at least and at most.

    Raises:
        ConfigError: fewer at most than at least.
    """
    if 0 < table.max_processes < table.processes:
        raise ConfigError(
            f"verifier.max_processes is {table.max_processes}, below verifier.processes "
            f"({table.processes}); raise it, or set it to 0 for the number of cores"
        )
    return table.processes, table.max_processes or max(table.processes, _num_cores())


def _num_cores() -> int:
    """Return how many cores this process may use, a quota of its container counted in."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such controller, or no quota ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _isolated(settings: Settings) -> set[str]:
    """Return what any environment runs isolated."""
    return {name for table in settings.envs().values() for name in table.reward.isolated}


def main() -> int:
    """Run the verifier of this configuration."""
    return run_app(serve, PROG)


if __name__ == "__main__":
    sys.exit(main())
