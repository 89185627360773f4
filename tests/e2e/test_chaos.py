"""The chaos run as people run it: its JSON line, its exit code, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.devserver import die_with_parent

ROOT = Path(__file__).parents[2]
KEYS = [
    "enqueued",
    "acked",
    "dropped",
    "lost",
    "twice",
    "token_mismatches",
    "accounting_difference",
    "fenced",
    "replays",
    "kills",
    "longest_stall_s",
    "drain_s",
]
ZERO = ("lost", "twice", "token_mismatches", "accounting_difference")


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.chaos", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chaos_loses_nothing_and_trains_nothing_twice(
    vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = chaos("--seconds", "18", "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert list(found)[: len(KEYS)] == KEYS
    assert {name: found[name] for name in ZERO} == dict.fromkeys(ZERO, 0)
    # It did happen: groups were trained under it, and everybody was killed.
    assert found["trained"] > 10
    assert found["calls_audited"] > found["trained"]
    assert {"worker", "trainer", "aggregator", "redis"} <= set(found["kills"])
    assert found["rewinds"] > 0
    assert found["drain_s"] > 0
    assert found["findings"] == [], found["findings"]
    assert list(tmp_path.iterdir()) == []


def test_chaos_refuses_wrong_options_before_it_starts_anything() -> None:
    assert chaos("--seconds", "0").returncode == 2
    assert chaos("--seed", "-1").returncode == 2
