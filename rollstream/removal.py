"""The end of a run and of every key it has: who is alive in it, and the deletion.

Owns the only code that deletes. Never touches a key outside the run's prefix, and never asks:
`rollstream runs --remove` and `producer --fresh` decide. Invariant: the run's hash goes last, in
the state `aborting`, so a removal that was interrupted leaves a run that takes no work and is
refused by its name, never keys that a new run would stumble over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from rollstream.errors import RunMismatch
from rollstream.queue import calls

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue

ROLES = {"producer": "wp", "worker": "w", "aggregator": "wa"}
ALIVE_LEASES = 4
"""A process unseen for so many leases is gone, as for `sweep`."""
PAGE = 500
MAX_NAMED = 4


def keys_of(queue: BlockingQueue) -> Iterator[bytes]:
    """Yield every key of a run."""
    yield from queue.client.scan_iter(match=f"{queue.prefix}*", count=PAGE)


def look(queue: BlockingQueue) -> tuple[str, int | None, dict[str, list[str]]]:
    """Return the run's state, live groups and who is alive; damaged keys are no reason to stay."""
    try:
        info = queue.info()
        state = "incomplete" if info is None else info.state
        return state, queue.depths()["live"], alive_of(queue)
    except RunMismatch:
        return "of another version", None, _alive_if_readable(queue)
    except (ResponseError, LookupError, ValueError):
        return "unreadable", None, {}


def _alive_if_readable(queue: BlockingQueue) -> dict[str, list[str]]:
    try:
        return alive_of(queue)
    except (ResponseError, LookupError, ValueError):
        return {}


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


def named(alive: Mapping[str, Sequence[str]]) -> str:
    """Return who is alive, for people."""
    parts = []
    for role, names in alive.items():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        parts.append(f"{role} {', '.join(names[:MAX_NAMED])}{more}")
    return "; ".join(parts)


def remove_run(queue: BlockingQueue) -> int:
    """Abort a run and delete every key of it; how many there were."""
    hash_key = f"{queue.prefix}m".encode()
    found = sum(1 for _ in keys_of(queue))
    _stop(queue, hash_key)
    _unlink(queue, leave=hash_key)
    queue.client.unlink(hash_key)
    # Whoever worked on it to the last may have written a counter behind the first pass; without
    # the hash every script answers `lost` and writes nothing.
    _unlink(queue)
    return found


def _stop(queue: BlockingQueue, hash_key: bytes) -> None:
    """Let nobody begin anything; the hash of a run that cannot be told so goes first."""
    try:
        if queue.info() is None or queue.call(calls.abort_run("removed")) != "lost":
            return
    except (ResponseError, RunMismatch, LookupError, ValueError):
        queue.client.unlink(hash_key)


def _unlink(queue: BlockingQueue, leave: bytes = b"") -> None:
    page: list[Any] = []
    for key in keys_of(queue):
        if key == leave:
            continue
        page.append(key)
        if len(page) == PAGE:
            queue.client.unlink(*page)
            page.clear()
    if page:
        queue.client.unlink(*page)
