"""What an engine is to its pool at this moment, as others see it.

Owns the closed set of states and the record that carries one. Never decides anything. Invariant:
only `up` takes new calls; whatever else an engine is, the calls that it has in flight go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Whether an engine takes calls, and if not, why."""

    UP = "up"
    BEHIND = "behind"
    """It answers, but serves older weights than the run's."""
    PAUSED = "paused"
    """It answers, but samples nothing until it is told to go on."""
    DOWN = "down"
    """It does not answer, or was not asked yet."""
    REFUSED = "refused"
    """It answers, but its log-probs are not of the distribution that is sampled."""


ALIVE: frozenset[State] = frozenset({State.UP, State.BEHIND, State.PAUSED})
"""Of these a worker may expect calls to be taken again without anybody's help."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine, as confirmations and `rollstream engines` show it."""

    url: str
    kind: str
    state: State
    version: int
    """Weight version that it last reported; unknown (-1) where it says none that is a version."""
    in_flight: int
    """Calls of this worker."""
    limit: int
    """The most calls that this worker has there at once; 0 is no limit."""
    problem: str = ""
    """Why it is of no use, and what to do; empty for one that is, or will be by itself."""
