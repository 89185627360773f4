"""Panels and dashboards as Grafana reads them (schema version 39), from few words.

Owns every word of Grafana's JSON and the grid. Never knows a metric. Invariant: every panel has a
unit, a description that ends with the names it asks for, and "no traffic" where there is no number;
no two lie on each other, and no dashboard can be edited in the browser, where it would be lost.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["timeseries", "stat", "heatmap"]

SCHEMA_VERSION = 39
NO_DATA = "no traffic"
COLUMNS = 24
_ASIDE = re.compile(
    r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)'
    r"|\b\d[\w.]*|#.*"
)
"""What of an expression names no metric: label values, matchers, windows, lists of labels,
numbers, comments."""
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\(|[a-zA-Z0-9_:])")
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GRAY, _RED = "text", "red"


def names_of(expr: str) -> list[str]:
    """Return the metrics and recorded series that an expression asks for, each once."""
    without_text = re.sub(r'"[^"]*"', '""', expr)
    found = _NAME.findall(_ASIDE.sub(" ", without_text))
    return [name for name in dict.fromkeys(found) if name not in _WORDS]


@dataclass(frozen=True, slots=True)
class Query:
    """One question of a panel."""

    expr: str
    legend: str
    """Text, with `{{label}}` where there are several series."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    unit: str
    """Of Grafana's; `suffix:` and `si:` begin one of ours."""
    text: str
    """What it answers, and what is to be seen when all is well."""
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    is_stacked: bool = False
    is_share: bool = False
    """0 is the bottom and 1 is the top."""
    is_signed: bool = False
    """May be below 0."""
    alarm: float | None = None
    """Red from here: the threshold of an alert."""
    text_mode: str = "auto"
    """Of a stat: "name" says which series there is, in place of its value."""


@dataclass(frozen=True, slots=True)
class Variable:
    """What can be chosen at the top: the values of a label, by default all."""

    name: str
    label: str
    values: str
    """`label_values(series, label)`."""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    rows: Mapping[str, Sequence[Panel]]
    variables: Sequence[Variable] = field(default_factory=tuple)


def dashboard(board: Board) -> Json:
    """Return the JSON of a dashboard."""
    return {
        "uid": board.uid,
        "title": f"Rollstream / {board.title}",
        "description": board.text,
        "tags": ["rollstream"],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_link()],
        "templating": {"list": [_datasource(), *map(_variable, board.variables)]},
        "panels": _laid_out(board.rows),
    }


def _link() -> Json:
    return {
        "title": "Rollstream", "type": "dashboards", "tags": ["rollstream"], "asDropdown": True,
        "icon": "external link", "includeVars": False, "keepTime": True, "targetBlank": False,
        "tooltip": "", "url": "",
    }  # fmt: skip


def _datasource() -> Json:
    return {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus",
        "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1, "regex": "",
        "skipUrlSync": False,
    }  # fmt: skip


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name, "label": variable.label, "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": variable.values, "refId": "values"},
        "hide": 0, "includeAll": True, "allValue": ".*", "multi": True, "options": [],
        "refresh": 2, "regex": "", "sort": 1, "skipUrlSync": False,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _laid_out(rows: Mapping[str, Sequence[Panel]]) -> list[Json]:
    """Return the panels from left to right and line by line, each row under its heading."""
    made: list[Json] = []
    y = 0
    for title, panels in rows.items():
        made.append(_row(title, len(made) + 1, y))
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            made.append(_panel(panel, len(made) + 1, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return made


def _row(title: str, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {
        "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
        "gridPos": place,
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: Json) -> Json:
    names = list(dict.fromkeys(n for query in panel.queries for n in names_of(query.expr)))
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.text}\n\nMetrics: {', '.join(names)}",
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind](panel),
        "targets": [
            _target(query, letter, panel.kind)
            for query, letter in zip(panel.queries, string.ascii_uppercase, strict=False)
        ],
    }


def _target(query: Query, letter: str, kind: Kind) -> Json:
    return {
        "datasource": _DATASOURCE,
        "refId": letter,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": "heatmap" if kind == "heatmap" else "time_series",
        "editorMode": "code",
        "range": True,
        "instant": False,
    }


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": _GRAY, "value": None}]
    if panel.alarm is not None:
        steps.append({"color": _RED, "value": panel.alarm})
    made: Json = {
        "unit": panel.unit,
        "noValue": NO_DATA,
        # A share of nothing is NaN; it is said in the same words as no series at all.
        "mappings": [{"type": "special", "options": {"match": "nan", "result": {"text": NO_DATA}}}],
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": _CUSTOM[panel.kind](panel),
    }
    if panel.is_share:
        made |= {"min": 0, "max": 1}
    elif panel.kind == "timeseries" and not panel.is_signed:
        made["min"] = 0
    return made


def _custom_of_lines(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 0,
        "gradientMode": "none",
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.alarm is None else "line"},
        "axisPlacement": "auto",
        "scaleDistribution": {"type": "linear"},
    }


def _options_of_lines(panel: Panel) -> Json:
    return {
        "legend": {
            "displayMode": "table", "placement": "bottom", "showLegend": True,
            "calcs": ["lastNotNull", "max"], "sortBy": "Last *", "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": panel.is_stacked},
    }  # fmt: skip


def _options_of_stats(panel: Panel) -> Json:
    return {
        "colorMode": "value",
        "graphMode": "none" if panel.text_mode == "name" else "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": panel.text_mode,
        "wideLayout": True,
    }


def _options_of_heatmaps(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "color": {
            "mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "fill": "blue",
            "reverse": False, "scale": "exponential",
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit, "reverse": False},
    }  # fmt: skip


_OPTIONS: Mapping[Kind, Callable[[Panel], Json]] = {
    "timeseries": _options_of_lines,
    "stat": _options_of_stats,
    "heatmap": _options_of_heatmaps,
}
_CUSTOM: Mapping[Kind, Callable[[Panel], Json]] = {
    "timeseries": _custom_of_lines,
    "stat": lambda _: {},
    "heatmap": lambda _: {"scaleDistribution": {"type": "linear"}},
}
