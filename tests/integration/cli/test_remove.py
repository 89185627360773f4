"""`rollstream runs --remove`, against a real server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from rollstream.cli.__main__ import main
from rollstream.queue import calls
from tests.backstage import Backstage


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open().finish(0, 1)
        backstage.enqueue(2)
        yield backstage


def remove(
    capsys: pytest.CaptureFixture[str], url: str, name: str, *argv: str
) -> tuple[int, str, str]:
    code = main(["runs", "--redis", url, "--remove", name, *argv])
    out, err = capsys.readouterr()
    return code, out, err


def everyone_left(run: Backstage) -> None:
    for role, name in (("producer", "p"), ("worker", run.worker)):
        run.queue.call(calls.present(role, name, leaving=True))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_remove_deletes_every_key_of_the_run_and_none_of_another(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    everyone_left(run)
    with Backstage(valkey_url, f"{run.queue.run}-b") as other:
        other.open().enqueue(0)
        there, count = other.keys(), len(run.keys())
        code, out, err = remove(capsys, valkey_url, run.queue.run, "--yes", "--json")
        assert other.keys().keys() == there.keys()
    assert code == 0
    assert json.loads(out) == {
        "run": run.queue.run, "state": "running", "live": 3, "alive": {}, "removed": count,
    }  # fmt: skip
    assert err == f"run {run.queue.run}: running, 3 groups live\n"
    assert run.keys() == {}
    assert run.queue.info() is None


def test_remove_refuses_a_run_in_use_by_name_and_obeys_force(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.keys()
    code, out, err = remove(capsys, valkey_url, run.queue.run, "--yes")
    assert (code, out) == (1, "")
    assert f"run '{run.queue.run}' is in use: producer p; worker {run.worker}" in err
    assert run.keys().keys() == before.keys()
    code, out, _ = remove(capsys, valkey_url, run.queue.run, "--yes", "--force")
    assert (code, out) == (0, f"removed run {run.queue.run}: {len(before)} keys\n")
    assert run.keys() == {}


def test_remove_forgets_processes_that_were_all_killed_though_nobody_sweeps(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    info = run.queue.info()
    assert info is not None
    last = int(run.queue.client.hget(f"{run.queue.prefix}m", "clock_tick") or 0)
    long_ago = last - int(5 * 1000 * info.lease_s)
    run.queue.client.hset(f"{run.queue.prefix}m", "clock_tick", long_ago)
    assert remove(capsys, valkey_url, run.queue.run, "--yes")[0] == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 2), ("\n", 2), ("", 2)])
def test_remove_asks_at_a_terminal(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
) -> None:
    everyone_left(run)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    got, _, err = remove(capsys, valkey_url, run.queue.run)
    assert got == code
    assert f"Remove every key of run {run.queue.run}? [y/N]" in err
    assert bool(run.keys()) == bool(code)


def test_remove_without_a_terminal_wants_yes(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone_left(run)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = remove(capsys, valkey_url, run.queue.run)
    assert code == 2
    assert "nothing was removed: say y, or give --yes" in err
    assert run.keys()


@pytest.mark.parametrize("damage", ["the run's hash is gone", "another kind"])
def test_remove_takes_what_is_left_of_a_damaged_run(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    run.queue.client.delete(f"{run.queue.prefix}m")
    if damage == "another kind":
        run.queue.client.set(f"{run.queue.prefix}m", "x")
    assert remove(capsys, valkey_url, run.queue.run, "--yes")[0] == 0
    assert run.keys() == {}


def test_remove_names_the_runs_that_exist_where_there_is_no_such_run(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = remove(capsys, valkey_url, "nobody", "--yes")
    assert (code, out) == (3, "")
    assert "no run 'nobody'" in err
    assert run.queue.run in err


@pytest.mark.parametrize("name", ["", "*", "a{b", "a b"])
def test_remove_refuses_a_name_that_no_run_has(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert remove(capsys, valkey_url, name, "--yes", "--force")[0] == 2
    assert run.keys()


def test_yes_and_force_without_remove_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", "--yes"])
    assert end.value.code == 2
    assert "belong to runs --remove" in capsys.readouterr().err
