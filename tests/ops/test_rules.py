"""Rules and alerts: they ask for what exists, go off when they should, and lead to help.

What promtool and amtool say is `slow`: it needs Debian's.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.dashboards.__main__ import BOARDS
from ops.dashboards.panels import names_of
from ops.prometheus.scaling import scaled
from rollstream.cli.__main__ import make_parser
from rollstream.config_help import describe
from tests.ops.debian import tools
from tests.ops.promql import (
    COUNTERS,
    CUMULATIVE,
    OF_THE_RUN,
    ROOT,
    aggregations,
    bare,
    load,
    recorded,
    rules,
    unknown,
    windows,
)
from worker.telemetry.catalog import CATALOG, SECONDS_BUCKETS, SERIES_NAMES

PROMETHEUS = ROOT / "ops" / "prometheus"
RUNBOOK = (ROOT / "ops" / "runbook.md").read_text()
WANTED = {
    "WorkersAbsent", "WorkerDown", "EngineUnreachable", "Stalled", "TrainerStarved",
    "OldestPendingTooOld", "AbortRatioHigh", "FilterDropRatioHigh", "TokenMismatch",
    "StalenessHigh", "EventLoopLag", "LeasesExpiring", "RedisMemoryHigh", "RedisEvicting",
    "AccountingDifference", "MeasurementAbsent",
}  # fmt: skip
AT_ONCE = {"TokenMismatch", "RedisEvicting"}
"""They look at the value of a counter too: of a process whose first scrape is above 0."""
QUANTILE = re.compile(r"(rollstream:\S+:p\d+_\w+)\S* > ([\d.]+)")
AGE = re.compile(r"_age_seconds(?:\{[^}]*\})?\) > (\d+)(  # s)?$", re.MULTILINE)
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, flags=re.MULTILINE | re.DOTALL))


def in_seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    return sum(int(n) * units[unit] for n, unit in re.findall(r"(\d+)([smh])", text))


def test_alerts_are_those_that_were_wanted() -> None:
    assert set(ALERTS) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_alert_says_what_it_means_and_leads_to_its_place_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    severity = rule["labels"]["severity"]
    assert severity in ("critical", "warning")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert len(notes["description"]) > 80
    assert notes["runbook_url"].endswith(f"/ops/runbook.md#{name.lower()}")
    duration = in_seconds(rule.get("for", "0s"))
    when = f"{duration / 60:g} min" if duration else "at once"
    section = SECTIONS[name].strip()
    assert section.startswith(f"*{severity}, {when}.*"), section[:60]
    assert "\n- **Look.** " in section
    assert "\n- **Do.** " in section


def test_runbook_speaks_of_no_alert_that_does_not_exist() -> None:
    assert set(SECTIONS) == WANTED
    anchors = set(re.findall(r"\(#([\w-]+)\)", RUNBOOK))
    assert anchors <= {name.lower() for name in WANTED}


def test_runbook_names_metrics_commands_keys_panels_and_pages_that_exist() -> None:
    spoken = set(re.findall(r"\b(rollout_\w+)", RUNBOOK))
    assert spoken <= SERIES_NAMES
    (commands,) = (
        action.choices
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert set(re.findall(r"`?rollstream (\w+)", RUNBOOK)) <= set(commands)
    keys = {table: {doc.key[1] for doc in docs} for table, (_, docs) in describe().items()}
    for table, key in re.findall(r"`(?:rollstream set )?([a-z]+)\.([a-z_]+)", RUNBOOK):
        assert key in keys[table], f"{table}.{key}"
    panels = {p.title for b in BOARDS for row in b.rows.values() for p in row}
    places = panels | {row for b in BOARDS for row in b.rows} | {b.title for b in BOARDS}
    italic = {" ".join(t.split()) for t in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", RUNBOOK)}
    assert {text for text in italic if not text.endswith(".")} <= places
    for page in re.findall(r"\]\((\.\./[^)#]+)", RUNBOOK):
        assert (ROOT / "ops" / page).is_file(), page


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_rules_ask_for_nothing_that_nobody_exports(file: str) -> None:
    bad = {r.get("alert", r.get("record")): unknown(r["expr"]) for r in rules(file)}
    assert {name: what for name, what in bad.items() if what} == {}


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_rules_see_counters_by_their_rate_only(file: str) -> None:
    for rule in rules(file):
        found = bare(rule["expr"], CUMULATIVE, "rate|increase")
        if rule.get("alert") in AT_ONCE:
            assert set(found) <= COUNTERS
        else:
            assert found == [], rule


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_rules_add_up_nothing_that_each_exporter_says_of_the_same_run(file: str) -> None:
    for rule in rules(file):
        for name in set(names_of(rule["expr"])) & OF_THE_RUN:
            assert set(aggregations(rule["expr"], name)) <= {"max", ""}, rule


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_windows_hold_four_scrapes_also_where_there_are_two_a_minute(file: str) -> None:
    for rule in rules(file):
        assert all(in_seconds(window) >= 120 for window in windows(rule["expr"])), rule


def test_threshold_on_a_quantile_is_a_bucket_edge_below_the_last() -> None:
    """Between two edges a quantile is a guess, and above the last it never is."""
    held = set()
    for name, rule in ALERTS.items():
        for source, threshold in QUANTILE.findall(rule["expr"]):
            (histogram,) = names_of(recorded()[source])
            (spec,) = (s for s in CATALOG if histogram == f"{s.name}_bucket")
            assert float(threshold) in spec.buckets[:-1], (name, threshold, spec.buckets)
            held.add(name)
    assert held == {"StalenessHigh", "EventLoopLag"}


def test_ages_are_bucket_edges_and_are_marked_for_scaling() -> None:
    for name, rule in ALERTS.items():
        ages = AGE.findall(rule["expr"])
        assert len(ages) == rule["expr"].count("_age_seconds"), name
        assert all(int(age) in SECONDS_BUCKETS and mark for age, mark in ages), name


def test_everything_recorded_is_looked_at() -> None:
    asked = [q.expr for b in BOARDS for row in b.rows.values() for p in row for q in p.queries]
    asked += [rule["expr"] for rule in rules("alerts.yml")] + list(recorded().values())
    looked_at = {name for expr in asked for name in names_of(expr)}
    assert set(recorded()) <= looked_at


def test_every_alert_is_tested_to_go_off_and_not_to() -> None:
    goes_off, is_silent = set(), set()
    for file in (PROMETHEUS / "tests").glob("*.yml"):
        loaded = yaml.safe_load(file.read_text())
        assert {Path(name).name for name in loaded["rule_files"]} == {"recording.yml", "alerts.yml"}
        for test in loaded["tests"]:
            for case in test.get("promql_expr_test", ()):
                for alert in re.findall(r'alertname="(\w+)"', case["expr"]):
                    (goes_off if case["exp_samples"] else is_silent).add(alert)
            goes_off |= {c["alertname"] for c in test.get("alert_rule_test", ()) if c["exp_alerts"]}
    assert goes_off == WANTED
    assert is_silent == WANTED


# --- durations -----------------------------------------------------------------------------------
def rule_file(**rule: Any) -> dict[str, Any]:
    return {"groups": [{"name": "g", "interval": "1m", "rules": [rule]}]}


def the_rule(made: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = made["groups"][0]["rules"][0]
    return rule


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_scaled_by_one_gives_the_rules_back_and_never_touches_those_it_got(file: str) -> None:
    given = load(file)
    held = copy.deepcopy(given)
    assert scaled(given, 1) == given
    assert scaled(given, 0.1) != given
    assert given == held


def test_scaled_shortens_every_duration_and_nothing_else() -> None:
    expr = (
        'rate(a{le="0.5", x="[5m]"}[10m]) > 0.25 and b > 1800  # s\n'
        "  or max_over_time(c[1h30m:1m]) > 3 and d offset 5m > 7 unless e[30m:]\n"
    )
    given = rule_file(alert="A", expr=expr, **{"for": "10m", "keep_firing_for": "1m"})
    made = scaled(given, 0.01)
    assert made["groups"][0]["interval"] == "600ms"
    assert the_rule(made) == {
        "alert": "A",
        "expr": (
            'rate(a{le="0.5", x="[5m]"}[6000ms]) > 0.25 and b > 18  # s\n'
            "  or max_over_time(c[54000ms:600ms]) > 3 and d offset 3000ms > 7 unless e[18000ms:]\n"
        ),
        "for": "6000ms",
        "keep_firing_for": "600ms",
    }


def test_scaled_keeps_windows_long_enough_for_four_scrapes() -> None:
    given = rule_file(alert="A", expr="increase(a[2m]) > 0 or b offset 2m", **{"for": "0s"})
    made = the_rule(scaled(given, 0.01, shortest_s=4))
    assert made["expr"] == "increase(a[4000ms]) > 0 or b offset 4000ms"
    assert made["for"] == "0s"


def test_scaled_refuses_what_is_no_factor_and_no_duration() -> None:
    with pytest.raises(ValueError, match="above 0"):
        scaled(rule_file(alert="A", expr="a"), 0)
    with pytest.raises(ValueError, match="'10 minutes' is no duration"):
        scaled(rule_file(alert="A", expr="a", **{"for": "10 minutes"}), 0.5)


# --- what the programs say -----------------------------------------------------------------------
def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_promtool_accepts_the_configuration_and_the_rules_without_a_warning() -> None:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    run(tools().promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    run(tools().promtool, "check", "rules", "--lint=all", "--lint-fatal", *files)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_promtool_accepts_the_rules_with_shorter_durations(tmp_path: Path) -> None:
    for name in ("recording.yml", "alerts.yml"):
        made = scaled(load(name), 1 / 100, shortest_s=4)
        (tmp_path / name).write_text(yaml.safe_dump(made))
    files = sorted(tmp_path.glob("*.yml"))
    run(tools().promtool, "check", "rules", "--lint=all", "--lint-fatal", *files)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_alert_goes_off_and_does_not_as_its_tests_say() -> None:
    run(tools().promtool, "test", "rules", *sorted((PROMETHEUS / "tests").glob("*.yml")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_amtool_accepts_the_configuration_and_every_severity_reaches_somebody() -> None:
    file = ROOT / "ops" / "alertmanager" / "alertmanager.yml"
    run(tools().amtool, "check-config", file)
    for severity in {rule["labels"]["severity"] for rule in ALERTS.values()}:
        command = ("config", "routes", "test", f"--config.file={file}", f"severity={severity}")
        assert run(tools().amtool, *command).strip() == "people"
