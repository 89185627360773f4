"""The examples of tools and of code with tests do what they say, as a person runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.devserver import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def ran(example: str) -> str:
    """Run an example; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}"],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counts_in(line: str) -> dict[str, int]:
    """Return what a line counts: `calls: calculator 8, python 2`."""
    counted = (part.rsplit(" ", 1) for part in line.partition(": ")[2].split(", "))
    return {name: int(count) for name, count in counted}


def test_tool_use_calls_a_built_in_tool_an_isolated_one_and_a_function(vocabulary: Path) -> None:
    said = ran("tool_use")
    assert "24 of 24 samples" in said
    calls = counts_in(said.splitlines()[-1])
    assert set(calls) == {"calculator", "python", "as_fraction"}
    assert min(calls.values()) > 0


def test_code_tests_judges_right_programs_and_hostile_ones(vocabulary: Path) -> None:
    said = ran("code_tests")
    programs = counts_in(said.splitlines()[-1])
    assert set(programs) == {"right", "wrong"}
    assert sum(programs.values()) == 24
    assert "exit code 1: NotImplementedError" in said
