"""Every `--json` has the keys that docs/cli.md lists, no more and no less."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.make_cli import ELSEWHERE, PAGE, commands, updated
from rollstream.cli import exits
from rollstream.cli.__main__ import COMMANDS, main
from rollstream.cli.schemas import SCHEMAS
from rollstream.queue import calls
from tests.backstage import Backstage


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """Group 0 was trained, 1 dropped, 2 is ready, 3 waits."""
    with Backstage(valkey_url, run_name, max_requeues=1) as backstage:
        backstage.open().finish(0, 1, 2, drop={1})
        backstage.enqueue(3)
        backstage.queue.call(calls.connect("c", 1))
        backstage.queue.call(calls.ack("c", ["0"]))
        yield backstage


FORMS: dict[str, list[str]] = {
    "top": ["top", "--once", "--interval-s", "0.1"],
    "stats": ["stats"],
    "audit": ["audit"],
    "show (drops)": ["show"],
    "show GROUP (live)": ["show", "2"],
    "show GROUP (not live)": ["show", "1"],
    "show GROUP --html": ["show", "2", "--html", "FILE"],
    "show --dump": ["show", "--dump", "DIR"],
    "show GROUP --dump": ["show", "2", "--dump", "DIR"],
    "runs": ["runs"],
    "runs --remove": ["runs", "--remove", "RUN", "--yes", "--force"],
    "doctor": ["doctor"],
    "engines": ["engines"],
    "pause": ["pause"],
    "resume": ["resume"],
    "drain": ["drain", "--timeout-s", "0.1"],
    "abort": ["abort", "--yes"],
    "withdraw": ["withdraw", "3"],
    "requeue": ["requeue", "3"],
    "set": ["set", "lease_s", "20"],
    "dump": ["dump", "DIR", "--peek"],
    "dump --check": ["dump", "DIR", "--check"],
    "config show": ["config", "show"],
    "version": ["version"],
}
SERVERLESS = ("config", "version")
RUNLESS = ("runs", *SERVERLESS)


@pytest.mark.parametrize("form", list(SCHEMAS))
def test_json_of_a_command_has_the_keys_of_its_schema(
    form: str, run: Backstage, valkey_url: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    names = {"RUN": run.queue.run, "DIR": str(tmp_path / "dump"), "FILE": str(tmp_path / "page")}
    argv = [names.get(word, word) for word in FORMS[form]] + ["--json"]
    argv += [] if argv[0] in SERVERLESS else ["--redis", valkey_url]
    argv += [] if argv[0] in RUNLESS else ["--run", run.queue.run]
    if form == "dump --check" or "--dump" in argv:
        to_run = ["--redis", valkey_url, "--run", run.queue.run]
        assert main(["dump", names["DIR"], "--peek", *to_run]) == 0
        capsys.readouterr()
    assert main(argv) in (exits.OK, exits.PROBLEM)
    shown: Any = json.loads(capsys.readouterr().out)
    if form == "runs":
        shown = {f"[].{key}": value for row in shown for key, value in row.items()}
    if form == "config show":
        assert all(set(value) == {"value", "origin"} for value in shown.values())
        return
    always = {key for key in SCHEMAS[form] if not key.endswith("?")}
    known = {key.removesuffix("?") for key in SCHEMAS[form]}
    assert always <= set(shown) <= known, (always - set(shown), set(shown) - known)


def test_json_of_a_group_that_a_dump_has_not_is_json(
    run: Backstage, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "dump")
    assert main(["dump", folder, "--peek", "--redis", valkey_url, "--run", run.queue.run]) == 0
    capsys.readouterr()
    assert main(["show", "9", "--dump", folder, "--json"]) == exits.PROBLEM
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"dump": folder, "group_index": "9", "members": []}


def test_the_first_record_of_top_lacks_only_what_it_may(
    valkey_url: str, run: Backstage, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["top", "--once", "--json", "--interval-s", "0.1", "--redis", valkey_url]
    assert main([*argv, "--run", run.queue.run]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {key.removesuffix("?") for key in SCHEMAS["top"]}


def test_every_command_takes_json_and_has_a_schema() -> None:
    assert set(COMMANDS) | set(ELSEWHERE) >= set(commands())
    assert set(COMMANDS) == set(commands())
    for name, (_, parser) in commands().items():
        options = [option for action in parser._actions for option in action.option_strings]
        assert "--json" in options, name
        assert any(form.split()[0] == name for form in SCHEMAS), name
    assert set(FORMS) == set(SCHEMAS)


def test_the_page_has_every_command_option_and_key_as_they_are() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text()), "python -m docs.make_cli"


def test_the_page_has_every_question_of_doctor() -> None:
    asked = re.compile(r"(?:\bFinding|report\.problem|report\.note)\(\s*\"(\w+)\"")
    package = PAGE.parents[1] / "rollstream"
    sources = [*(package / "cli").glob("*.py"), package / "health.py"]
    checks = {word for source in sources for word in asked.findall(source.read_text())}
    page = PAGE.read_text().partition("## What doctor asks")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row)} == checks


def test_the_page_has_every_exit_code() -> None:
    found = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE.read_text(), re.MULTILINE)}
    known = {value for name, value in vars(exits).items() if name.isupper() and value != ""
             and isinstance(value, int)}  # fmt: skip
    assert found == known


def test_every_command_has_a_sentence_of_help() -> None:
    for name, (about, parser) in commands().items():
        assert len(about) > 10, name
        for action in parser._actions:
            assert action.help not in (None, ""), (name, action.dest)
            assert not isinstance(action, argparse._SubParsersAction)
