"""What rules and dashboards may ask for: the catalog's series, and a few that are not ours.

Owns the reading of PromQL as far as the tests need it: names, matchers, and what stands around a
name. Never evaluates: promtool and a real Prometheus do. Invariant: a name that nobody exports, a
label that it has not, and a value that the label never has are each reported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from ops.dashboards.panels import names_of
from worker.telemetry.catalog import CATALOG, Bounded, Spec

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ops" / "prometheus" / "rules"
FOREIGN_COUNTERS = {
    "redis_commands_processed_total",
    "redis_evicted_keys_total",
    "redis_net_input_bytes_total",
    "redis_net_output_bytes_total",
}
FOREIGN = FOREIGN_COUNTERS | {
    "up",
    "ALERTS",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
    "redis_up",
    "redis_aof_enabled",
    "redis_aof_last_write_status",
    "redis_memory_used_bytes",
    "redis_memory_max_bytes",
    "redis_connected_clients",
    "redis_blocked_clients",
}
"""Of Prometheus itself and of redis_exporter."""
TARGET_LABELS = {"job": {"rollstream-worker", "rollstream-exporter", "redis", "prometheus"}}
_MATCHERS = re.compile(r"\b([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_SERIES: dict[str, list[Spec]] = {}
for _spec in CATALOG:
    for _name in _spec.series_names:
        _SERIES.setdefault(_name, []).append(_spec)
COUNTERS = {spec.name for spec in CATALOG if spec.kind == "counter"} | FOREIGN_COUNTERS
CUMULATIVE = COUNTERS | {name for name, specs in _SERIES.items() if specs[0].kind == "histogram"}
"""What only grows, so that its value says nothing and its rate does."""
OF_THE_RUN = {name for name, specs in _SERIES.items() if {s.process for s in specs} == {"exporter"}}
"""What every exporter says of the one run."""
NAN_WITHOUT_ENGINE = {spec.name for spec in CATALOG if "engine" in spec.labels} - COUNTERS


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return a rule file, parsed; not to be changed."""
    loaded: dict[str, Any] = yaml.safe_load((RULES / name).read_text())
    return loaded


def rules(name: str) -> list[dict[str, Any]]:
    """Return the rules of a file."""
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


@functools.cache
def recorded() -> dict[str, str]:
    """Return what is recorded, and how."""
    return {rule["record"]: rule["expr"] for rule in rules("recording.yml")}


def unknown(expr: str) -> list[str]:
    """Return what an expression asks for that nobody exports: names, labels, values."""
    known = recorded()
    bad = [
        name
        for name in names_of(expr)
        if name not in _SERIES and name not in FOREIGN and name not in known
    ]
    for name, matchers in _MATCHERS.findall(expr):
        for label, operator, text in _MATCHER.findall(matchers):
            allowed = values_of(name, label)
            values = text.split("|") if operator in ("=~", "!~") else [text]
            if allowed is not None:
                bad += [f"{name}{{{label}={v!r}}}" for v in values if v not in allowed]
    return bad


def values_of(name: str, label: str) -> set[str] | None:
    """Return the values that a label of a series may have: none at all, or None for any."""
    if label in TARGET_LABELS:
        return TARGET_LABELS[label]
    if label in ("instance", "alertstate") or name in FOREIGN:
        return None
    if name in recorded():
        inner = [values_of(n, label) for n in names_of(recorded()[name])]
        return None if any(found is None for found in inner) else set().union(*filter(None, inner))
    allowed: set[str] = set()
    for spec in _SERIES.get(name, ()):
        found = spec.labels.get(label, ())
        if isinstance(found, Bounded):
            return None
        allowed |= set(found)
    return allowed


def bare(expr: str, names: Iterable[str], around: str) -> list[str]:
    """Return which of the names stand somewhere without one of these functions right around.

    Args:
        expr: of a panel or a rule.
        names: that need one.
        around: functions, as an alternation.
    """
    return [
        name
        for name in names_of(expr)
        if name in set(names)
        for found in re.finditer(rf"(?<![\w:]){re.escape(name)}(?![\w:])", expr)
        if not re.search(rf"\b(?:{around})\(\s*$", expr[: found.start()])
    ]


def aggregations(expr: str, name: str) -> Iterator[str]:
    """Yield, of each place where a series stands, what adds it up nearest; "" where nothing does.

    Args:
        expr: of a panel or a rule.
        name: of the series.
    """
    plain = re.sub(r"\b(?:by|without)\s*\([^)]*\)", "", expr)
    for found in re.finditer(rf"(?<![\w:]){re.escape(name)}(?![\w:])", plain):
        depth, nearest = 0, ""
        for opened in reversed(list(re.finditer(r"[()]", plain[: found.start()]))):
            depth += 1 if opened[0] == ")" else -1
            word = re.search(r"(\w+)\s*$", plain[: opened.start()])
            if depth < 0:
                depth = 0
                if word and word[1] in ("sum", "avg", "min", "max", "count"):
                    nearest = word[1]
                    break
        yield nearest


def windows(expr: str) -> Iterator[str]:
    """Yield the window of every range of an expression."""
    yield from re.findall(r"\[([^\]:]+)", expr)
