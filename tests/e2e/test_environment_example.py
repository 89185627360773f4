"""`python -m examples.environment` as people run it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.integration.worker.processes import ENVIRONMENT, ROOT


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_prints_a_reward_for_every_turn() -> None:
    command = [sys.executable, "-m", "examples.environment", "--groups", "1", "--n", "2"]
    ran = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=140
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 of 2 samples" in ran.stdout
    totals = [float(found) for found in re.findall(r"\(stop\), reward ([\d.]+)", ran.stdout)]
    turns = [float(found) for found in re.findall(r"turn \d: reward ([\d.]+)", ran.stdout)]
    assert len(turns) == 2 * 3
    assert totals == [sum(turns[:3]), sum(turns[3:])]
