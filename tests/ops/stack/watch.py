"""What was seen so far: alerts that fired, that Alertmanager had, and expressions with an answer.

Owns the looking again and again, so that a test waits for things that need not all be true at one
moment. Never breaks or mends anything. Invariant: what was seen once stays seen until `forget`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from .expressions import Expression, problem
from .monitor import Alertmanager, Prometheus


class Watch:
    """Looks at one Prometheus and one Alertmanager.

    Attributes:
        fired: alerts that fired.
        told: alerts that Alertmanager had while they fired.
        answered: names of expressions that had an answer.
        silent: names of expressions that had none, with what was wrong.
    """

    def __init__(self, prometheus: Prometheus, alertmanager: Alertmanager) -> None:
        self._prometheus, self._alertmanager = prometheus, alertmanager
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.since_unix_s = time.time()
        self.fired: set[str] = set()
        self.told: set[str] = set()
        self.answered: set[str] = set()
        self.silent: dict[str, str] = {}

    def look(self) -> None:
        """Look at the alerts once."""
        since_s = time.time() - self.since_unix_s
        asked = f'count_over_time(ALERTS{{alertstate="firing"}}[{since_s:.0f}s])'
        if since_s >= 1:
            self.fired |= {one.labels["alertname"] for one in self._prometheus.query(asked)}
        self.told |= set(self._alertmanager.alerts())

    def ask(self, expressions: Iterable[Expression]) -> None:
        """Ask each once."""
        for one in expressions:
            wrong = problem(self._prometheus.query(one.text))
            if wrong:
                self.silent[one.name] = wrong
            else:
                self.answered.add(one.name)

    def over(self, alerts: Iterable[str]) -> bool:
        """Whether none of these alerts fires, and Alertmanager has none of them, right now."""
        asked = set(alerts)
        return not asked & self._prometheus.firing() and not asked & set(
            self._alertmanager.alerts()
        )
