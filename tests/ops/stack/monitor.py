"""What Prometheus and Alertmanager say, asked through their HTTP APIs.

Owns the requests and the reading of answers. Never starts anything and never waits. Invariant: an
error of the server is an exception with its words, never an empty answer.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 20.0


class Refused(RuntimeError):
    """The server did not take a request; its words are the message."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of an answer."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as Prometheus has loaded it."""

    name: str
    query: str
    kind: str
    """`alerting` or `recording`."""
    health: str
    error: str
    firing: int
    """Alerts of it that fire."""


@dataclass(frozen=True, slots=True)
class Target:
    """One target that Prometheus found."""

    job: str
    instance: str
    health: str
    error: str


def get(url: str) -> Any:
    """Return the JSON that `url` answers with.

    Raises:
        Refused: with what the server says.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise Refused(f"{url}: {error.code} {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise Refused(f"{url}: {error}") from None


def post(url: str, body: Any) -> None:
    """Send JSON.

    Raises:
        Refused: with what the server says.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        raise Refused(f"{url}: {error.code} {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise Refused(f"{url}: {error}") from None


class Prometheus:
    """One server."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def _api(self, path: str, **query: str) -> Any:
        asked = f"{self.url}/api/v1/{path}"
        return get(f"{asked}?{urllib.parse.urlencode(query)}" if query else asked)["data"]

    def query(self, expression: str) -> list[Series]:
        """Return what an expression is now.

        Raises:
            Refused: it is none.
        """
        answer = self._api("query", query=expression)
        if answer["resultType"] == "scalar":
            return [Series({}, float(answer["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in answer["result"]]

    def value(self, expression: str) -> float:
        """Return the sum of an expression's series; NaN where there is none."""
        found = self.query(expression)
        return sum(one.value for one in found) if found else math.nan

    def label_values(self, label: str, series: str) -> list[str]:
        """Return what a label of some series is."""
        found: list[str] = self._api(f"label/{label}/values", **{"match[]": series})
        return found

    def targets(self) -> list[Target]:
        """Return what was found to scrape."""
        return [
            Target(one["labels"]["job"], one["labels"]["instance"], one["health"], one["lastError"])
            for one in self._api("targets", state="active")["activeTargets"]
        ]

    def rules(self) -> list[Rule]:
        """Return every rule that is loaded."""
        return [
            Rule(
                one["name"],
                one["query"],
                one["type"],
                one["health"],
                one.get("lastError", ""),
                sum(alert["state"] == "firing" for alert in one.get("alerts", ())),
            )
            for group in self._api("rules")["groups"]
            for one in group["rules"]
        ]

    def firing(self) -> set[str]:
        """Return the names of alerts that fire."""
        return {
            one["labels"]["alertname"]
            for one in self._api("alerts")["alerts"]
            if one["state"] == "firing"
        }


class Alertmanager:
    """One server."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that it has, by name: silenced and inhibited ones too."""
        return {
            one["labels"]["alertname"]: one for one in get(f"{self.url}/api/v2/alerts?active=true")
        }
