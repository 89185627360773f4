"""The demo as people run it: its JSON line, its exit code, its kills, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from examples.devserver import die_with_parent, free_port

ROOT = Path(__file__).parents[2]
KEYS = [
    "groups_acked",
    "groups_dropped",
    "samples",
    "turns",
    "tokens",
    "samples_per_s",
    "spans",
    "retries",
    "fenced",
    "lost",
    "twice",
    "token_mismatches",
    "accounting_difference",
    "seconds",
    "audit",
]
ZERO = ("lost", "twice", "token_mismatches", "accounting_difference")
pytestmark = pytest.mark.timeout(150)


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    return clean | {"PYTHONWARNINGS": "ignore"}


def demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT,
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
        check=False,
    )


def line_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON line of a run that succeeded."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert list(found) == KEYS
    assert {name: found[name] for name in ZERO} == dict.fromkeys(ZERO, 0)
    return found


@pytest.mark.slow
def test_demo_prints_one_line_and_accounts_for_every_group_and_token(vocabulary: Path) -> None:
    done = demo("--json", "--batches", "2")
    found = line_of(done)
    assert found["audit"] == "recomputed"
    assert found["groups_acked"] >= 16
    assert found["samples"] == 8 * found["groups_acked"]
    assert found["turns"] > found["samples"]
    assert found["tokens"] > found["turns"]
    assert found["groups_acked"] + sum(found["groups_dropped"].values()) == 40
    spans = {"queue_wait", "generate", "tool", "reward", "merge", "group_wait", "ready_wait"}
    assert spans <= set(found["spans"])
    assert found["spans"]["generate"]["count"] == found["turns"]
    assert set(found["spans"]["tool"]) == {"count", "p50_s", "p95_s"}
    assert set(found["retries"]) == {"attempts", "crashes"}
    assert "stand-in for a model" in done.stderr
    assert "OK: nothing lost" in done.stderr


def test_demo_refuses_a_wrong_option_before_it_starts_anything() -> None:
    done = demo("--engine", "sglang", "--url", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "--tokenizer" in done.stderr


@pytest.mark.slow
def test_demo_loses_nothing_while_workers_are_killed(vocabulary: Path) -> None:
    found = line_of(demo("--json", "--batches", "8", "--kill-every", "2"))
    assert found["retries"]["crashes"] > 0


@pytest.fixture
def engine(vocabulary: Path) -> Iterator[str]:
    """Somebody else's engine, as far as the demo knows."""
    port = free_port()
    answers = "reasoning_gym:gsm_symbolic?size=128&seed=0"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "worker.engines.sim", "--port", str(port)),
            *("--tokenizer", str(vocabulary), "--answers", answers),
            *("--fault-503", "0.02", "--fault-abort", "0.02", "--fault-no-end", "0.02"),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.slow
def test_demo_on_a_given_engine_audits_the_recorded_bytes(engine: str, vocabulary: Path) -> None:
    arguments = ("--engine", "sglang", "--url", engine, "--tokenizer", str(vocabulary))
    found = line_of(demo("--json", "--batches", "2", *arguments))
    assert found["audit"] == "wire"
    assert found["samples"] >= 128


@pytest.mark.slow
def test_demo_on_a_given_server_leaves_nothing_of_its_run(
    valkey_url: str, vocabulary: Path
) -> None:
    line_of(demo("--json", "--batches", "1", ROLLSTREAM_REDIS__URL=valkey_url))
    with redis.Redis.from_url(valkey_url) as client:
        assert list(client.scan_iter("rs:{demo-*")) == []


def children_of(pid: int) -> set[int]:
    """Return the processes whose parent is `pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.add(int(entry.name))
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, empty where it is gone."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running(vocabulary: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo whose processes have all been started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    limit = time.monotonic() + 60
    # Server, sim, producer, verifier, two workers.
    while len(children_of(process.pid)) < 6:
        assert time.monotonic() < limit, "the demo did not start its processes"
        assert process.poll() is None
        time.sleep(0.1)
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_demo_leaves_no_process_behind_however_it_ends(
    running: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    started = children_of(running.pid)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == code
    limit = time.monotonic() + 30
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < limit, "a process outlived the demo"
        time.sleep(0.1)
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("worker.engines.sim", "sim"), ("worker.isolation.verifier", "verifier")]
)
def test_demo_tells_which_process_broke_and_where_its_log_is(module: str, name: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--json"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    limit = time.monotonic() + 60
    while not (found := [p for p in children_of(process.pid) if module in command_of(p)]):
        assert time.monotonic() < limit
        time.sleep(0.1)
    os.kill(found[0], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert f"{name} ended with exit code -9" in stderr
    assert f"{name}.log" in stderr
    assert len(stdout.splitlines()) == 1


@pytest.mark.slow
def test_demo_with_a_wrong_tokenizer_says_so(tmp_path: Path) -> None:
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text("{}")
    done = demo("--json", "--tokenizer", str(wrong))
    assert done.returncode == 1
    assert f"--tokenizer {wrong}" in done.stderr
    assert "Traceback" not in done.stderr
