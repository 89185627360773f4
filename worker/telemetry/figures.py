"""What a pool of engines says of itself, and how it is published.

Owns the seam to `engines.fleet` and the metrics of engines. Never asks an engine. Invariant: every
engine counts in `rollout_engines`, the first few have series of their own, and the counts of a
place never go down, whoever has it.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Protocol

from ..engines.fleet.states import State
from .catalog import ENGINE_OUTCOMES, ENGINES
from .readings import Totals
from .registry import Registry


class EngineFigures(Protocol):
    """What is published of one engine (`engines.pooled.EngineCounters`)."""

    url: str
    slot: int
    up: bool
    state: State
    lag: int
    in_flight: int
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


_POOL = {
    "retries": "rollout_engine_retries_total",
    "retries_denied": "rollout_engine_retries_denied_total",
    "stale_connections": "rollout_engine_stale_connections_total",
    "ejections": "rollout_engine_ejections_total",
    "waits": "rollout_engine_waits_total",
    "pauses": "rollout_engine_pauses_total",
    "aborted": "rollout_aborted_calls_total",
}
"""Counts of `PoolFigures` and their metrics."""
_GAUGES = {
    "up": "rollout_engine_up",
    "in_flight": "rollout_engine_inflight_requests",
    "lag": "rollout_engine_version_lag",
    "limit": "rollout_engine_limit",
}
"""Figures of `EngineFigures` and their metrics."""
_OUTCOME_OF = {
    "connect": "unavailable",
    "reset": "unavailable",
    "server_error": "unavailable",
    "no_engine": "unavailable",
    "context_overflow": "refused",
}
"""Details of engine faults that share a label; what is neither here nor a label is a `fault`."""
NOBODY = float("nan")
"""Of a place that no engine has: an alert on 0 must not go off for it."""


class _Place:
    """A label of engines: whose it is now, and that one's totals as published."""

    __slots__ = ("totals", "url")

    def __init__(self) -> None:
        self.url, self.totals = "", dict[str, int]()


class EngineMetrics:
    """The metrics of engines."""

    def __init__(self, registry: Registry) -> None:
        self._states = registry.gauges("rollout_engines")
        self._gauges = {figure: registry.gauges(name) for figure, name in _GAUGES.items()}
        self._pool = {figure: registry.counter(name) for figure, name in _POOL.items()}
        self._requests = registry.by_labels("rollout_engine_requests_total")
        self._places = {label: _Place() for label in ENGINES}
        self._totals = Totals()
        for gauges in self._gauges.values():
            for gauge in gauges.values():
                gauge.set(NOBODY)

    def publish(self, engines: Iterable[EngineFigures], pool: PoolFigures) -> None:
        """Publish how the engines are; their counts and the pool's are running totals."""
        states: Tally[str] = Tally()
        there: dict[str, EngineFigures] = {}
        for engine in engines:
            states[engine.state.value] += 1
            there[str(engine.slot)] = engine
        for state, gauge in self._states.items():
            gauge.set(states[state])
        for label, place in self._places.items():
            self._publish_place(label, place, there.get(label))
        for figure, counter in self._pool.items():
            self._totals.follow(counter, getattr(pool, figure))

    def _publish_place(self, label: str, place: _Place, engine: EngineFigures | None) -> None:
        for figure, gauges in self._gauges.items():
            gauges[label].set(NOBODY if engine is None else getattr(engine, figure))
        if engine is None:
            return
        if place.url != engine.url:  # another one has taken it, whose counts begin at 0
            place.url, place.totals = engine.url, {}
        for outcome, total in engine.requests.items():
            new = total - place.totals.get(outcome, 0)
            if new > 0:
                known = _OUTCOME_OF.get(outcome, outcome)
                known = known if known in ENGINE_OUTCOMES else "fault"
                self._requests[label, known].inc(new)
            place.totals[outcome] = total
