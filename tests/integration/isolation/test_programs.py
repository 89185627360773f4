"""The sandbox in short: what every program gets, and the commonest ends. The hostile ones are slow
tests (`test_hostile_programs.py`)."""

from __future__ import annotations

import pytest

from worker.isolation import python

from .programs import SMALL, forked, lives, run


@pytest.mark.parametrize("user", ["root", "plain"])
def test_program_runs_in_a_fresh_interpreter_and_is_told_how_it_ended(user: str) -> None:
    result = run("import sys; print(input()[::-1]); sys.exit(3)", user=user, stdin="ab\nc")
    assert (result.exit_code, result.stdout, result.ending()) == (3, b"ba\n", "exit code 3")
    assert not result.ok


def test_case_92_program_that_hangs_is_ended_with_all_that_it_started() -> None:
    source = """
import os, time
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(600)
"""
    result = run(source, timeout_s=0.3)
    assert result.timed_out
    assert not lives(int(result.stdout))


def test_program_that_wants_more_memory_than_it_may_have_is_refused() -> None:
    assert run("x = bytearray(300 << 20)", limits=SMALL).stderr.endswith(b"MemoryError\n")


def test_python_job_returns_what_was_printed_within_what_can_be_sent() -> None:
    source = "import sys; print('é' * 100_000); print('e', file=sys.stderr); sys.exit(2)"
    told = forked("plain", lambda: python.run({"code": source, "timeout_s": 20}))
    assert told["stdout"].startswith("éééé")
    assert told["stdout"].endswith("\n[cut; 200001 bytes in all]")
    assert {**told, "stdout": ""} == {
        "stdout": "",
        "stderr": "e\n",
        "exit_code": 2,
        "timed_out": False,
        "ending": "exit code 2",
    }
