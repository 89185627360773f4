"""What a pool of engines says of itself, as it is published.

Owns the seam to `engines.fleet` and the names of the pool's counters. Never publishes. Invariant:
every count of a pool is a metric, and is found by its own name.
"""

from __future__ import annotations

from typing import Protocol

from ..engines.fleet.states import State


class EngineFigures(Protocol):
    """What is published of one engine (`engines.pooled.EngineCounters`)."""

    url: str
    slot: int
    up: bool
    state: State
    lag: int
    limit: int
    requests: dict[str, int]


class PoolFigures(Protocol):
    """What is published of a pool (`engines.pooled.PoolCounters`)."""

    retries: int
    retries_denied: int
    stale_connections: int
    ejections: int
    waits: int
    pauses: int
    aborted: int


POOL_COUNTERS = {
    "retries": ("engine_retries", "Calls that were tried again"),
    "retries_denied": (
        "engine_retries_denied",
        "Calls that were not, because the budget of retries was used up",
    ),
    "stale_connections": (
        "engine_stale_connections",
        "Tries that met a connection which its engine had closed",
    ),
    "ejections": ("engine_ejections", "Times that an engine was put aside until it answers"),
    "waits": ("engine_waits", "Tries of calls that found no engine up"),
    "pauses": ("engine_pauses", "Pauses of engines that were seen to begin"),
    "aborted": ("aborted_calls", "Calls that were aborted for new weights or at the worker's end"),
}
"""Counts of `PoolFigures`: (the metric, what it says)."""
