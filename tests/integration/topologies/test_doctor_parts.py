"""What `rollstream doctor` says of rights, verifiers, the exporter, the tokenizer and versions."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer, free_port
from rollstream import __version__
from rollstream.cli.__main__ import main
from rollstream.cli.rights import commands_of
from rollstream.queue import calls
from rollstream.queue.scripts import load_scripts
from rollstream.wire import WIRE_VERSION
from tests.backstage import Backstage

from .test_acl import add_user


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROLLSTREAM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with DevServer(aof=True) as server:
        yield server


@pytest.fixture
def run(server: DevServer, run_name: str) -> Iterator[Backstage]:
    with Backstage(server.url, run_name) as backstage:
        yield backstage.open()
        backstage.queue.client.flushall()


def examine(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Return what doctor says, as JSON."""
    main(["doctor", "--json", *argv])
    return json.loads(capsys.readouterr().out)


def findings(said: Any, check: str) -> list[tuple[str, str, str]]:
    return [(f["level"], f["what"], f["do"]) for f in said["findings"] if f["check"] == check]


# --- rights --------------------------------------------------------------------------------------
def test_the_documented_user_may_do_everything(
    server: DevServer, run: Backstage, capsys: pytest.CaptureFixture[str]
) -> None:
    url = add_user(server, "u", run.queue.run)
    assert findings(examine(capsys, "--redis", url, "--run", run.queue.run), "scripts") == []


@pytest.mark.parametrize(
    ("less", "command"),
    [
        ("-zadd", "zadd"), ("-xreadgroup", "xreadgroup"), ("-blpop", "blpop"),
        ("-unlink", "unlink"), ("-time", "time"),
    ],
)  # fmt: skip
def test_a_command_that_is_forbidden_is_named_with_what_permits_it(
    server: DevServer, run: Backstage, capsys: pytest.CaptureFixture[str], less: str, command: str
) -> None:
    url = add_user(server, "u", run.queue.run, less)
    found = findings(examine(capsys, "--redis", url, "--run", run.queue.run), "scripts")
    assert [(level, f"+{command} " in do) for level, _, do in found] == [("problem", True)]


def test_a_user_without_scripts_hears_so(
    server: DevServer, run: Backstage, capsys: pytest.CaptureFixture[str]
) -> None:
    url = add_user(server, "u", run.queue.run, "-script|load")
    ((level, what, do),) = findings(
        examine(capsys, "--redis", url, "--run", run.queue.run), "scripts"
    )
    assert level == "problem"
    assert "lease" in what
    assert "+script|load" in do


def test_every_command_of_every_script_is_asked_about() -> None:
    scripts = list(load_scripts().values())
    asked = {line.split()[0] for line in commands_of("k", scripts)}
    named = {
        word
        for script in scripts
        for line in script.source.splitlines()
        for word in re.findall(r"'([A-Z]{3,})'", line.partition("--")[0])
        if "call(" in line and f"call('{word}'" in line
    }
    assert named <= asked
    assert {"XREADGROUP", "HSET", "TIME"} <= asked


# --- verifiers -----------------------------------------------------------------------------------
def configured(folder: Path, run: Backstage, server: DevServer, more: str) -> str:
    file = folder / "rollstream.toml"
    file.write_text(
        f'[redis]\nurl = "{server.url}"\n[run]\nname = "{run.queue.run}"\n'
        f'[engine]\nurls = ["http://127.0.0.1:{free_port()}"]\n{more}'
    )
    return str(file)


def test_a_verifier_is_missed_where_a_reward_or_a_tool_needs_one(
    server: DevServer, run: Backstage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ('[reward]\nkind = "math_verify"\n', '[worker]\ntools = ["python"]\n'):
        file = configured(tmp_path, run, server, more)
        ((level, what, do),) = findings(examine(capsys, "--config", file), "verifier")
        assert (level, "no verifier is alive" in what, "verifier" in do) == ("problem", True, True)
    client = run.queue.client
    client.sadd("rq:workers:verify", "rq:worker:a")
    assert findings(examine(capsys, "--config", file), "verifier") != []  # killed: its key is gone
    client.hset("rq:worker:a", "birth", "1")
    said = examine(capsys, "--config", file)
    assert (findings(said, "verifier"), said["facts"]["verifiers"]) == ([], 1)


def test_no_verifier_is_missed_where_nothing_runs_isolated(
    server: DevServer, run: Backstage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configured(tmp_path, run, server, '[reward]\nkind = "math"\n')
    said = examine(capsys, "--config", file)
    assert findings(said, "verifier") == []
    assert "verifiers" not in said["facts"]


# --- the exporter --------------------------------------------------------------------------------
@contextmanager
def an_exporter(status: int, text: str) -> Iterator[int]:
    """Serve one answer on a port of its own."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Answer) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_port
        serving.shutdown()
        thread.join()


def test_an_exporter_is_asked_whether_it_reads_the_run(
    server: DevServer, run: Backstage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with an_exporter(200, "ok") as port:
        file = configured(tmp_path, run, server, f"[exporter]\nport = {port}\n")
        said = examine(capsys, "--config", file)
        assert findings(said, "exporter") == []
        assert said["facts"]["exporter"] == f"ready at http://127.0.0.1:{port}"
    with an_exporter(503, "no such\x1b run") as port:
        file = configured(tmp_path, run, server, f"[exporter]\nport = {port}\n")
        ((level, what, _),) = findings(examine(capsys, "--config", file), "exporter")
        assert (level, what.endswith("is not ready: no such  run")) == ("problem", True)


def test_a_missing_exporter_is_a_problem_where_one_is_configured(
    server: DevServer, run: Backstage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configured(tmp_path, run, server, f"[exporter]\nport = {free_port()}\n")
    ((level, _, do),) = findings(examine(capsys, "--config", file), "exporter")
    assert (level, "rollstream exporter" in do) == ("problem", True)


# --- versions ------------------------------------------------------------------------------------
def test_workers_of_another_version_are_named(
    server: DevServer, run: Backstage, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(name: str, version: str, wire: int) -> None:
        about = f"host pid 1, rollstream {version}, wire {wire}"
        run.queue.call(calls.present("worker", name, about=about))

    where = ("--redis", server.url, "--run", run.queue.run)
    add("a", __version__, WIRE_VERSION)
    said = examine(capsys, *where)
    assert (findings(said, "versions"), said["facts"]["run"]["versions"]) == ([], {__version__: 1})
    add("b", "0.0.1", WIRE_VERSION)
    ((level, what, _),) = findings(examine(capsys, *where), "versions")
    assert (level, "1 of 0.0.1" in what) == ("note", True)
    add("c", "9.0", WIRE_VERSION + 1)
    assert [found[0] for found in findings(examine(capsys, *where), "versions")] == [
        "problem", "note",
    ]  # fmt: skip


# --- the tokenizer -------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_tokenizer_of_the_configuration_is_tried_as_a_worker_does(
    server: DevServer, run: Backstage, vocabulary: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = configured(tmp_path, run, server, f'[model]\ntokenizer = "{vocabulary}"\n')
    said = examine(capsys, "--config", file)
    assert findings(said, "tokenizer") == []
    assert said["facts"]["tokenizer"].startswith("fit, ")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    file = configured(tmp_path, run, server, f'[model]\ntokenizer = "{broken}"\n')
    ((level, _, do),) = findings(examine(capsys, "--config", file), "tokenizer")
    assert (level, "docs/tokens.md" in do) == ("problem", True)
