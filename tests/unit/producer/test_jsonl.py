"""JSON lines: read strictly, named by file and line, hashed whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from producer.sources import BadRow, open_source
from producer.sources import jsonl as jsonl_module
from producer.sources.jsonl import JsonlSource
from rollstream.errors import ConfigError

Make = Callable[[Path, bytes | str], JsonlSource]


@pytest.fixture
def a_source() -> Iterator[Make]:
    """A source over a file with the given content; closed when the test ends."""
    opened: list[JsonlSource] = []

    def make(folder: Path, data: bytes | str) -> JsonlSource:
        path = folder / "p.jsonl"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        opened.append(JsonlSource(str(path)))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def test_rows_are_found_at_random_past_blank_lines_bom_and_crlf(
    a_source: Make, tmp_path: Path
) -> None:
    data = b'\xef\xbb\xbf{"k": "a\xc3\xa9\xe2\x80\xa8"}\r\n\r\n   \n{"k": 2}\n\n{"k": 3}'
    source = a_source(tmp_path, data)
    assert len(source) == 3
    assert [source.row(k).values["k"] for k in (2, 0, 1, 2)] == [3, "aé\u2028", 2, 3]
    assert [source.row(k).where.rpartition(":")[2] for k in range(3)] == ["1", "4", "6"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": 1e999}', "too large"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        (b'{"m": {"x": 1, "x": 1}}', "the key 'x' stands twice"),
        (b'["prompt"]', "expected a JSON object, found a list"),
        (b'"prompt"', "expected a JSON object, found text"),
        (b"null", "expected a JSON object, found null"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not JSON: Extra data"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_reason(
    a_source: Make, tmp_path: Path, line: bytes, reason: str
) -> None:
    source = a_source(tmp_path, b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
    assert len(source) == 3
    with pytest.raises(BadRow) as caught:
        source.row(1)
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:3"
    assert reason in caught.value.reason
    assert source.row(2).values == {"prompt": "good"}


def test_a_row_beyond_the_limit_is_bad_and_its_neighbours_are_not(
    a_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "MAX_ROW_BYTES", 1 << 20)
    huge = json.dumps({"prompt": "x" * (3 << 20)})
    just = json.dumps({"prompt": "x" * ((1 << 20) - 14)})
    source = a_source(tmp_path, f'{{"k": 1}}\n{huge}\n{just}\n{{"k": 2}}\n')
    assert len(source) == 4
    with pytest.raises(BadRow, match="larger than 1 MiB"):
        source.row(1)
    assert len(source.row(2).values["prompt"]) == (1 << 20) - 14
    assert source.row(3).values == {"k": 2}


def test_fingerprint_changes_with_the_content_and_not_with_the_name(
    a_source: Make, tmp_path: Path
) -> None:
    one = a_source(tmp_path, '{"k": 1}\n{"k": 2}\n').fingerprint
    (tmp_path / "sub").mkdir()
    assert a_source(tmp_path / "sub", '{"k": 1}\n{"k": 2}\n').fingerprint == one
    assert a_source(tmp_path, '{"k": 1}\n{"k": 3}\n').fingerprint != one


def test_a_file_that_changes_under_the_run_is_refused(a_source: Make, tmp_path: Path) -> None:
    source = a_source(tmp_path, '{"k": 1}\n{"k": 2}\n')
    path = tmp_path / "p.jsonl"
    path.write_text('{"k": 100}\n{"k": 2}\n')
    with pytest.raises(ConfigError, match="changed while the run reads it"):
        source.row(1)


def test_a_file_that_is_replaced_by_name_stays_what_it_was(a_source: Make, tmp_path: Path) -> None:
    source = a_source(tmp_path, '{"k": 1}\n{"k": 2}\n')
    (tmp_path / "new").write_text('{"k": 100}\n')
    (tmp_path / "new").rename(tmp_path / "p.jsonl")
    assert source.row(1).values == {"k": 2}


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = tmp_path / "p.jsonl", JsonlSource._index
    path.write_text('{"k": 1}\n{"k": 2')

    def grow(source: JsonlSource) -> tuple[str, int]:
        answer = index(source)
        with path.open("a") as file:
            file.write("22}\n")
        return answer

    monkeypatch.setattr(JsonlSource, "_index", grow)
    with pytest.raises(ConfigError, match="changed while it was read"):
        JsonlSource(str(path))


def test_what_is_no_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        str(tmp_path / "pipe"): "is not a file",
        "/dev/zero": "is not a file",
        "~nobody-of-that-name/p.jsonl": "is no path",
        "a\0b": "is no path",
    }.items():
        with pytest.raises(ConfigError, match=message):
            open_source(f"jsonl:{path}")


def test_checking_before_the_first_enqueue_is_bounded_by_rows_and_bytes(
    a_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '{"k": 1}\n'
    assert a_source(tmp_path, row * 5).num_checked == 5
    monkeypatch.setattr(jsonl_module, "CHECKED_ROWS", 4)
    assert a_source(tmp_path, row * 5).num_checked == 4
    monkeypatch.setattr(jsonl_module, "CHECKED_BYTES", 2 * len(row))
    assert a_source(tmp_path, row * 5).num_checked == 2


def test_a_key_that_stands_twice_among_many_is_found_in_one_pass() -> None:
    # Counting each key over all of them would take hours here.
    line = "{" + "".join(f'"k{j}":1,' for j in range(300_000)) + '"k299999":2}'
    with pytest.raises(BadRow, match="the key 'k299999' stands twice"):
        jsonl_module.parse_line(line.encode(), "p:1")


@pytest.mark.parametrize("data", ["", "\n\n", "\ufeff", "  \r\n"])
def test_a_file_without_rows_is_refused(a_source: Make, tmp_path: Path, data: str) -> None:
    with pytest.raises(ConfigError, match="holds no rows"):
        a_source(tmp_path, data)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "producer.source is empty"),
        ("jsonl:/nonexistent/p.jsonl", "No such file"),
        ("jsonl:/", "Is a directory"),
        ("jsonl:", "expected jsonl:PATH"),
        ("josnl:x", "did you mean jsonl"),
        ("/data/p.jsonl", "expected jsonl:PATH"),
        ("os:system", "expected jsonl:PATH"),
    ],
)
def test_a_source_that_is_none_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(spec)
