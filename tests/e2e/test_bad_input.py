"""What a person gets wrong, on the real processes: one clear error, soon, and nothing is lost.

Every case names what is wrong, where it was given, and what to do; the process ends by itself with
a code other than 0; what had been enqueued before is there afterwards. (That it ends within ten
seconds is counted in its own waits: a wall clock would measure who else uses the machine.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.devserver import die_with_parent, free_port
from producer import app as producer_app
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import SCHEMA
from rollstream.wire import encode_prompt
from tests.builders import a_prompt, budgets
from worker.process import app as worker_app

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
LIMIT_S, START_S, STUCK_S = 10.0, 2.0, 60.0
EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_MISMATCH = 2, 3, 4
ROWS = [{"prompt": f"What is {i}+1?", "label": str(i + 1)} for i in range(3)]


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    return clean | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Run:
    """One run on a real server, with three groups enqueued, and the processes that join it."""

    def __init__(self, url: str, name: str, folder: Path, vocabulary: Path) -> None:
        self.url, self.name, self.folder = url, name, folder
        self.rows = write_rows(folder / "rows.jsonl", ROWS)
        self.queue = BlockingQueue.connect(url, name)
        self.options = {
            "run.name": name,
            "redis.url": url,
            "model.tokenizer": str(vocabulary),
            "engine.urls": f"http://127.0.0.1:{free_port()}",
            "telemetry.metrics_port": "0",
            "telemetry.metrics_host": "127.0.0.1",
        }

    def command(self, app: str, **changes: str) -> list[str]:
        given = self.options | {k.replace("__", "."): v for k, v in changes.items()}
        flags = [part for key, value in given.items() for part in (f"--{key}", value)]
        return [sys.executable, "-m", app, *flags]

    def enqueue(self) -> None:
        """Enqueue the rows as a producer does, without waiting for the start of one."""
        self.queue.call(calls.open_run(SCHEMA, "a source", budgets()))
        for gid in range(len(ROWS)):
            assert self.queue.call(calls.enqueue(gid, 8, encode_prompt(a_prompt(gid)))) == "new"

    def produce(self) -> None:
        """Let a real producer enqueue the rows, and end it."""
        source = f"jsonl:{self.rows}"
        command = self.command("producer", producer__source=source, producer__stay="false")
        done = subprocess.run(
            command, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert self.queue.counters()["enqueued"] == len(ROWS)

    def fails(self, app: str, **changes: str) -> tuple[int, str]:
        """Run a process that is to fail; return its exit code and the one line of its error."""
        done = subprocess.run(
            self.command(app, **changes),
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=STUCK_S,
            preexec_fn=die_with_parent,
            check=False,
        )
        assert done.returncode != 0
        errors = [line for line in done.stderr.splitlines() if ": error: " in line]
        assert len(errors) == 1, done.stderr
        assert "Traceback" not in done.stderr
        return done.returncode, errors[0]

    def has_lost_nothing(self) -> None:
        account = self.queue.call(calls.audit(deep=True))
        assert account.problems == []
        assert (account.enqueued, account.live) == (len(ROWS), len(ROWS))
        depths = self.queue.depths()
        assert depths["q"] == len(ROWS) * 8
        assert depths["l"] == 0


@pytest.fixture
def run(valkey_url: str, run_name: str, tmp_path: Path, vocabulary: Path) -> Iterator[Run]:
    started = Run(valkey_url, run_name, tmp_path, vocabulary)
    yield started
    started.queue.close()


@pytest.fixture
def enqueued(run: Run) -> Iterator[Run]:
    """A run that has prompts already, which must still be there afterwards."""
    run.enqueue()
    yield run
    run.has_lost_nothing()


@pytest.fixture
def produced(run: Run) -> Iterator[Run]:
    """The same by a real producer, whose source counts."""
    run.produce()
    yield run
    run.has_lost_nothing()


def test_start_up_waits_leave_ten_seconds_for_all_of_it() -> None:
    assert producer_app.FIRST_CONTACT_S + START_S <= LIMIT_S
    assert worker_app.REACH_S + START_S <= LIMIT_S


def test_producer_names_file_line_and_reason_of_a_bad_row_and_enqueues_nothing(run: Run) -> None:
    bad = run.folder / "bad.jsonl"
    bad.write_text('{"prompt": "What is 1+1?", "label": "2"}\n{"promt": "What is 2+2?"}\n')
    code, error = run.fails("producer", producer__source=f"jsonl:{bad}")
    assert code == EXIT_CONFIG
    assert "bad.jsonl:2" in error
    assert "prompt" in error
    assert run.queue.info() is None


@pytest.mark.parametrize("app", ["producer", "worker"])
def test_unknown_key_names_the_nearest_one(run: Run, app: str) -> None:
    code, error = run.fails(app, worker__concurency="4")
    assert code == EXIT_CONFIG
    assert "--worker.concurency" in error
    assert "did you mean --worker.concurrency?" in error


def test_unknown_key_in_the_file_is_named_with_its_line(run: Run) -> None:
    (run.folder / "rollstream.toml").write_text("[run]\nseed = 1\n[worker]\nlease = 3\n")
    code, error = run.fails("worker")
    assert code == EXIT_CONFIG
    assert "rollstream.toml:4" in error
    assert "worker.lease_s" in error


@pytest.mark.parametrize("app", ["producer", "worker"])
def test_unreachable_redis_is_named_with_its_setting(run: Run, app: str) -> None:
    port = free_port()
    code, error = run.fails(
        app, redis__url=f"redis://127.0.0.1:{port}", producer__source=f"jsonl:{run.rows}"
    )
    assert code == EXIT_UNREACHABLE
    assert f"127.0.0.1:{port}" in error
    assert "redis.url" in error


@pytest.mark.slow
def test_unreachable_engine_is_named_and_leases_nothing(enqueued: Run) -> None:
    code, error = enqueued.fails("worker")
    assert code == EXIT_UNREACHABLE
    assert enqueued.options["engine.urls"] in error
    assert "engine.urls" in error


def not_json(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text("not a tokenizer")
    return path


def another_family(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return path


@pytest.mark.parametrize("make", [lambda folder: folder / "nowhere", not_json, another_family])
def test_wrong_tokenizer_is_named_with_its_setting(
    enqueued: Run, make: Callable[[Path], Path]
) -> None:
    path = make(enqueued.folder)
    code, error = enqueued.fails("worker", model__tokenizer=str(path))
    assert code == EXIT_CONFIG
    assert str(path) in error
    assert "model.tokenizer" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "what"), [("worker.tools", "tool"), ("reward.kind", "reward"), ("worker.generate", "")]
)
@pytest.mark.parametrize(
    ("path", "reason"),
    [("no_such_package.module:f", "no_such_package"), ("mine.py:missing", "missing")],
)
def test_function_that_cannot_be_imported_is_named(
    enqueued: Run, key: str, what: str, path: str, reason: str
) -> None:
    (enqueued.folder / "mine.py").write_text("def present():\n    return 1\n")
    code, error = enqueued.fails("worker", **{key: path})
    assert code == EXIT_CONFIG
    assert path in error
    assert reason in error
    assert what in error


def test_second_run_of_the_same_name_with_other_data_is_refused(produced: Run) -> None:
    other = write_rows(produced.folder / "other.jsonl", ROWS[:2])
    code, error = produced.fails("producer", producer__source=f"jsonl:{other}")
    assert code == EXIT_MISMATCH
    assert produced.name in error
    assert "run.name" in error


def test_producer_of_the_same_data_joins_the_run(produced: Run) -> None:
    produced.produce()
