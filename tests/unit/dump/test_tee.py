"""A disk that hangs, fails or is full costs the dump groups, and the training nothing."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.batch import Batch
from rollstream.dump import read_groups, tee
from rollstream.dump.records import EncodedGroup
from rollstream.dump.tee import MAX_WAITING, Tee
from rollstream.dump.writer import DumpWriter, Written
from rollstream.errors import RunMismatch
from tests.backstage import wait_until
from tests.builders import a_group


class Disk:
    """Opens a real dump; does what it is told before each write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: Callable[[], Any] = lambda: None
        self.opening: Callable[[], Any] = lambda: None

    def open(self) -> DumpWriter:
        self.opening()
        writer = DumpWriter.open(self.folder, run="r", fingerprint="f")
        write = writer.write_encoded

        def write_encoded(groups: Sequence[EncodedGroup], *args: Any) -> Written:
            self.before()
            return write(groups, *args)

        setattr(writer, "write_encoded", write_encoded)  # noqa: B010 - a disk, played
        return writer


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(tee, "MAX_WAIT_S", 0.05)
    return Disk(tmp_path)


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def ids(folder: Path) -> list[int]:
    return [group.group_index for group in read_groups(folder)]


def test_a_full_disk_is_said_once_counted_and_tried_again(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    given = Tee(disk.folder, disk.open)
    disk.before = no_space
    ids_failed: list[int] = []
    for i in range(3):
        given.take(Batch([a_group(i)]), 0)
        wait_until(lambda: given.num_failed > len(ids_failed))
        ids_failed.append(i)
    disk.before = lambda: None
    for i in range(3, 5):
        given.take(Batch([a_group(i)]), 0)
    given.close()
    assert ids(disk.folder) == [3, 4]
    assert given.figures()["stream/dump_failed_groups"] == 3
    assert given.figures()["stream/dumped_groups"] == 2
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "training goes on: [Errno 28] No space" in said[0]
    assert said[1] == "the dump is written again"


def test_a_disk_that_hangs_costs_the_groups_that_do_not_fit_into_memory(disk: Disk) -> None:
    given = Tee(disk.folder, disk.open)
    hanging, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert hanging.wait(60)

    disk.before = hang
    given.take(Batch([a_group(0)]), 0)
    assert begun.wait(60)
    for i in range(1, 10):  # returns: nobody waits for the disk
        given.take(Batch([a_group(i)]), 0)
    assert given.num_failed == 9 - MAX_WAITING
    hanging.set()
    given.close()
    assert ids(disk.folder) == list(range(1 + MAX_WAITING))
    figures = given.figures()
    assert figures["stream/dumped_groups"] + figures["stream/dump_failed_groups"] == 10


def test_a_disk_that_is_full_at_the_start_stops_no_training_and_is_opened_later(
    disk: Disk,
) -> None:
    disk.opening = no_space
    given = Tee(disk.folder, disk.open)
    given.take(Batch([a_group(0)]), 0)
    wait_until(lambda: given.num_failed == 1)
    disk.opening = lambda: None
    given.take(Batch([a_group(1)]), 0)
    given.close()
    assert ids(disk.folder) == [1]


def test_the_dump_of_another_run_is_refused_before_a_training(disk: Disk) -> None:
    DumpWriter.open(disk.folder, run="other", fingerprint="f").close()
    with pytest.raises(RunMismatch, match="take another folder"):
        Tee(disk.folder, disk.open)


def test_a_value_that_cannot_be_written_costs_its_batch_alone(disk: Disk) -> None:
    given = Tee(disk.folder, disk.open)
    group = a_group(0)
    group.flat()[0].metadata["mine"] = object()
    given.take(Batch([group]), 0)
    given.take(Batch([a_group(1)]), 0)
    given.close()
    assert (ids(disk.folder), given.num_failed) == ([1], 1)


def test_closing_twice_and_taking_behind_it_raise_nothing(disk: Disk) -> None:
    given = Tee(disk.folder, disk.open)
    given.close()
    given.close()
    given.take(Batch([a_group(0)]), 0)
    assert given.num_failed == 1


def test_a_folder_that_cannot_be_one_is_refused_before_a_training(disk: Disk) -> None:
    def open_writer() -> DumpWriter:
        return DumpWriter.open("no\0folder", run="r", fingerprint="f")

    with pytest.raises(ValueError, match="null byte"):
        Tee("no\0folder", open_writer)
