"""Commands on what is not as they expect it: records of anybody, and sinks that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import die_with_parent
from rollstream.cli.__main__ import main
from rollstream.cli.top.reading import Reader
from rollstream.cli.top.top import Watch
from rollstream.dump.reader import DumpIndex
from rollstream.queue import calls
from tests.backstage import Backstage, wait_until

ESCAPE = b"\x1b[2J\x00"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM_")}


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open().enqueue(7, n=3)
        yield backstage


@pytest.fixture
def where(valkey_url: str, run_name: str) -> list[str]:
    return ["--redis", valkey_url, "--run", run_name]


def shell(line: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `rollstream argv` where `line` says `"$@"`."""
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "rollstream.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60,
                          env=CLEAN, preexec_fn=die_with_parent, **options)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "field", "command"),
    [
        ("g:7", b"t0", "show 7"),
        ("g:7", b"r0", "show 7"),
        ("g:7", b"state", "show 7"),
        ("g:7", b"why", "show 7"),
        ("m", b"error", "stats"),
        ("m", b"consumer", "stats"),
        ("m", b"state", "pause"),
        ("m", b"error", "set lease_s 5"),
        ("c", b"dropped:" + ESCAPE, "stats"),
        ("c", b"dropped:" + ESCAPE, "top --once"),
        ("c", b"env:dropped:" + ESCAPE + b":" + ESCAPE, "audit"),
    ],
)
def test_no_record_of_redis_writes_on_the_terminal(
    run: Backstage,
    where: list[str],
    capsys: pytest.CaptureFixture[str],
    key: str,
    field: bytes,
    command: str,
) -> None:
    value = b"1" if key == "c" else ESCAPE
    run.queue.client.hset(f"{run.queue.prefix}{key}", field, value)
    if field == b"error":
        run.queue.client.hset(f"{run.queue.prefix}m", "state", "failed")
    main([*command.split(), *where])
    out, err = capsys.readouterr()
    assert out + err
    assert [c for c in out + err if not c.isprintable() and c != "\n"] == []


@pytest.mark.parametrize(("field", "value"), [("deadline", "nan"), ("deadline", "1e999")])
def test_json_is_json_whatever_a_number_of_redis_is(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    run.queue.client.hset(f"{run.queue.prefix}g:7", field, value)
    assert main(["show", "7", "--json", *where]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["deadline_in_s"] in ("nan", "inf")


def test_a_group_of_an_impossible_size_is_damage_and_takes_no_memory(
    run: Backstage, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.queue.client.hset(f"{run.queue.prefix}g:7", "n", "9223372036854775807")
    assert main(["show", "7", *where]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_top_outlives_that_the_run_cannot_be_read_for_a_while(run: Backstage) -> None:
    watch, client = Watch(Reader(run.queue, 5.0), run.queue.run), run.queue.client
    assert watch.look()["state"] == "running"
    counters = f"{run.queue.prefix}c"
    kept = client.dump(counters)
    assert kept is not None
    client.set(counters, "another program's")
    seen = watch.look()
    assert (seen["state"], seen["cause"]) == ("unreadable", "redis_down")
    client.restore(counters, 0, kept, replace=True)
    assert watch.look()["state"] == "running"


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_the_exit_code_is_the_same_whatever_standard_error_is(
    valkey_url: str, redirect: str
) -> None:
    done = shell(f'"$@" {redirect}', "stats", "--redis", valkey_url, "--run", "no-such-run")
    assert (done.returncode, done.stdout) == (3, "")


def test_what_belongs_to_standard_error_is_never_in_the_answer(
    run: Backstage, where: list[str]
) -> None:
    name = where[-1]
    done = shell('"$@" 2>&-', "runs", "--remove", name, "--yes", "--force", "--json", *where[:2])
    assert (done.returncode, json.loads(done.stdout)["run"]) == (0, name)


def test_a_dump_goes_on_where_the_reader_of_its_progress_left(
    run: Backstage, where: list[str], tmp_path: Path
) -> None:
    run.queue.call(calls.withdraw("7"))
    run.finish(1, 2, 3)
    run.end_of_data()
    folder = str(tmp_path / "dump")
    done = shell('set -o pipefail; "$@" | true', "dump", folder, "--groups", "1", *where)
    assert done.returncode == 0, done.stderr
    assert list(DumpIndex(folder).last) == [1, 2, 3]
    assert run.queue.call(calls.audit(deep=True)).acked == 3


@pytest.mark.slow
def test_a_drain_whose_progress_nobody_reads_waits_all_the_same(
    run: Backstage, where: list[str]
) -> None:
    """Exit code 0 means that nothing runs: whoever stops workers behind it relies on that."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "rollstream.cli", "drain", *where]
    with subprocess.Popen(command, stderr=writes, stdout=subprocess.DEVNULL, env=CLEAN,
                          preexec_fn=die_with_parent) as draining:  # fmt: skip
        os.close(writes)

        def is_draining() -> bool:
            info = run.queue.info()
            return info is not None and info.draining

        wait_until(is_draining)
        leases = run.lease()
        with pytest.raises(subprocess.TimeoutExpired):
            draining.wait(1.5)
        run.complete(leases)
        run.judge()
        assert draining.wait(20) == 0
    info = run.queue.depths()
    assert (info["q"], info["l"], info["full"]) == (0, 0, 0)
