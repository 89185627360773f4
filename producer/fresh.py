"""`--fresh`: the run of this name is ended and removed, so that it begins anew with these prompts.

Owns the refusal while somebody works on it. Never removes a run whose data is at stake unseen:
the configuration and every row were checked before. Invariant: without `--fresh=force` a run in
which anybody was seen within four leases stays as it is.
"""

from __future__ import annotations

import contextlib

import structlog

from rollstream.errors import RunMismatch
from rollstream.queue.blocking import BlockingQueue
from rollstream.removal import ALIVE_LEASES, keys_of, look, named, remove_run
from rollstream.settings import Settings

log = structlog.get_logger("producer")


def begin_fresh(settings: Settings, *, force: bool) -> None:
    """Remove the run of this name, where there is one.

    Args:
        settings: which run, and where.
        force: also where somebody is alive: workers give up what they run and take the new run's.

    Raises:
        RunMismatch: somebody is alive.
        redis.exceptions.RedisError: the server cannot be reached, or refuses.
    """
    redis, name = settings.redis, settings.run.name
    queue = BlockingQueue.connect(
        settings.redis_url(),
        name,
        ca=None if redis.ca is None else str(redis.ca),
        connect_timeout_s=redis.connect_timeout_s,
    )
    with contextlib.closing(queue):
        if next(keys_of(queue), None) is None:
            return
        state, live, alive = look(queue)
        if alive and not force:
            raise RunMismatch(
                f"run {name!r} ({state}) is in use: {named(alive)}. End them first, and wait until "
                f"they were not seen for {ALIVE_LEASES} leases where they were killed; or give "
                "--fresh=force. Nothing was removed"
            )
        removed = remove_run(queue)
    log.warning("run_removed", state=state, live=live, keys=removed)
