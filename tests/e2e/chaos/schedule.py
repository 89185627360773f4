"""What goes wrong when: a schedule drawn from a seed before anything is started.

Owns kinds, victims, times and durations. Never looks at the run: the same seed and length give the
same schedule on every machine. Invariant: kinds come from a shuffled bag that is refilled when it
is empty, so even a short run meets every kind about as often as its share says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.e2e.chaos.options import LEASE_S, NUM_AGGREGATORS, NUM_ENGINES, NUM_WORKERS


class Act(StrEnum):
    """What is done to a victim."""

    KILL = "kill"
    """SIGKILL; started again after `duration_s`."""
    AMNESIA = "amnesia"
    """Redis alone: SIGKILL, and the end of its append-only file is lost (a host that crashed)."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT after `duration_s`."""
    CUT = "cut"
    """Every connection of the victim to Redis is reset."""
    TEAR = "tear"
    """Half of what it sends next arrives, then its connections are reset."""
    LOSE = "lose"
    """The next replies to it are thrown away, each with its connection."""
    STALL = "stall"
    """Its connections to Redis stay open and carry nothing for `duration_s`."""
    USURP = "usurp"
    """The trainer alone: frozen, another one is started, and the old one wakes up after."""
    WITHDRAW = "withdraw"
    """An operator withdraws live groups."""
    REQUEUE = "requeue"
    """An operator requeues live groups."""
    STALE = "stale"
    """An operator bounds the staleness tightly for `duration_s`."""


ON_LINKS = (Act.CUT, Act.TEAR, Act.LOSE, Act.STALL)
COUNTS = {"worker": NUM_WORKERS, "aggregator": NUM_AGGREGATORS, "engine": NUM_ENGINES}
"""Processes of a role; of every other role there is one."""
BAG: dict[tuple[Act, str], int] = {
    (Act.KILL, "worker"): 6,
    (Act.KILL, "trainer"): 7,
    (Act.KILL, "aggregator"): 4,
    (Act.KILL, "producer"): 2,
    (Act.KILL, "engine"): 2,
    (Act.KILL, "verifier"): 1,
    (Act.KILL, "redis"): 1,
    (Act.AMNESIA, "redis"): 1,
    (Act.FREEZE, "worker"): 8,
    (Act.FREEZE, "trainer"): 2,
    (Act.FREEZE, "aggregator"): 3,
    (Act.FREEZE, "producer"): 1,
    (Act.FREEZE, "engine"): 2,
    (Act.FREEZE, "verifier"): 1,
    (Act.FREEZE, "redis"): 1,
    (Act.USURP, "trainer"): 1,
    (Act.CUT, "worker"): 1,
    (Act.CUT, "trainer"): 1,
    (Act.CUT, "producer"): 1,
    (Act.TEAR, "worker"): 1,
    (Act.TEAR, "trainer"): 1,
    (Act.LOSE, "worker"): 2,
    (Act.LOSE, "trainer"): 1,
    (Act.LOSE, "producer"): 1,
    (Act.LOSE, "aggregator"): 1,
    (Act.STALL, "worker"): 1,
    (Act.STALL, "aggregator"): 1,
    (Act.WITHDRAW, "operator"): 2,
    (Act.REQUEUE, "operator"): 2,
    (Act.STALE, "operator"): 1,
}
"""How often each comes in one bag."""
MEAN_GAP_S = 0.5


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that goes wrong."""

    at_s: float
    """Since chaos began."""
    act: Act
    role: str
    victim: str
    """Name of the process: `worker-2`, `trainer`, …"""
    duration_s: float
    """Until it is undone: thawed, started again, …"""


def schedule(seed: int, seconds: float) -> Iterator[Event]:
    """Yield the events of a run, in order."""
    draw = random.Random(seed)
    at_s, bag = 0.0, list[tuple[Act, str]]()
    while True:
        at_s += min(3 * MEAN_GAP_S, max(0.05, draw.expovariate(1 / MEAN_GAP_S)))
        if at_s >= seconds:
            return
        if not bag:
            bag = [kind for kind, share in BAG.items() for _ in range(share)]
            draw.shuffle(bag)
        act, role = bag.pop()
        victim = role
        if role in COUNTS:
            victim = f"{role}-{draw.randrange(COUNTS[role]) + 1}"
        yield Event(at_s, act, role, victim, _duration_s(draw, act))


def _duration_s(draw: random.Random, act: Act) -> float:
    if act in (Act.KILL, Act.AMNESIA):
        return draw.uniform(0.0, 0.8) if draw.random() < 0.85 else draw.uniform(1.0, 2 * LEASE_S)
    if act is Act.STALE:
        return 2.0
    # Most freezes outlast a lease: what they wake up with is no longer theirs.
    return draw.uniform(0.3 * LEASE_S, 2.5 * LEASE_S)
