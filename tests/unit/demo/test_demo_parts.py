"""Parts of the demo whose mistakes would make it succeed for no reason."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.demo.cast import to_toml
from examples.demo.children import Child, ChildFailed
from examples.demo.killer import Killer
from examples.demo.options import parse
from examples.demo.run import lost_groups
from examples.demo.summary import Summary, problems
from examples.demo.tally import Tally, percentile
from examples.devserver import free_port
from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.wire import encode_prompt
from tests.builders import a_group, a_prompt, a_sample, budgets

CLEAN = Summary(
    groups_acked=160,
    groups_dropped={"zero_std": 40},
    samples=1280,
    turns=2000,
    tokens=90000,
    samples_per_s=100.0,
    spans={},
    retries={"attempts": 0, "crashes": 0},
    fenced=0,
    lost=0,
    twice=0,
    token_mismatches=0,
    accounting_difference=0,
    seconds=20.0,
    audit="recomputed",
)


def test_summary_is_a_success_only_without_any_problem() -> None:
    assert problems(CLEAN, batches=20, wanted=20, broken=[]) == []


@pytest.mark.parametrize("key", ["lost", "twice", "token_mismatches", "accounting_difference"])
def test_summary_names_each_figure_that_must_be_zero(key: str) -> None:
    changed: dict[str, Any] = {key: 1}
    summary = dataclasses.replace(CLEAN, **changed)
    (found,) = problems(summary, batches=20, wanted=20, broken=[])
    assert found.startswith(f"{key} = 1")


def test_summary_is_no_success_where_batches_are_missing_or_something_broke() -> None:
    assert problems(CLEAN, batches=19, wanted=20, broken=[]) != []
    assert problems(CLEAN, batches=20, wanted=20, broken=["worker-1 ended"]) == ["worker-1 ended"]


def test_tally_sees_a_group_that_was_handed_to_training_again() -> None:
    tally = Tally()
    tally.add([a_group(1), a_group(2)])
    assert tally.twice == []
    tally.add([a_group(2)])
    assert tally.twice == [2]
    assert tally.trained == [1, 2, 2]


def test_tally_counts_a_call_that_leaves_share_once() -> None:
    turns = [((4, 5, 6), (7,)), ((8, 9), ())]
    leaves = [a_sample(3, 0, turns=turns), a_sample(3, 0, turns=turns[:1])]
    tally = Tally()
    tally.add([a_group(3, [leaves, a_sample(3, 1, turns=turns[:1])])])
    assert (tally.samples, tally.lists, tally.turns, tally.tokens) == (2, 1, 3, 3 + 2 + 3)


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([], 0.5, 0.0), ([2.0], 0.95, 2.0), ([3.0, 1.0, 2.0], 0.5, 2.0), (range(1, 101), 0.95, 95)],
)
def test_percentile_is_a_value_that_occurred(
    values: list[float], share: float, wanted: float
) -> None:
    assert percentile(values, share) == wanted


@pytest.fixture
def queue(valkey_url: str, run_name: str) -> BlockingQueue:
    opened = BlockingQueue.connect(valkey_url, run_name)
    opened.call(calls.open_run(1, "fingerprint", budgets()))
    for gid in range(3):
        opened.call(calls.enqueue(gid, 2, encode_prompt(a_prompt(gid))))
    return opened


def test_lost_groups_are_those_that_nobody_accounts_for(queue: BlockingQueue) -> None:
    assert lost_groups(queue, 3, []) == set()
    queue.call(calls.withdraw("1"))
    assert lost_groups(queue, 3, []) == set()
    assert lost_groups(queue, 5, []) == {3, 4}
    assert lost_groups(queue, 5, [4]) == {3}
    assert queue.counters()[f"dropped:{DropReason.WITHDRAWN}"] == 1
    queue.close()


@pytest.fixture
def sleeper(tmp_path: Path) -> Callable[[str], Child]:
    def start(name: str) -> Child:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = Child(name, command, folder=tmp_path, environment={}, cwd=tmp_path)
        child.start()
        return child

    return start


def test_killer_kills_a_ready_worker_and_starts_it_again(sleeper: Callable[[str], Child]) -> None:
    workers = [sleeper("a"), sleeper("b")]
    before = [worker.process for worker in workers]
    killer = Killer(workers, every_s=0.0)
    name = killer.tick()
    assert [w.name for w, old in zip(workers, before, strict=True) if w.process is not old] == [
        name
    ]
    assert all(worker.running for worker in workers)
    assert killer.kills == 1
    for worker in workers:
        worker.kill()


def test_killer_never_kills_the_last_ready_worker(sleeper: Callable[[str], Child]) -> None:
    only, dead = sleeper("only"), sleeper("dead")
    dead.kill()
    killer = Killer([only, dead], every_s=0.0)
    assert [killer.tick() for _ in range(5)] == [None] * 5
    assert only.running
    assert killer.kills == 0
    only.kill()


def test_child_that_breaks_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = "import sys; print('first'); sys.exit('no such tokenizer')"
    command = [sys.executable, "-c", program]
    child = Child(
        "sim",
        command,
        folder=tmp_path,
        environment={},
        cwd=tmp_path,
        ready_url=f"http://127.0.0.1:{free_port()}",
    )
    child.start()
    with pytest.raises(ChildFailed, match=r"(?s)sim ended with exit code 1.*no such tokenizer"):
        child.wait_ready(10)


def test_child_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from examples.demo.children import Child\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "child = Child('c', [sys.executable, '-c', 'import time; time.sleep(60)'],"
        " folder=here, environment={}, cwd=here)\n"
        "child.start(); print(child.process.pid)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    stat = Path("/proc") / done.stdout.strip() / "stat"
    limit = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit, "it outlived its parent"
        time.sleep(0.02)


def test_configuration_file_of_the_demo_says_what_was_asked() -> None:
    asked = {"run": {"name": 'a "b"', "seed": 3}, "worker": {"tools": ["x", "y"], "lease_s": 2.0}}
    assert tomllib.loads(to_toml(asked | {"debug": {}})) == asked


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batches", "0"],
        ["--kill-every", "0.1"],
        ["--engine", "sglang"],
        ["--url", "http://127.0.0.1:1"],
        ["--seed", "-1"],
    ],
)
def test_options_refuse_what_makes_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_options_ask_for_enough_groups_that_filters_may_drop_some() -> None:
    for batches in (1, 3, 20):
        asked = parse(["--batches", str(batches)]).num_groups
        assert asked * 0.7 >= batches * 8
