"""A file that is not whole, not sound or not ours is refused with its name and the byte."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from rollstream.dump import read_groups, read_manifest
from rollstream.dump.writer import DumpWriter
from rollstream.errors import RunMismatch, WireError, WireTooNew
from tests.builders import a_group
from tests.unit.dump.test_lossless import wrote

FIRST = "batch-00000001.rsd"


def read(folder: Path) -> list[int]:
    return [group.group_index for group in read_groups(folder)]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    wrote(tmp_path / "dump", [a_group(0), a_group(1)], [a_group(2)])
    return tmp_path / "dump"


def test_a_truncated_file_is_refused(dump: Path) -> None:
    path = dump / FIRST
    raw = path.read_bytes()
    for length in range(0, len(raw), 5):
        path.write_bytes(raw[:length])
        with pytest.raises(WireError, match=rf"{FIRST} at byte \d+: .*(truncated|ends|would end)"):
            read(dump)


def test_a_changed_byte_is_refused(dump: Path) -> None:
    path = dump / FIRST
    raw = path.read_bytes()
    for place in range(0, len(raw), 5):
        changed = bytearray(raw)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        with pytest.raises(WireError, match=re.escape(FIRST)):
            read(dump)


def test_the_byte_is_where_the_broken_frame_begins(dump: Path) -> None:
    path = dump / FIRST
    raw = bytearray(path.read_bytes())
    second = raw.rindex(b"grup")
    raw[second + 40] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WireError, match=rf"{FIRST} at byte {second}: corrupt: the checksum"):
        read(dump)


def test_what_follows_the_last_frame_is_refused(dump: Path) -> None:
    with (dump / FIRST).open("ab") as file:
        file.write(b"\x00")
    with pytest.raises(WireError, match="more behind the last frame"):
        read(dump)


def test_a_file_of_something_else_is_refused(dump: Path) -> None:
    (dump / FIRST).write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(WireError, match=rf"{FIRST} at byte 0: not a file of a dump"):
        read(dump)


def test_a_batch_of_another_dump_is_refused(dump: Path, tmp_path: Path) -> None:
    wrote(tmp_path / "other", [a_group(7)])
    (dump / FIRST).write_bytes((tmp_path / "other" / FIRST).read_bytes())
    with pytest.raises(WireError, match=r"it is batch 1 of dump .*, not batch 1 of"):
        read(dump)


def test_a_batch_under_another_number_is_refused(dump: Path) -> None:
    (dump / FIRST).write_bytes((dump / "batch-00000002.rsd").read_bytes())
    with pytest.raises(WireError, match="it is batch 2 of dump"):
        read(dump)


def test_a_missing_batch_is_named(dump: Path) -> None:
    (dump / FIRST).unlink()
    with pytest.raises(WireError, match=rf"{FIRST} is missing"):
        read(dump)


def test_a_newer_format_is_refused_as_newer(dump: Path) -> None:
    raw = bytearray((dump / FIRST).read_bytes())
    raw[16:20] = struct.pack("<I", 2)
    (dump / FIRST).write_bytes(raw)
    with pytest.raises(WireTooNew, match=rf"{FIRST}: format 2 is newer than 1; upgrade"):
        read(dump)


@pytest.mark.parametrize("what", ["format", "wire"])
def test_a_newer_manifest_is_refused_as_newer(dump: Path, what: str) -> None:
    path = dump / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {what: 99}))
    with pytest.raises(WireTooNew, match=r"manifest\.json: .* 99 is newer than 1; upgrade"):
        read(dump)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nonsense", '{"is": "rollstream-dump"}', "\udcff", "[" * 100_000]
)
def test_a_manifest_that_is_none_is_refused(dump: Path, text: str) -> None:
    (dump / "manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(WireError, match=r"manifest\.json is no manifest of a dump"):
        read_manifest(dump)


@pytest.mark.parametrize("name", ["run", "fingerprint", "dump", "rules", "created_unix_s"])
def test_a_manifest_without_a_field_names_it(dump: Path, name: str) -> None:
    path = dump / "manifest.json"
    record = json.loads(path.read_text())
    del record[name]
    path.write_text(json.dumps(record))
    with pytest.raises(WireError, match=f"'{name}' is missing"):
        read_manifest(dump)


@pytest.mark.parametrize("folder", ["none", "dump/manifest.json"])
def test_a_folder_that_is_no_dump_is_said_to_be_none(
    dump: Path, tmp_path: Path, folder: str
) -> None:
    with pytest.raises(WireError, match="is no dump"):
        read(tmp_path / folder)


def test_files_of_others_in_the_folder_do_not_matter(dump: Path) -> None:
    (dump / "README").write_text("mine")
    (dump / "lost+found").mkdir()
    (dump / ".tmp-batch-00000003.rsd").write_bytes(b"half")
    assert read(dump) == [0, 1, 2]


def test_a_writer_refuses_the_dump_of_another_run(dump: Path) -> None:
    for run, fingerprint in (("other", "f"), ("r", "other")):
        with pytest.raises(RunMismatch, match="take another folder"):
            DumpWriter.open(dump, run=run, fingerprint=fingerprint)


def test_a_writer_refuses_a_folder_whose_manifest_is_gone(dump: Path) -> None:
    (dump / "manifest.json").unlink()
    with pytest.raises(WireError, match=r"no manifest\.json"):
        DumpWriter.open(dump, run="r", fingerprint="f")
