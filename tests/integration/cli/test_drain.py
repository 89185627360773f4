"""`rollstream drain`: what it waits for, what it says, and what undoes it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.devserver import die_with_parent
from rollstream.cli.__main__ import main
from rollstream.queue import calls
from rollstream.queue.reads import RunInfo
from tests.backstage import Backstage, wait_until


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        yield backstage.open()


@pytest.fixture
def where(valkey_url: str, run_name: str) -> list[str]:
    return ["--redis", valkey_url, "--run", run_name]


def info_of(run: Backstage) -> RunInfo:
    info = run.queue.info()
    assert info is not None
    return info


def test_drain_waits_until_what_lives_has_ended_and_takes_no_more(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0, 1)
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(main, ["drain", "--json", *where])
        wait_until(lambda: info_of(run).draining)
        assert run.enqueue(2) == ["full"]
        assert not draining.done()
        leases = run.lease()
        assert len(leases) == 4
        run.complete(leases)
        run.judge()
        assert draining.result(20) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["drained"], shown["left"]["ready"]) == (True, 2)
    assert run.enqueue(2) == ["full"]  # it lasts


def test_drain_of_a_run_at_rest_is_over_at_once_and_may_be_repeated(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0)
    for _ in range(2):
        assert main(["drain", *where]) == 0
        said = capsys.readouterr().out
        assert "; no sample waits or runs; 1 groups wait for" in said


def test_drain_that_runs_out_of_time_says_what_is_left_and_stays_in_force(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0)
    run.lease(1)
    assert main(["drain", "--timeout-s", "0.1", *where]) == 1
    out, err = capsys.readouterr()
    assert ": 1 members queued, 1 running" in out
    assert "not drained" in out
    assert err.startswith("drain: 1 members queued, 1 running")
    assert info_of(run).draining


def test_drain_trained_waits_for_the_ack_too(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0)
    assert main(["drain", "--trained", "--timeout-s", "0.1", *where]) == 1
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(main, ["drain", "--trained", *where])
        run.queue.call(calls.connect("c", 1))
        run.queue.call(calls.ack("c", ["0"]))
        assert draining.result(20) == 0
    assert "0 groups wait for the trainer" in capsys.readouterr().out


def test_resume_undoes_a_drain_and_whoever_waits_for_it_hears_so(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0)
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(main, ["drain", *where])
        wait_until(lambda: info_of(run).draining)
        assert main(["resume", *where]) == 0
        assert draining.result(20) == 1
    assert "somebody ended the drain" in capsys.readouterr().err
    assert run.enqueue(1) == ["new"]


def test_resume_of_a_drained_run_leaves_the_pause_of_an_update_to_the_trainer(
    run: Backstage, where: list[str]
) -> None:
    run.queue.call(calls.pause("keep", 0, "trainer"))
    run.queue.call(calls.drain())
    assert main(["resume", *where]) == 0
    info = info_of(run)
    assert (info.draining, info.state, info.pause_by) == (False, "paused", "trainer")
    assert main(["resume", *where]) == 0  # asked again, it is the pause that is meant
    assert info_of(run).state == "running"


def test_drain_of_a_run_that_an_operator_paused_changes_nothing_and_says_why(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.queue.call(calls.pause("keep"))
    assert main(["drain", *where]) == 1
    assert "paused by an operator" in capsys.readouterr().err
    assert not info_of(run).draining


@pytest.mark.slow
def test_drain_that_is_interrupted_says_that_it_stays_in_force(
    run: Backstage, where: list[str]
) -> None:
    run.enqueue(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollstream.cli", "drain", *where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert process.stderr is not None
    assert "2 members queued" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == f"run {run.queue.run} takes no new prompts until rollstream resume\n"
    assert info_of(run).draining


def test_drain_of_an_aborted_run_is_refused(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0)
    run.queue.call(calls.abort_run("enough"))
    assert main(["drain", *where]) == 1
    assert "aborting" in capsys.readouterr().err
