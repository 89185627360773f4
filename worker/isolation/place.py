"""Where a job finds itself: its slot and the limits of the configuration.

Owns the one value. Never sets a limit itself. Invariant: written once by the verifier, before the
process of a job is forked; a job only reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollstream.settings import VerifierTable


@dataclass(frozen=True, slots=True)
class Place:
    """What a job may know of the process that runs it."""

    slot: int = 0
    """0 .. `verifier.max_processes` - 1; no two jobs of one verifier have the same at once."""
    limits: VerifierTable = field(default_factory=VerifierTable)
    """As configured."""


_place = Place()


def here() -> Place:
    """Return the place of the job that runs in this process."""
    return _place


def settle(place: Place) -> None:
    """Set the place of every job that this process forks from now on."""
    global _place
    _place = place
