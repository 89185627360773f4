"""Writes a dump: whole batches, durably, each group's content once.

Owns the folder while it is open (a lock keeps every other writer out). Never acks anything.
Invariant: when `write` returns, the batch is on the disk under its final name and survives a power
cut; when it raises, or the process is killed at any instant, nothing of the batch is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rollstream import __version__
from rollstream.dump.format import (
    GROUP,
    HEAD,
    MANIFEST,
    TAIL,
    Head,
    Manifest,
    batch_files,
    batch_name,
    check_rules,
    frame,
    pack,
    read_manifest,
    start,
    temporary_name,
)
from rollstream.dump.reader import DumpIndex, remove_leftovers
from rollstream.dump.records import EncodedGroup, encode_group
from rollstream.errors import RunMismatch, WireError
from rollstream.group import EnvRule, FinishedGroup

LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one `write`."""

    path: Path | None
    """The new file; None where every group was there already."""
    num_groups: int
    num_bytes: int
    num_recognised: int
    """Groups that the dump had already, with the same content."""


class DumpWriter:
    """Appends batches to the dump in one folder; made where there is none."""

    def __init__(self, folder: Path, lock: int, index: DumpIndex) -> None:
        """Use `open`."""
        self.folder, self.manifest, self._lock = folder, index.manifest, lock
        self._next = max(index.heads, default=0) + 1
        # By the last record of each id: what counts when it is read.
        self._digests = {gid: dig for head in index.heads.values() for gid, dig in head.groups}

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        run: str,
        fingerprint: str,
        rules: Mapping[str, EnvRule] | None = None,
        weight_version: int = 0,
        total: int = 0,
    ) -> Self:
        """Make or go on with the dump of a run.

        Args:
            folder: made where it is missing.
            run: name of the run.
            fingerprint: of its data.
            rules: what of each environment decides usability.
            weight_version: the run's now.
            total: how many groups the run has in all.

        Raises:
            RunMismatch: the folder has the dump of another run, or of other data.
            BlockingIOError: another process writes to it.
            WireError: what is there cannot be read.
            OSError: the disk says no.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
        try:
            remove_leftovers(path)
            if (path / MANIFEST).exists():
                manifest = read_manifest(path)
                _refuse_others(path, manifest, run, fingerprint)
            else:
                manifest = Manifest(
                    run=run,
                    fingerprint=fingerprint,
                    dump=secrets.token_hex(8),
                    created_unix_s=time.time(),
                    weight_version=weight_version,
                    total=total,
                    rules=dict(rules or {}),
                    rollstream=__version__,
                )
                _begin(path, manifest)
            return cls(path, lock, DumpIndex(path, manifest))
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Let others write."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, groups: Iterable[FinishedGroup], kind: str, weight_version: int = 0) -> Written:
        """Write groups as one batch; those that the dump has with this very content are left out.

        Raises:
            WireError: a value without a wire form.
            OSError: the disk says no; nothing of the batch is there.
        """
        return self.write_encoded([encode_group(g) for g in groups], kind, weight_version)

    def write_encoded(
        self, groups: Sequence[EncodedGroup], kind: str, weight_version: int = 0
    ) -> Written:
        """Write groups that `encode_group` made; see `write`."""
        new = [g for g in groups if self._digests.get(g.group_index) != g.digest]
        if not new:
            return Written(None, 0, 0, len(groups))
        ids = [(g.group_index, g.digest) for g in new]
        head = Head(self.manifest.dump, self._next, ids, kind, weight_version, time.time())
        path = self.folder / batch_name(self._next)
        num_bytes = write_durably(path, _pieces(head, new))
        self._next += 1
        self._digests.update(ids)
        return Written(path, len(new), num_bytes, len(groups) - len(new))


def _pieces(head: Head, groups: Sequence[EncodedGroup]) -> Iterator[bytes]:
    yield start()
    yield from frame(HEAD, head.to_payload())
    yield from itertools.chain.from_iterable(frame(GROUP, g.payload) for g in groups)
    yield from frame(TAIL, pack({"groups": len(groups)}, "tail"))


def _begin(folder: Path, manifest: Manifest) -> None:
    if batch_files(folder):
        raise WireError(f"{folder} has batches of a dump, and no {MANIFEST}: take another folder")
    check_rules(manifest.rules)
    write_durably(folder / MANIFEST, [manifest.to_json().encode()])
    _sync(folder.parent)  # the folder itself may be new


def _refuse_others(folder: Path, manifest: Manifest, run: str, fingerprint: str) -> None:
    if (manifest.run, manifest.fingerprint) != (run, fingerprint):
        raise RunMismatch(
            f"{folder} has the dump of run {manifest.run!r} (fingerprint {manifest.fingerprint!r}),"
            f" not of {run!r} ({fingerprint!r}): take another folder"
        )


def _locked(folder: Path) -> int:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BlockingIOError(f"{folder}: another process writes to this dump") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def write_durably(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a new file that is whole or not there, also after a power cut; return its size.

    Raises:
        OSError: the disk says no; nothing is left behind.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left) or 0 :]
            os.fsync(file.fileno())
            size = file.tell()
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    try:
        _sync(path.parent)
    except BaseException:
        # Under its name, and perhaps not for ever: whoever is told that it failed writes it again.
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return size


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
