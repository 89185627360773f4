"""The page that says why a run is slow names every cause, and only panels and keys that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from examples.slow_run import FAULTS
from rollstream.cli.top.diagnosis import Cause
from rollstream.config_keys import all_keys

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operate.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def panels() -> set[str]:
    """Return every panel as the page names it: dashboard → title."""
    found = set()
    for path in (ROOT / "ops" / "grafana" / "dashboards").glob("*.json"):
        board = json.loads(path.read_text())
        name = board["title"].removeprefix("Rollstream / ")
        found |= {f"{name} → {panel['title']}" for panel in board["panels"]}
    return found


def test_every_cause_has_one_row_in_the_order_of_the_causes() -> None:
    assert [row[0] for row in ROWS] == [str(cause) for cause in Cause]


def test_every_panel_that_the_page_names_is_in_a_dashboard() -> None:
    named = {row[2] for row in ROWS}
    assert named <= panels(), named - panels()


def test_every_key_that_the_page_names_is_one() -> None:
    tables = "producer|worker|engine|aggregator|weights|reward"
    named = set(re.findall(rf"`((?:{tables})\.\w+)`", PAGE))
    assert len(named) > 8
    known = {".".join(key) for key in all_keys()}
    assert named <= known, named - known


def test_every_prepared_fault_is_in_the_page_with_its_cause() -> None:
    row = re.compile(r"^\| `python -m examples.slow_run (\w+)` \| .+ \| `(\w+)` \|$", re.MULTILINE)
    rows = row.findall(PAGE)
    assert dict(rows) == {name: fault.cause for name, fault in FAULTS.items()}
    assert {fault.cause for fault in FAULTS.values()} <= set(Cause)
