"""What commands print is text for any terminal, and JSON that every parser reads."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

import pytest

from rollstream.cli.view import print_json, print_progress, print_rows, print_text

HOSTILE = "a\x1b[2J\x00\x9b\u202e\ud800é≠"


def test_json_has_no_number_that_is_none_and_no_key_that_is_no_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json({"a": [math.nan, {"b": -math.inf}], (1, 2): b"x", "c": 1.5})
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown == {"a": ["nan", {"b": "-inf"}], "(1, 2)": "b'x'", "c": 1.5}


def test_json_of_anything_however_deep_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    print_json({"deep": deep})
    assert list(json.loads(capsys.readouterr().out)) == ["deep"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_what_is_printed_fits_every_terminal(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    print_text(f"text {HOSTILE}\nof two lines")
    print_rows(f"title {HOSTILE}", {f"name {HOSTILE}\n": f"{HOSTILE}\nforged: 1", "count": 3})
    print_json({f"json {HOSTILE}": HOSTILE})
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    first, second, title, name, count, document = text.split("\n", 5)
    assert (first[:6], second, title[:6]) == ("text a", "of two lines", "title ")
    assert ("name a" in name, "forged: 1" in name, count.split()) == (True, True, ["count", "3"])
    assert json.loads(document) == {f"json {HOSTILE}": HOSTILE}


def test_progress_that_nobody_reads_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr("rollstream.cli.view.close_stdout", lambda: closed.append(1))
    print_progress("one")
    assert closed == [1]
