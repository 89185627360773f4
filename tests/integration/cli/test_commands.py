"""The command line as people and scripts call it, against a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.cli.__main__ import main
from rollstream.queue import calls
from tests.backstage import Backstage


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open().finish(0, 1, 2, drop={1})
        backstage.queue.call(calls.connect("c", 1))
        backstage.queue.call(calls.ack("c", ["0"]))
        yield backstage


def outcome(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_audit_prints_the_identity_and_exits_0(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("audit", "--deep", "--redis", valkey_url, "--run", run.queue.run)
    code, out, err = outcome(capsys, *argv)
    assert (code, err) == (0, "")
    assert "enqueued 3 = acked 1 + dropped 1 + live 1" in out
    code, out, _ = outcome(capsys, *argv, "--json")
    assert code == 0
    assert json.loads(out) == {
        "run": run.queue.run, "deep": True, "ok": True, "enqueued": 3, "acked": 1, "dropped": 1,
        "live": 1, "problems": [], "by_env": {},
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_audit_exits_1_and_names_what_does_not_hold(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    run.queue.client.hincrby(f"{run.queue.prefix}c", "acked", 5)
    argv = ["audit", "--redis", valkey_url, "--run", run.queue.run]
    code, out, _ = outcome(capsys, *argv, *(["--json"] if as_json else []))
    assert code == 1
    if as_json:
        answer = json.loads(out)
        assert answer["ok"] is False
        assert len(answer["problems"]) == 1
    else:
        assert "enqueued 3 ≠ acked 6" in out
        assert "problem: the counts do not add up" in out


def test_stats_shows_where_the_groups_are_for_people_and_for_scripts(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("stats", "--redis", valkey_url, "--run", run.queue.run)
    code, out, _ = outcome(capsys, *argv)
    assert code == 0
    rows = [line.rsplit(maxsplit=1) for line in out.splitlines()]
    assert ["  dropped, zero_std", "1"] in rows
    assert ["  workers alive", "1"] in rows
    code, out, _ = outcome(capsys, *argv, "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["counters"]["acked"] == 1
    assert shown["depths"]["ready"] == 1
    assert shown["info"]["state"] == "running"


def test_runs_lists_the_runs_of_a_server(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = outcome(capsys, "runs", "--redis", valkey_url)
    assert code == 0
    assert f"{run.queue.run}: running, 1 groups live, version 0" in out
    code, out, _ = outcome(capsys, "runs", "--redis", valkey_url, "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert [row["live"] for row in rows if row["run"] == run.queue.run] == [1]


def test_commands_take_url_and_run_from_the_environment(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLSTREAM_REDIS__URL", valkey_url)
    monkeypatch.setenv("ROLLSTREAM_RUN__NAME", run.queue.run)
    assert outcome(capsys, "audit")[0] == 0


def test_commands_name_the_runs_that_exist_where_theirs_does_not(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outcome(capsys, "stats", "--redis", valkey_url, "--run", "nobody")
    assert (code, out) == (3, "")
    assert "no run 'nobody'" in err
    assert run.queue.run in err


def test_commands_ask_for_a_name_where_there_are_several_runs(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(valkey_url, f"{run.queue.run}-b") as other:
        other.open()
        code, _, err = outcome(capsys, "stats", "--redis", valkey_url)
    assert code == 2
    assert "name one with --run" in err


def test_commands_say_in_one_line_that_redis_cannot_be_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "redis://me:hunter2@127.0.0.1:1"
    code, out, err = outcome(capsys, "runs", "--redis", url, "--timeout-s", "1")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "redis://me:***@127.0.0.1:1 cannot be reached" in err
    assert "hunter2" not in err


def test_commands_do_not_wait_for_a_server_that_never_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}"
        code, _, err = outcome(capsys, "runs", "--redis", url, "--timeout-s", "0.6")
    assert code == 3
    assert "cannot be reached" in err


def test_commands_refuse_a_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "runs", "--redis", "http://127.0.0.1")
    assert code == 2
    assert "--redis http://127.0.0.1" in err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_commands_refuse_a_timeout_that_is_none(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", f"--timeout-s={value}"])
    assert end.value.code == 2
    assert f"--timeout-s: {value} is not between 0.1 and 86400" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stats", "audit"])
@pytest.mark.parametrize("damage", ["another kind", "a counter that is none", "a huge lease"])
def test_commands_say_in_one_line_that_a_run_is_damaged(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str], command: str, damage: str
) -> None:
    counters = f"{run.queue.prefix}c"
    if damage == "another kind":
        run.queue.client.delete(counters)
        run.queue.client.set(counters, "x")
    elif damage == "a huge lease":
        run.queue.client.hset(f"{run.queue.prefix}m", "lease_ms", "9" * 400)
    else:
        run.queue.client.hset(counters, "acked", "x")
    argv = (command, "--json", "--redis", valkey_url, "--run", run.queue.run)
    code, out, err = outcome(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith(f"rollstream: error: run '{run.queue.run}' at {valkey_url} cannot be rea")
    assert err.count("\n") == 1


def test_runs_lists_the_others_beside_a_damaged_run_and_ignores_foreign_keys(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client, damaged = run.queue.client, f"{run.queue.run}-damaged"
    foreign = ["rs:{}:m", "rs:{a b}:m", "rs:{\x1b[31m}:m"]
    client.set(f"rs:{{{damaged}}}:m", "x")
    for key in foreign:
        client.set(key, "x")
    code, out, _ = outcome(capsys, "runs", "--redis", valkey_url, "--json")
    client.delete(f"rs:{{{damaged}}}:m", *foreign)
    states = {row["run"]: row["state"] for row in json.loads(out)}
    assert code == 0
    assert (states[run.queue.run], states[damaged]) == ("running", "unreadable")
    assert not {"", "a b", "\x1b[31m"} & set(states)


@pytest.mark.parametrize(
    ("command", "into", "code"),
    [
        ("config show", "| true", 0),
        ("producer --help", "| true", 0),
        ("config show", ">&-", 0),
        ("config show", ">/dev/full", 1),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_commands_end_in_order_where_nobody_reads(
    command: str, into: str, code: int, unbuffered: str
) -> None:
    line = f"set -o pipefail; {sys.executable} -m rollstream.cli {command} {into}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == (code != 0)


def test_rollstream_without_a_command_prints_help_and_exits_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = outcome(capsys)
    assert (code, out) == (2, "")
    assert "exit codes:" in err


def test_config_show_prints_values_with_their_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_REDIS__URL", "redis://u:hunter2@example:1")
    code, out, _ = outcome(capsys, "config", "show", "--run.name", "r7", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["run.name"] == {"value": "r7", "origin": "--run.name"}
    assert "hunter2" not in out
    code, _, err = outcome(capsys, "config", "show", "--run.nam", "r7")
    assert code == 2
    assert "run.name" in err
    assert outcome(capsys, "config", "list")[0] == 2


def test_help_and_version_import_neither_redis_nor_numpy() -> None:
    for flag in ("--help", "--version"):
        check = (
            "import sys\nfrom rollstream.cli.__main__ import main\n"
            f"try: main([{flag!r}])\nexcept SystemExit as end: assert not end.code\n"
            "assert not {'redis', 'numpy', 'pydantic', 'rich'} & set(sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, timeout=80
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(("usage: rollstream", "rollstream 0."))


@pytest.mark.parametrize("app", ["worker", "producer"])
def test_apps_start_by_name_and_get_their_arguments(app: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollstream.cli", app, "--run.nam", "x"],
        capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "run.name" in done.stderr


def test_apps_never_run_a_package_of_that_name_which_is_not_ours(tmp_path: Any) -> None:
    package = tmp_path / "worker"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print('stolen')")
    check = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from rollstream.cli.__main__ import main\nsys.exit(main(['worker', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=80)
    assert done.returncode == 2
    assert "there is no worker here" in done.stderr
    assert "stolen" not in done.stdout
