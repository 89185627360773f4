"""What the dashboards say alike: sums over all workers, per minute, per trajectory, by bucket.

Owns the shape of expressions. Never names a metric. Invariant: a counter is only ever seen through
its rate, over `$__rate_interval`, which Grafana keeps at four scrapes or more; a sum over workers
never adds the NaN of a place without an engine; and what exporters say of the run is never added
up: two of them say the same twice.
"""

from __future__ import annotations

from worker.telemetry.catalog import EXPORTER, WORKER

_OF_THE_RUN = {spec.name: tuple(spec.labels) for spec in EXPORTER}
for _spec in WORKER:
    _OF_THE_RUN.pop(_spec.name, None)
WINDOW = "[$__rate_interval]"
PER_MINUTE = "suffix:/min"
"""What Grafana writes behind a number that is one per minute."""


def rate(counter: str, by: str = "", where: str = "") -> str:
    """Return the sum of a counter's rates: each second, over all workers, or of the run.

    Args:
        counter: its name.
        by: labels that are kept, with commas.
        where: matchers.
    """
    each = f"rate({_selected(counter, where)}{WINDOW})"
    labels = _OF_THE_RUN.get(counter)
    if labels is None:
        return _summed(each, by)
    once = f"max by ({', '.join(labels)}) ({each})" if labels else f"max({each})"
    return _summed(once, by) if labels else once


def per_minute(counter: str, by: str = "", where: str = "") -> str:
    """Return the same each minute."""
    return f"60 * {rate(counter, by, where)}"


def buckets(histogram: str, where: str = "") -> str:
    """Return how many fell into each bucket since the last point, for a heatmap."""
    return f"sum by (le) (increase({_selected(histogram + '_bucket', where)}{WINDOW}))"


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    """Return a quantile over all workers."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q:g}, {rate(histogram + '_bucket', labels, where)})"


def total(gauge: str, by: str = "", where: str = "") -> str:
    """Return the sum of a gauge over all workers."""
    return _summed(_selected(gauge, where), by)


def placed(how: str, gauge: str, where: str = "") -> str:
    """Return a gauge of engines by place; places without an engine, which are NaN, left out."""
    return f"{how} by (engine) ({_selected(gauge, where)} >= 0)"


def _selected(name: str, where: str) -> str:
    return f"{name}{{{where}}}" if where else name


def _summed(expr: str, by: str) -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"
