"""Reads a dump: its batches in order, each group once.

Owns which record of a group counts: the last one that was written. Never writes. Invariant: groups
come in the order of their files, and a group that was sampled again (its run was rewound to a
checkpoint, or it was requeued) comes once, where it was written last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from rollstream.batch import Batch
from rollstream.dump.format import (
    FrameReader,
    Head,
    Manifest,
    batch_files,
    is_temporary,
    read_group_payloads,
    read_head,
    read_manifest,
    unpack,
)
from rollstream.dump.records import decode_group
from rollstream.errors import WireError, WireTooNew
from rollstream.group import FinishedGroup


def read_batches(folder: str | os.PathLike[str], *, text: bool = True) -> Iterator[Batch]:
    """Yield the batches of a dump as they were written; one file at a time is in memory.

    A batch whose groups were all written again later is left out.

    Args:
        folder: of the dump.
        text: with the response texts, where the dump has them.

    Raises:
        WireError: a file is truncated, corrupt or of something else; the message names it and the
            byte (`WireTooNew`: it is of a newer version).
        OSError: it cannot be read.
    """
    index = DumpIndex(folder)
    for number in index.heads:
        if groups := list(index.groups(number, text=text)):
            yield Batch(groups, number)


def read_groups(
    folder: str | os.PathLike[str], only: Container[int] | None = None, *, text: bool = True
) -> Iterator[FinishedGroup]:
    """Yield the groups of a dump in order.

    Args:
        folder: of the dump.
        only: ids of the groups to read; None is all. Files without one are not read further.
        text: with the response texts, where the dump has them.

    Raises:
        WireError: as `read_batches`.
        OSError: it cannot be read.
    """
    index = DumpIndex(folder)
    for number in index.heads:
        yield from index.groups(number, only=only, text=text)


class DumpIndex:
    """What is where in a dump, by the heads of its files.

    Attributes:
        manifest: of the dump.
        heads: by the number of the batch, in order.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        """Read the head of every file.

        Raises:
            WireError: as `read_batches`.
            OSError: one cannot be read.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self._files = batch_files(self.folder)
        self.heads = {number: self._head(number) for number in self._files}
        self.last: dict[int, int] = {}
        """Id to the number of the batch that has its last record."""
        for number, head in self.heads.items():
            self.last.update((gid, number) for gid, _ in head.groups)

    @property
    def group_indexes(self) -> list[int]:
        """The ids of all groups, in the order in which they are read."""
        return [
            gid
            for number, head in self.heads.items()
            for gid, _ in head.groups
            if self.last[gid] == number
        ]

    def groups(
        self, number: int, *, only: Container[int] | None = None, text: bool = True
    ) -> Iterator[FinishedGroup]:
        """Yield the groups of one batch whose last record is there."""
        head, path = self.heads[number], self._files[number]
        wanted = [
            self.last[gid] == number and (only is None or gid in only) for gid, _ in head.groups
        ]
        if not any(wanted):
            return
        with path.open("rb") as file:
            reader = FrameReader(file, path)
            if read_head(reader) != head:
                raise reader.broken("the file is another than before")
            for place, payload in read_group_payloads(reader, head, wanted):
                yield _group_of(reader, unpack(reader, payload), head.groups[place][0], text=text)

    def _head(self, number: int) -> Head:
        path = self._files[number]
        with path.open("rb") as file:
            reader = FrameReader(file, path)
            head = read_head(reader)
        if (head.dump, head.number) != (self.manifest.dump, number):
            raise reader.broken(
                f"it is batch {head.number} of dump {head.dump}, not batch {number} of "
                f"{self.manifest.dump}"
            )
        return head


def _group_of(
    reader: FrameReader, record: dict[str, Any], group_index: int, *, text: bool
) -> FinishedGroup:
    try:
        group = decode_group(record, text=text)
    except WireTooNew as error:
        raise WireTooNew(str(reader.broken(str(error)))) from None
    except WireError as error:
        raise reader.broken(str(error)) from None
    if group.group_index != group_index:
        raise reader.broken(f"group {group.group_index} stands where {group_index} should")
    return group


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed began and never finished."""
    for name in os.listdir(folder):
        if is_temporary(name):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()
