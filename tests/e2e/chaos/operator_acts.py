"""What an operator does to a run while it goes on: withdraw, requeue, bound the staleness, end it.

Owns the calls. Never keeps a connection: each function gets the queue. Invariant: everything here
is a call that any operator may make, at any time.
"""

from __future__ import annotations

import random

from rollstream.frontier import TerminalIds
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import StreamEntry

GROUPS_AT_ONCE = 2
SKIPS_A_ROUND_TRIP = 256


def live_groups(queue: BlockingQueue) -> list[int]:
    """Return the ids of all live groups."""
    return sorted(int(gid) for gid in queue.client.smembers(f"{queue.prefix}gs"))


def withdraw_some(queue: BlockingQueue, draw: random.Random) -> None:
    """Drop some live groups on a wish."""
    live = live_groups(queue)
    for group in draw.sample(live, min(GROUPS_AT_ONCE, len(live))):
        queue.call(calls.withdraw(str(group)))


def requeue_some(queue: BlockingQueue, draw: random.Random) -> None:
    """Let some live groups begin anew, whatever state they are in."""
    live = live_groups(queue)
    for group in draw.sample(live, min(GROUPS_AT_ONCE, len(live))):
        stored = queue.headers([StreamEntry("", str(group), 0)])[0]
        queue.call(calls.requeue(str(group), stored.life, "an operator's wish"))


def bound_staleness(queue: BlockingQueue, versions: int) -> None:
    """Drop groups that are older than so many versions, from now on."""
    queue.call(calls.set_budget("max_stale", versions))


def terminal_ids(queue: BlockingQueue) -> TerminalIds:
    """Return the ids that never come again."""
    state = queue.call(calls.state())
    return TerminalIds(state.frontier, state.bitmap)


def end_source(queue: BlockingQueue, num_rows: int, first: int | None) -> tuple[int, set[int]]:
    """Skip every row that was not enqueued yet; the producer then comes to its end by itself.

    Args:
        queue: the run.
        num_rows: of the source.
        first: where the tail begins, from the call before; None finds it.

    Returns:
        Where the tail begins, and the rows that were skipped now.
    """
    terminal = terminal_ids(queue)
    if first is None:
        highest = max(live_groups(queue), default=-1)
        above = (g for g in range(num_rows - 1, -1, -1) if g in terminal)
        first = max(highest, next(above, -1)) + 1
    wanted = [row for row in range(first, num_rows) if row not in terminal]
    skipped: set[int] = set()
    for start in range(0, len(wanted), SKIPS_A_ROUND_TRIP):
        rows = wanted[start : start + SKIPS_A_ROUND_TRIP]
        answers = queue.call_many([calls.skip(row) for row in rows])
        skipped |= {row for row, said in zip(rows, answers, strict=True) if said == "skipped"}
    return first, skipped
