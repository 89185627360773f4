"""A dump that is read gives out every group, also to a trainer that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream import GroupStream
from rollstream.dump import reader
from rollstream.dump.stream import DumpStream
from rollstream.dump.writer import DumpWriter
from tests.builders import a_group


def dump_of(folder: Path, files: int, groups_a_file: int) -> None:
    with DumpWriter.open(folder, run="r", fingerprint="f") as writer:
        for number in range(files):
            first = number * groups_a_file
            writer.write([a_group(first + i) for i in range(groups_a_file)], "taken")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", range(1, 7))
def test_no_group_is_left_out_where_reading_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int
) -> None:
    dump_of(tmp_path, files=2, groups_a_file=3)
    real, count = reader._group_of, 0

    def interrupted(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return real(*args, **named)

    monkeypatch.setattr(reader, "_group_of", interrupted)
    seen: list[int] = []

    def train(stream: GroupStream) -> None:
        for batch in stream.batches(groups=2):
            seen.extend(batch.group_indexes)
            batch.ack()

    with GroupStream.from_dump(tmp_path, epochs=2) as stream:
        with pytest.raises(error):
            train(stream)
        train(stream)
    assert seen == [*range(6), *range(6)]


def test_any_number_of_epochs_of_an_empty_dump_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump_of(tmp_path, files=0, groups_a_file=0)
    looks = 0
    with GroupStream.from_dump(tmp_path, epochs=1000) as stream:
        assert isinstance(stream, DumpStream)
        real = stream._next_group

        def counted() -> Any:
            nonlocal looks
            looks += 1
            return real()

        monkeypatch.setattr(stream, "_next_group", counted)
        assert list(stream.batches(groups=2)) == []
    assert looks < 10
