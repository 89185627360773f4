"""One request in flight: what it is answered with, how far it is, and where its events end.

Owns the records that core and fronts share. Never samples, waits or sends. Invariant: where the
events of a stream end is a function of its interval and its cut alone, whatever the clock says.

Axes: P prompt ids, C ids of one reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .faults import BREAKS, Fault
from .http import Exchange
from .policy import Reply


@dataclass(frozen=True, slots=True)
class End:
    """Why a reply ends."""

    kind: str
    """`stop`, `length` or `abort`."""
    matched: int | str | None = None
    """Of a stop: its id or string."""
    message: str = ""
    """Of an abort."""
    status: int | None = None
    """Of an abort that is an error."""
    queued: bool = False
    """Aborted before it began: the reply has few fields."""


@dataclass(frozen=True, slots=True)
class Stream:
    """How a reply is streamed."""

    tell: Callable[[Flight, int], None]
    """Sends an event: the reply's first so many tokens are there, `Flight.sent` were before."""
    interval: int = 1
    """New tokens of an event; the first has one."""


ABORTED = End("abort", message="Aborted by a request")
RETRACTED = End("abort", message="Abort in waiting queue", queued=True)


@dataclass(slots=True, eq=False)
class Flight:
    """One request that is being answered."""

    exchange: Exchange
    rid: str
    """As an abort names it; not unique in every protocol."""
    prompt: Sequence[int]
    temperature: float
    """That its log-probs are of."""
    answer: Deliver
    reply: Reply
    fault: Fault | None
    cut: int
    """How many tokens it gets if nothing stops it earlier."""
    duration_s: float
    waits_frozen: bool
    """An abort during a freeze is answered only when sampling goes on."""
    stream: Stream | None = None
    sent: int = 0
    """Tokens that events have told."""
    started_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    elapsed_s: float = 0.0
    """Before the last pause."""
    is_aborted: bool = False
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(label that ended, after how many tokens)"""
    weight_changes: list[tuple[str, int]] = field(default_factory=list)
    """(weights that ended, after how many tokens)"""


Deliver: TypeAlias = Callable[[Flight, int, End], None]
"""Answers a flight with its first so many tokens."""


def next_event(flight: Flight) -> int | None:
    """Return how many tokens are there at its next event; None where its end is next.

    What ends a reply has an event of its own, so none before it has all tokens; where the
    connection breaks there is no end.
    """
    if flight.stream is None:
        return None
    at = flight.sent + flight.stream.interval if flight.sent else 1
    is_last = at > flight.cut if flight.fault in BREAKS else at >= flight.cut
    return None if is_last else at


def break_of(num: int, fault: Fault, after: int | None) -> int:
    """Return behind how many tokens of a streamed reply its connection breaks, or is silent."""
    if after is not None:
        return min(after, num)
    return num // 2 if fault is Fault.HALF_BODY else 0
