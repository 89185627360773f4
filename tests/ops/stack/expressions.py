"""Every expression that somebody will ever look at: of panels, their variables, alerts and rules.

Owns the reading of the dashboards and the filling in of Grafana's variables. Never keeps a list of
its own: what a dashboard or a rule file gets is asked. Invariant: an expression with a variable
left in it is an error, not a question.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .monitor import Prometheus, Series

_LABEL_VALUES = re.compile(r"^label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)|\[\[(\w+)\]\]")


@dataclass(frozen=True, slots=True)
class Expression:
    """One question, and who asks it."""

    name: str
    """For people: `panel Overview / Groups per minute / A`."""
    text: str


def panels(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, panel) of a dashboard, those in rows too."""
    waiting = list(json.loads(file.read_text())["panels"])
    while waiting:
        panel = waiting.pop(0)
        waiting = [*panel.get("panels", ()), *waiting]
        if panel["type"] != "row":
            yield panel["title"], panel


class Dashboard:
    """One file, with what its variables are on this server."""

    def __init__(self, file: Path, prometheus: Prometheus, interval: str) -> None:
        """Ask for the values of its variables.

        Args:
            file: of the dashboard.
            prometheus: that is asked.
            interval: what `$__rate_interval` and its like are.
        """
        loaded = json.loads(file.read_text())
        self.file, self.title = file, str(loaded["title"])
        self.empty: list[str] = []
        """Variables that have nothing to choose from."""
        self._values = dict.fromkeys(("__rate_interval", "__interval", "__range"), interval)
        for variable in loaded.get("templating", {}).get("list", ()):
            if variable["type"] == "query":
                self._values[variable["name"]] = self._chosen(variable, prometheus)

    def _chosen(self, variable: dict[str, Any], prometheus: Prometheus) -> str:
        """Return what stands in an expression where everything is chosen."""
        asked = variable["query"]
        text = self.fill(asked["query"] if isinstance(asked, dict) else asked)
        found = _LABEL_VALUES.match(text)
        assert found, f"{self.title}: {variable['name']} asks {text!r}, which is no label_values"
        values = prometheus.label_values(found["label"], found["series"] or "up")
        if not values:
            self.empty.append(variable["name"])
        if variable.get("multi") or variable.get("includeAll"):
            return str(variable.get("allValue") or f"({'|'.join(map(re.escape, values))})")
        return values[0] if values else ""

    def fill(self, text: str) -> str:
        """Return an expression with its variables filled in."""
        return _VARIABLE.sub(self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        name = found[1] or found[2] or found[3]
        assert name in self._values, f"{self.title}: nobody knows what ${name} is"
        return self._values[name]

    def expressions(self) -> Iterator[Expression]:
        """Yield every target of every panel."""
        for title, panel in panels(self.file):
            for target in panel.get("targets", ()):
                name = f"panel {self.title} / {title} / {target['refId']}"
                yield Expression(name, self.fill(target["expr"]))


def of_rules(prometheus: Prometheus) -> Iterator[Expression]:
    """Yield what every loaded rule asks, and what a recording rule has recorded."""
    for rule in prometheus.rules():
        if rule.kind == "alerting":
            yield Expression(f"alert {rule.name}", rule.query)
        else:
            yield Expression(f"rule {rule.name}", rule.query)
            yield Expression(f"record {rule.name}", rule.name)


def problem(series: Sequence[Series]) -> str:
    """Return why an answer is none that a person could read; empty where it is one.

    What is told of environments that the run does not have (`env="other"`) may be NaN beside
    others: nothing ever happens there. Nothing may be infinite (a division by nothing).
    """
    if not series:
        return "empty"
    if any(math.isinf(one.value) for one in series):
        return "infinite"
    told = [one for one in series if one.labels.get("env") != "other"] or series
    nan = [dict(one.labels) for one in told if math.isnan(one.value)]
    return f"NaN of {nan[:3]}" if nan else ""
