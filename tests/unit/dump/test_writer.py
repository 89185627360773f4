"""Batches are whole or not there, each content is there once, and one process writes at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.dump import read_batches
from rollstream.dump.writer import DumpWriter
from tests.builders import a_group, a_sample
from tests.unit.dump.test_lossless import wrote


def ids(folder: Path) -> list[list[int]]:
    return [batch.group_indexes for batch in read_batches(folder)]


def opened(folder: Path) -> DumpWriter:
    return DumpWriter.open(folder, run="r", fingerprint="f")


def test_a_group_that_comes_again_is_recognised_also_by_a_later_writer(tmp_path: Path) -> None:
    wrote(tmp_path, [a_group(0), a_group(1)])
    with opened(tmp_path) as writer:
        again = writer.write([a_group(1), a_group(0)], "taken")
        assert (again.path, again.num_groups, again.num_recognised) == (None, 0, 2)
        more = writer.write([a_group(1), a_group(2)], "taken")
        assert (more.num_groups, more.num_recognised) == (1, 1)
    assert ids(tmp_path) == [[0, 1], [2]]


def test_how_late_a_group_was_handed_out_does_not_make_it_another(tmp_path: Path) -> None:
    wrote(tmp_path, [a_group(0)], [a_group(0, staleness=3, spans={"ready_wait": [9.0]})])
    assert ids(tmp_path) == [[0]]


def test_a_group_that_was_sampled_again_comes_once_where_it_was_written_last(
    tmp_path: Path,
) -> None:
    new = a_group(1, [a_sample(1, turns=[((9, 9), ())])])
    wrote(tmp_path, [a_group(0), a_group(1)], [a_group(2)], [new])
    assert ids(tmp_path) == [[0], [2], [1]]
    *_, last = read_batches(tmp_path)
    assert last.flat()[0].tokens.tolist() == [1, 2, 3, 9, 9]


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(BlockingIOError, match="another process writes"):
        opened(tmp_path)
    opened(tmp_path).close()


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("what", ["fsync", "rename"])
def test_a_batch_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    wrote(tmp_path, [a_group(0)])
    with opened(tmp_path) as writer:
        with monkeypatch.context() as broken:
            broken.setattr(os, what, failing(errno.ENOSPC))
            with pytest.raises(OSError, match="No space"):
                writer.write([a_group(1)], "taken")
        assert ids(tmp_path) == [[0]]
        assert not list(tmp_path.glob(".tmp-*"))
        writer.write([a_group(1)], "taken")
    assert ids(tmp_path) == [[0], [1]]


def test_a_batch_whose_name_may_not_last_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, []

    def folder_fails(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 2:  # the file, then its folder
            raise OSError(errno.EIO, "EIO")
        fsync(handle)

    with opened(tmp_path) as writer:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", folder_fails)
            with pytest.raises(OSError, match="EIO"):
                writer.write([a_group(1)], "taken")
        assert ids(tmp_path) == []
        writer.write([a_group(1)], "taken")
    assert ids(tmp_path) == [[1]]


def test_what_a_killed_writer_began_is_removed(tmp_path: Path) -> None:
    wrote(tmp_path, [a_group(0)])
    half = tmp_path / ".tmp-batch-00000002.rsd"
    half.write_bytes(b"half")
    opened(tmp_path).close()
    assert not half.exists()


def test_files_of_others_stay_as_they_are_whatever_they_are_called(tmp_path: Path) -> None:
    """Names that look like ours, in a folder that somebody else works in too."""
    others = [
        ".tmp-mine",
        ".tmp-batch-1.rsd.part",
        "batch-000000001.rsd",
        f"batch-{0x0660:c}{'0' * 6}1.rsd",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"theirs")
    (tmp_path / ".tmp-folder").mkdir()
    wrote(tmp_path, [a_group(0)])
    opened(tmp_path).close()
    assert ids(tmp_path) == [[0]]
    assert {(tmp_path / name).read_bytes() for name in others} == {b"theirs"}
