"""`rollstream top` against a real server: what it reads, in which form, and what it outlives."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer, die_with_parent
from rollstream.cli.__main__ import main
from rollstream.cli.top.reading import Reader
from rollstream.cli.top.top import Watch
from rollstream.queue import calls
from rollstream.removal import remove_run
from rollstream.sample import Span
from tests.backstage import Backstage, wait_until
from tests.builders import a_sample

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        yield backstage.open()


def timed_sample(group_index: int, member: int) -> Any:
    """A sample of which generating took 2 s and the reward 6 s."""
    sample = a_sample(group_index, member)
    sample.spans = [Span("generate", 0, 0.0, 2.0), Span("reward", -1, 2.0, 6.0)]
    return sample


def watch_of(run: Backstage) -> tuple[Watch, Reader]:
    reader = Reader(run.queue, 5.0)
    return Watch(reader, run.queue.run), reader


def started(*argv: str, **options: Any) -> subprocess.Popen[str]:
    """Start `rollstream top` as a process."""
    command = [sys.executable, "-m", "rollstream.cli", "top", *argv]
    return subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=die_with_parent, **options)


# --- what is read --------------------------------------------------------------------------------
def test_top_once_prints_one_json_object_of_the_run(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0, 1, 2, drop={1})
    run.enqueue(3)
    argv = ["top", "--once", "--json", "--interval-s", "0.1", "--redis", valkey_url]
    assert main([*argv, "--run", run.queue.run]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    shown = json.loads(out)
    assert shown["run"] == run.queue.run
    assert shown["groups"] == {"open": 1, "full": 0, "ready": 2, "delivered": 0, "live": 3,
                               "evaluations": 0}  # fmt: skip
    assert shown["members"] == {"queued": 2, "delayed": 0, "suspect": 0, "leased": 0}
    assert shown["trainer"] == "none"
    assert shown["alive"] == {"workers": 1, "producers": 1, "aggregators": 0}


def test_top_prints_a_line_a_look_where_there_is_no_terminal(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0)
    argv = ["top", "--count", "3", "--interval-s", "0.1", "--redis", valkey_url]
    assert main([*argv, "--run", run.queue.run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("queued 2" in line for line in lines)


def test_looks_count_what_ended_between_them_and_name_the_reasons(run: Backstage) -> None:
    watch, _ = watch_of(run)
    run.finish(0)
    watch.look()
    run.finish(1, 2, 3, drop={2, 3})
    run.queue.call(calls.connect("c", 1))
    run.queue.call(calls.ack("c", ["1"]))
    shown = watch.look()
    assert shown["ended"] == {"acked": 1, "dropped": {"zero_std": 2}}
    assert shown["sent_back"]["crashed"] == 0


def test_spans_are_those_of_the_newest_group_that_is_ready(run: Backstage) -> None:
    run.finish(0)
    run.finish(1, make=timed_sample)
    shown = watch_of(run)[0].look()["newest_group"]
    assert (shown["group"], shown["samples"]) == ("1", 2)
    assert shown["seconds"] == {"generate": 4.0, "reward": 12.0}


def test_spans_are_those_of_members_that_ended_where_no_group_has(run: Backstage) -> None:
    run.enqueue(0, n=3)
    run.complete(run.lease()[:1], timed_sample)
    shown = watch_of(run)[0].look()["newest_group"]
    assert (shown["group"], shown["samples"]) == ("0", 1)


def test_a_group_that_is_acked_between_two_looks_is_looked_into_all_the_same(
    run: Backstage,
) -> None:
    reader = Reader(run.queue, 5.0, sleep=lambda _: None)
    watch = Watch(reader, run.queue.run)
    assert watch.look()["newest_group"] is None
    run.queue.call(calls.connect("c", 1))
    client: Any = run.queue.client
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reader.wait, 30.0)
        # Somebody reads `ready` now, and takes nothing.
        wait_until(lambda: b"cmd=xread " in client.execute_command("CLIENT", "LIST"))
        run.finish(0, make=timed_sample)
        waiting.result(20)
    run.queue.call(calls.ack("c", ["0"]))
    assert watch.look()["newest_group"]["group"] == "0"


def test_garbage_in_place_of_a_body_leaves_the_spans_out_and_nothing_else(run: Backstage) -> None:
    run.finish(0, make=timed_sample)
    run.queue.client.hset(f"{run.queue.prefix}b:0", mapping={"0": b"\xc1", "1": b"garbage"})
    shown = watch_of(run)[0].look()
    assert shown["newest_group"] is None
    assert shown["groups"]["ready"] == 1


def test_top_writes_nothing_to_the_run(run: Backstage) -> None:
    run.finish(0)
    run.enqueue(1)
    before = run.keys()
    watch, reader = watch_of(run)
    watch.look()
    reader.wait(0.05)
    watch.look()
    assert run.keys() == before


# --- what it outlives ----------------------------------------------------------------------------
def test_an_outage_and_a_removed_run_are_said_and_looked_past() -> None:
    with DevServer() as server, Backstage(server.url, "r") as run:
        run.open().enqueue(0)
        watch, _ = watch_of(run)
        assert watch.look()["state"] == "running"
        server.kill()
        away = watch.look()
        assert (away["state"], away["cause"]) == ("unreachable", "redis_down")
        server.start()
        assert watch.look()["state"] == "gone"
        run.open()
        assert watch.look()["state"] == "running"
        remove_run(run.queue)
        assert watch.look()["cause"] == "run_over"


def test_top_of_a_run_that_was_never_there_is_exit_code_3(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--redis", valkey_url, "--run", "nobody"]) == 3
    assert "no run 'nobody'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupt_is_exit_code_130_and_no_traceback(run: Backstage, valkey_url: str) -> None:
    process = started(
        "--redis", valkey_url, "--run", run.queue.run, "--interval-s", "0.2",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert "running" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_without_a_word(run: Backstage, valkey_url: str) -> None:
    process = started(
        "--redis", valkey_url, "--run", run.queue.run, "--interval-s", "0.2", "--json",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    json.loads(process.stdout.readline())
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
def test_a_terminal_of_40_columns_gets_a_page_and_its_cursor_back(
    run: Backstage, valkey_url: str
) -> None:
    run.finish(0)
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 40, 0, 0))
    sized = {"LINES", "COLUMNS"}  # of the terminal of whoever runs the tests
    env = {name: value for name, value in os.environ.items() if name not in sized}
    process = started(
        "--redis", valkey_url, "--run", run.queue.run, "--interval-s", "0.2", stdin=theirs,
        stdout=theirs, stderr=theirs, env=env | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    seen = bytearray()

    def has_page() -> bool:
        seen.extend(os.read(ours, 65536))
        return b"what holds it up" in seen and b"workers" in seen

    wait_until(has_page)
    process.send_signal(signal.SIGTERM)
    while chunk := _read(ours):
        seen.extend(chunk)
    assert process.wait(20) == 130
    os.close(ours)
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # shown again after it was hidden
    assert b"Traceback" not in seen


def _read(terminal: int) -> bytes:
    """Return what comes; nothing once the other side is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
