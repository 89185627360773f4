"""Everything that is measured of a run, in one round trip.

Owns `Overview` and the commands that fill it. Never changes anything, never does I/O: an executor
makes the trip. Invariant: its size does not grow with the run (no group, member or stream is read
whole), and `audit` and `measured` are each one atomic reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.queue import calls, reads
from rollstream.queue.answers import AuditAnswer, Measured
from rollstream.queue.fetch import Trip, Trips
from rollstream.queue.reads import RunInfo


@dataclass(frozen=True, slots=True)
class Overview:
    """One run as it stands."""

    info: RunInfo
    counters: Mapping[str, int]
    """All, also those of single environments (`reads.ends_by_env`)."""
    depths: Mapping[str, int]
    """Members in q d s l; groups in full, ready, delivered, live, eval, evaluations."""
    measured: Measured
    audit: AuditAnswer
    """The accounting identity, not the deep audit."""


def overview(prefix: str, run: str) -> Trips[Overview | None]:
    """Read it; None where there is no such run.

    Raises:
        RunMismatch: another version wrote it.
    """
    info, depths = reads.info(prefix, run), reads.depths(prefix)
    counters: reads.Command = ("HGETALL", f"{prefix}c")
    # A write that changes nothing: a server that was demoted refuses it, and the connection looks
    # for the new one. It would answer reads for ever.
    knock: reads.Command = ("ZREM", f"{prefix}d", "")
    measure, audit = calls.measure(), calls.audit()
    trip: Trip = (knock, measure, audit, counters, *info.commands, *depths.commands)
    replies = yield trip
    _, said, proof, counted, *rest = replies
    found = info.parse(rest[: len(info.commands)])
    measured = measure.parse(said)
    if found is None or measured is None:
        return None
    return Overview(
        found,
        reads.all_counters(counted),
        depths.parse(rest[len(info.commands) :]),
        measured,
        audit.parse(proof),
    )
