"""The checkpoint is the authority: a short run of `python -m tests.e2e.resume`, and its judges."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from examples.devserver import die_with_parent
from rollstream.frontier import TerminalIds
from tests.e2e.resume.checkpoints import Checkpoint, judge, judge_midway, read
from tests.e2e.resume.journal import Journal, account
from tests.e2e.resume.line import Choice, Line
from tests.e2e.resume.trainer import FRESH

ROOT = Path(__file__).resolve().parents[2]


def a_checkpoint(history: list[int], done: set[int] | None = None) -> Checkpoint:
    terminal = TerminalIds()
    terminal.add(set(history) if done is None else done)
    return Checkpoint(1, 0, terminal.to_plain(), history)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_every_prompt_is_trained_once_in_the_surviving_history_whatever_is_killed(
    vocabulary: Path, seed: int
) -> None:
    assert vocabulary.exists()
    command = [sys.executable, "-m", "tests.e2e.resume", "--json"]
    done = subprocess.run(
        [*command, "--seconds", "10", "--prompts", "80", "--seed", str(seed)],
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=140,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["prompts"], found["trained_once"], found["dropped"]) == (80, 80, 0)
    assert (found["skipped"], found["twice"], found["audit_problems"]) == (0, 0, 0)
    # A run that killed nothing proves nothing.
    assert found["restarts"] > 0
    assert found["empty_redis_restarts"] > 0
    assert sum(found["kills"].values()) > 0
    assert found["checkpoints"] > 0


def test_last_checkpoint_is_judged_by_what_its_model_has_learned() -> None:
    assert judge(a_checkpoint([2, 0, 1]), 3).trained_once == 3
    wrong = judge(a_checkpoint([2, 0, 2, 7]), 4)
    assert (wrong.trained_once, wrong.skipped, wrong.twice) == (
        1,
        frozenset({1, 3}),
        frozenset({2, 7}),
    )


def test_any_checkpoint_is_judged_by_what_its_state_counts_as_done() -> None:
    fine = judge_midway(a_checkpoint([0, 1, 12]))
    assert (fine.trained_once, fine.skipped, fine.twice) == (3, frozenset(), frozenset())
    wrong = judge_midway(a_checkpoint([0, 1, 1, 5], done={0, 1, 12}))
    assert (wrong.skipped, wrong.twice) == (frozenset({12}), frozenset({1, 5}))


def test_checkpoint_that_was_not_put_in_its_place_is_none(tmp_path: Path) -> None:
    saved, torn = a_checkpoint([0]), Checkpoint(1, 1, {}, [0, 1])
    saved.write(tmp_path)
    torn.partial(tmp_path)
    line = Line(tmp_path, random.Random(0))
    line.add_saves_of(1)
    assert line.newest == "0001-0000.json"
    assert read(tmp_path / line.newest) == saved


def test_line_abandons_what_is_newer_than_its_start_and_what_a_zombie_writes(
    tmp_path: Path,
) -> None:
    for place in range(5):
        Checkpoint(1, place, {}, []).write(tmp_path)
    line = Line(tmp_path, random.Random(0))
    line.add_saves_of(1)
    start = line.go_to(Choice.OLDER)
    assert start in ("0001-0001.json", "0001-0002.json", "0001-0003.json")
    Checkpoint(1, 9, {}, []).write(tmp_path)
    line.add_saves_of(2)
    assert line.newest == start == line.go_to(Choice.NEWEST)
    assert line.go_to(Choice.FRESH) == FRESH == line.newest


def test_account_counts_an_ack_that_was_sent_behind_a_later_connect(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    old, new = Journal(path, 1), Journal(path, 2)
    old.note("connected")
    old.note("acked", sent_mono_s=0.0, groups=[0, 1])
    new.note("connected")
    old.note("acked", sent_mono_s=float("inf"), groups=[2])
    old.note("ended", how="ConsumerTaken")
    new.note("ended", how="RunLost")
    with path.open("a") as torn:
        torn.write('{"torn')
    found = account(path)
    assert (found.trained, found.zombie_acks, found.taken) == (3, 1, 1)
    assert found.errors == {"RunLost": 1}
