"""One engine of a pool: its client, how it has been doing, and what the pool may do with it.

Owns the records that pool, fleet and telemetry share. Never does I/O and never decides anything.
Invariant: `state` is what `Fleet.refresh` last made of the facts beside it; nothing else sets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollstream.sample import UNKNOWN_VERSION

from ...types import Finish
from ..client import EngineClient
from ..faults import Detail
from .affinity import hash_of
from .limiter import Limiter
from .logprob_mode import Mode
from .states import State

OUTCOMES: tuple[str, ...] = (*(f.value for f in Finish), *(d.value for d in Detail))
"""How a request can end, for metrics: a finish reason, or the detail of its fault."""

MAX_PROBLEM_CHARS = 200
"""Of what is said of one engine that is of no use; it travels with every beat."""
RAW_PROBLEM = (
    "its log-probs are raw, and samples are drawn at a temperature other than 1: start it with "
    "--logprobs-mode processed_logprobs"
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The bounds of a pool and of one call; `[engine]` in the configuration."""

    max_retries: int = 4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    abort_wait_s: float = 2.0
    probe_interval_s: float = 2.0
    discover_interval_s: float = 10.0
    max_in_flight: int = 0
    """At one engine; 0 is no bound until it complains."""
    retry_budget: float = 0.2
    """Retries as a share of the calls."""
    require_version: bool = True
    """An engine that is known to serve older weights than the run's takes no calls."""


@dataclass(slots=True)
class EngineCounters:
    """What one engine did and is, as plain values; the telemetry reads them once a second."""

    url: str
    slot: int = 0
    """Its place in metrics. The lowest that is free: an engine that leaves gives it to the next."""
    up: bool = True
    """It answers, whether or not it takes calls."""
    state: State = State.UP
    version: int = UNKNOWN_VERSION
    """The newest that it said it serves, when it was last asked or in a reply since."""
    lag: int = 0
    """How many weight versions it is behind the run; 0 where it does not say."""
    in_flight: int = 0
    limit: int = 0
    """The most calls at once; 0 is no limit."""
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    """Requests that ended, by outcome; every outcome exists from the start."""


@dataclass(slots=True)
class PoolCounters:
    """What the pool did."""

    engines: list[EngineCounters]
    """Of those that are members now; the list stays the same object."""
    retries: int = 0
    """Calls that were tried again."""
    retries_denied: int = 0
    """Calls that would have been, had the budget allowed it."""
    stale_connections: int = 0
    """Tries that met a connection which the engine had closed while it was idle; not a fault."""
    ejections: int = 0
    """How often an engine was put aside."""
    waits: int = 0
    """Tries that found no engine up."""
    pauses: int = 0
    """How often an engine was seen to begin a pause."""
    aborted: int = 0
    """Calls that were aborted because all were."""


def cut(text: str) -> str:
    """Return a problem in `MAX_PROBLEM_CHARS`: how it begins, and how it ends (what to do)."""
    if len(text) <= MAX_PROBLEM_CHARS:
        return text
    half = MAX_PROBLEM_CHARS // 2
    return f"{text[: half - 1]}…{text[-half:]}"


class PoolEngine:
    """One engine of a pool."""

    __slots__ = (
        "client",
        "counters",
        "extend",
        "failures_in_row",
        "flights",
        "follow",
        "follow_s",
        "label",
        "leaving",
        "limiter",
        "look_again",
        "looking",
        "looks_failed",
        "mode",
        "mode_name",
        "names_replies",
        "pause_ended_at",
        "paused",
        "salt",
        "seen",
        "trouble",
    )

    def __init__(self, client: EngineClient, *, max_in_flight: int, slot: int, known: bool) -> None:
        """Begin with an engine that is `known` to be there, or one that has to answer first."""
        self.client = client
        self.counters = EngineCounters(client.url, slot, up=known)
        self.counters.state = State.UP if known else State.DOWN
        self.limiter = Limiter(max_in_flight)
        self.counters.limit = self.limiter.shown
        self.salt = hash_of(client.url)
        self.failures_in_row = self.looks_failed = 0
        self.flights: dict[str, asyncio.Timeout] = {}
        """Calls and questions at the engine by rid. What ends the wait for an abort's reply; it has
        no time until then."""
        self.seen = known
        """It has answered at least once."""
        self.trouble = ""
        """Why it is down: what the last look, or the call that put it aside, said."""
        self.paused = False
        self.pause_ended_at = -float("inf")
        self.label: str | int | None = None
        """Of its weights, as it said last."""
        self.names_replies = False
        """Its replies say whose weights sampled them."""
        self.mode: Mode | None = None
        """Of its log-probs; None until it was asked (again, after it had been away)."""
        self.mode_name = ""
        """What its completions then record; empty leaves what its client says."""
        self.leaving = False
        self.looking: asyncio.Task[None] | None = None
        self.look_again = False
        self.follow: asyncio.TimerHandle | None = None
        self.follow_s = 0.0
        self.extend: Callable[[], Awaitable[float]] | None = None
        """Asked by its client when a call's time runs out (`client.Extension`)."""

    @property
    def state(self) -> State:
        """What the pool may do with it."""
        return self.counters.state

    @property
    def version(self) -> int:
        """Weight version that it is known to serve; unknown is -1."""
        return self.counters.version

    @property
    def problem(self) -> str:
        """Why it is of no use, and what to do; empty for one that is, or will be by itself."""
        if self.state is State.DOWN:
            return cut(self.trouble.removeprefix(self.client.url).removeprefix(": "))
        return RAW_PROBLEM if self.state is State.REFUSED else ""

    def said(self) -> str:
        """Return how it is, for people."""
        problem = self.problem
        return f"{self.client.url} is {self.state.value}" + (f" ({problem})" if problem else "")

    def has_room(self) -> bool:
        """Return whether one more call may go there now."""
        return self.limiter.has_room(self.counters.in_flight)
