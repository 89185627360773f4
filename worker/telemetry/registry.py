"""The metrics of one process, made of the catalog: every series from the start.

Owns the Prometheus registry and the children. Never counts by itself, never adds a label value
later. Invariant: what a scrape shows are the series of `catalog`, all of them and no others, from
the first scrape to the last (a rate over a series that appears late is wrong).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import prometheus_client as prom

from .catalog import CATALOG, Process, Spec

Child = Any
"""A child of prometheus-client: `Counter`, `Gauge` or `Histogram` without labels left to give."""
_KINDS: dict[str, Any] = {"counter": prom.Counter, "gauge": prom.Gauge}


class Registry:
    """The metrics of one process, by the names of the catalog."""

    def __init__(self, process: Process, envs: Sequence[str]) -> None:
        """Make every series.

        Args:
            process: whose metrics.
            envs: labels of environments, from `catalog.env_labels`.
        """
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus-client
        self.prometheus = prom.CollectorRegistry()
        self._infos: dict[str, prom.Info] = {}
        self._children: dict[str, dict[tuple[str, ...], Child]] = {}
        for spec in CATALOG:
            if spec.process == process:
                self._declare(spec, envs)

    def _declare(self, spec: Spec, envs: Sequence[str]) -> None:
        about = (spec.base, spec.help)
        if spec.kind == "info":
            self._infos[spec.name] = prom.Info(*about, registry=self.prometheus)
            return
        labels = tuple(spec.labels)
        if spec.kind == "histogram":
            metric: Any = prom.Histogram(
                *about, labels, buckets=spec.buckets, registry=self.prometheus
            )
        else:
            metric = _KINDS[spec.kind](*about, labels, registry=self.prometheus)
        self._children[spec.name] = {
            values: metric.labels(*values) if labels else metric for values in spec.children(envs)
        }

    def info(self, name: str, **labels: str) -> None:
        """Set the labels of an info."""
        self._infos[name].info(labels)

    def counter(self, name: str, *values: str) -> prom.Counter:
        """Return one counter.

        Raises:
            KeyError: the catalog has no such series; so for the other kinds.
        """
        return self._of(prom.Counter, name, values)  # type: ignore[no-any-return]

    def gauge(self, name: str, *values: str) -> prom.Gauge:
        """Return one gauge."""
        return self._of(prom.Gauge, name, values)  # type: ignore[no-any-return]

    def histogram(self, name: str, *values: str) -> prom.Histogram:
        """Return one histogram."""
        return self._of(prom.Histogram, name, values)  # type: ignore[no-any-return]

    def counters(self, name: str) -> dict[str, prom.Counter]:
        """Return the counters of a metric with one label, by its value."""
        return {key: child for (key,), child in self._children[name].items()}

    def gauges(self, name: str) -> dict[str, prom.Gauge]:
        """Return the gauges of a metric with one label, by its value."""
        return {key: child for (key,), child in self._children[name].items()}

    def histograms(self, name: str) -> dict[str, prom.Histogram]:
        """Return the histograms of a metric with one label, by its value."""
        return {key: child for (key,), child in self._children[name].items()}

    def by_labels(self, name: str) -> dict[tuple[str, ...], Child]:
        """Return all children of a metric, by the values of its labels in the catalog's order."""
        return dict(self._children[name])

    def _of(self, kind: type, name: str, values: tuple[str, ...]) -> Child:
        child = self._children[name][values]
        if not isinstance(child, kind):
            raise KeyError(f"{name} is no {kind.__name__.lower()}")
        return child

    def render(self) -> bytes:
        """Return the exposition text."""
        return prom.generate_latest(self.prometheus)
