"""docs/guarantees.md names tests that exist, every public report, and commands that can be run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
FILES = dict(re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|$", TEXT, re.MULTILINE))
REPORTS = {
    1: "rq/rq#2236", 2: "rq/rq#2061", 3: "rq/rq#2015", 4: "rq/rq#1461", 5: "rq/rq#1164",
    6: "rq/rq#1450", 7: "rq/rq#1143, #519", 8: "rq/rq#597", 10: "rq/rq#1968",
    11: "NeptuneHub/AudioMuse-AI#784", 13: "rq/rq#1436, #1093", 14: "rq/rq#1615",
    15: "rq/rq#1955", 16: "rq/rq#2389", 17: "python-arq/arq#343, #407, #306",
    19: "python-arq/arq#196", 21: "taskiq-python/taskiq-redis#130",
    22: "taskiq-python/taskiq-redis#129", 23: "tastyware/streaq#92",
    24: "celery/celery#5935, #3430", 26: "celery/celery#3802", 27: "celery/celery#1628",
    28: "celery/celery#2219, #9674, #1700", 30: "Bogdanp/dramatiq#258", 31: "Bogdanp/dramatiq#431",
    32: "redis/redis-py#2624, #2665", 34: "redis/redis#9745, #8635",
    36: "microsoft/agent-lightning#480", 37: "radixark/miles#2800", 38: "huggingface/trl#7176",
}  # fmt: skip
MAX_LINES = 220


def named_in(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(\w+)::(\w+)`", text)


def section(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_guarantees_page_names_tests_that_exist() -> None:
    named = named_in(TEXT)
    sources = {key: (ROOT / "tests" / path).read_text() for key, path in FILES.items()}
    assert [(key, name) for key, name in named if key not in sources] == []
    assert [
        f"{FILES[key]}::{name}" for key, name in named if f"def {name}(" not in sources[key]
    ] == []
    assert set(FILES) == {key for key, _ in named}


def test_guarantees_page_proves_every_promise() -> None:
    rows = [row for row in section("Promised").splitlines() if row.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| you may rely on ")]
    assert len(promises) > 20
    assert [row for row in promises if not named_in(row)] == []


def test_guarantees_page_has_a_test_for_every_public_report() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|([^|]*)\|$", section("Public reports"),
                      re.MULTILINE)  # fmt: skip
    assert {int(number): report for number, report, _, _ in rows} == REPORTS
    assert [number for number, _, _, tests in rows if not named_in(tests)] == []


def test_guarantees_page_names_commands_that_are_there() -> None:
    modules = re.findall(r"python -m ([\w.]+)", section("Reproduce it"))
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_guarantees_page_says_what_is_not_promised_and_stays_short() -> None:
    assert len(re.findall(r"^- \*\*", section("Not promised"), re.MULTILINE)) >= 10
    assert len(TEXT.splitlines()) <= MAX_LINES
