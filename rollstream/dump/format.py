"""The files of a dump: a manifest, and one file of checksummed frames per batch.

Owns names, framing, checksums and the format's version. Never knows what is in a group's frame
(`rollstream.dump.records` does). Invariant: a file is read whole and sound, or refused with its
name and the byte at which it is not.

    manifest.json          what the dump is of: run, fingerprint, versions, rule of usability
    batch-00000001.rsd     "rollstream dump" and a newline, uint32 format version, frames
        frame              4 bytes kind, uint64 length, uint32 CRC-32 of kind, length and payload,
                           payload (MessagePack); all numbers little-endian
        head               first: run, fingerprint, dump, number, groups [[id, digest], ...]
        grup               one per group, in order
        tail               last: how many groups there were; nothing follows
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgpack

from rollstream.errors import WireError, WireTooNew
from rollstream.group import EnvRule
from rollstream.wire import WIRE_VERSION, decode_envs, encode_envs

FORMAT_VERSION = 1
MAGIC = b"rollstream dump\n"
MANIFEST = "manifest.json"
HEAD, GROUP, TAIL = b"head", b"grup", b"tail"
MAX_MANIFEST_BYTES = 16 << 20
_FORMAT_NAME = "rollstream-dump"
_START = struct.Struct("<16sI")
_FRAME = struct.Struct("<4sQI")
_NAME = re.compile(r"batch-([0-9]{8,18})\.rsd")
_TEMPORARY = ".tmp-"


def batch_name(number: int) -> str:
    """Return the name of the file of a batch."""
    return f"batch-{number:08d}.rsd"


def temporary_name(name: str) -> str:
    """Return the name of a file of the dump while it is written."""
    return f"{_TEMPORARY}{name}"


def is_temporary(name: str) -> bool:
    """Return whether a file is one that a writer of ours had begun; others may have their own."""
    of = name.removeprefix(_TEMPORARY)
    return of != name and (of == MANIFEST or _NAME.fullmatch(of) is not None)


def batch_files(folder: Path) -> dict[int, Path]:
    """Return the files of all batches by number, in order.

    Raises:
        WireError: one in the middle is missing.
        OSError: the folder cannot be read.
    """
    names = [m for m in map(_NAME.fullmatch, os.listdir(folder)) if m]
    # Only as we write it: a copy with one more zero would stand for the file itself.
    found = {int(m[1]): folder / m[0] for m in names if m[0] == batch_name(int(m[1]))}
    for number in range(1, max(found, default=0) + 1):
        if number not in found:
            raise WireError(
                f"{folder / batch_name(number)} is missing, and later batches are there: a dump is "
                "read as a whole"
            )
    return dict(sorted(found.items()))


# --- manifest ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a dump is of; written once, before its first batch."""

    run: str
    fingerprint: str
    dump: str
    """16 hex, new for every dump: its batches carry it, so none of another's is taken for one."""
    created_unix_s: float
    weight_version: int = 0
    """The run's when the dump began."""
    total: int = 0
    """How many groups the run has in all; 0 is unknown."""
    rules: Mapping[str, EnvRule] = field(default_factory=dict)
    """What of each environment decided which members are usable."""
    format: int = FORMAT_VERSION
    wire: int = WIRE_VERSION
    rollstream: str = ""

    def to_json(self) -> str:
        """Return the file's text."""
        plain = {
            "is": _FORMAT_NAME,
            "created": datetime.fromtimestamp(self.created_unix_s, UTC).isoformat(),
            **{name: getattr(self, name) for name in _PLAIN},
            "rules": {env: asdict(rule) for env, rule in self.rules.items()},
        }
        return json.dumps(plain, indent=2) + "\n"


_PLAIN = {
    "format": int, "wire": int, "rollstream": str, "run": str, "fingerprint": str, "dump": str,
    "created_unix_s": float, "weight_version": int, "total": int,
}  # fmt: skip


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Return what a dump is of.

    Raises:
        WireError: there is no dump in `folder`, or its manifest is none of ours (`WireTooNew`: of a
            newer version).
        OSError: it cannot be read.
    """
    path = Path(folder) / MANIFEST
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise WireError(f"{folder} is no dump: there is no {MANIFEST} in it") from None
    try:
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        record = json.loads(raw)
        if not isinstance(record, dict) or record.get("is") != _FORMAT_NAME:
            raise ValueError(f"it does not say that it is a {_FORMAT_NAME!r}")
        _refuse_newer(str(path), "format", record.get("format"), FORMAT_VERSION)
        _refuse_newer(str(path), "wire version", record.get("wire"), WIRE_VERSION)
        known = {name: record[name] for name in _PLAIN}
        for name, kind in _PLAIN.items():
            if not isinstance(known[name], (int, float) if kind is float else kind):
                raise ValueError(f"{name!r} is {known[name]!r}")
        # Through the wire's codec, which knows what a rule may say.
        rules = decode_envs(msgpack.packb({"v": WIRE_VERSION, "envs": record["rules"]}))
    except WireTooNew:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise WireError(f"{path} is no manifest of a dump: {why}") from None
    return Manifest(**known, rules=rules)


def check_rules(rules: Mapping[str, EnvRule]) -> None:
    """Refuse rules that would not be read back."""
    decode_envs(encode_envs(rules))


def _refuse_newer(where: str, what: str, version: Any, known: int) -> None:
    if type(version) is not int or version < 1:
        raise ValueError(f"{what} is {version!r}")
    if version > known:
        raise WireTooNew(f"{where}: {what} {version} is newer than {known}; upgrade rollstream")


# --- frames --------------------------------------------------------------------------------------
def start() -> bytes:
    """Return the first bytes of every batch's file."""
    return _START.pack(MAGIC, FORMAT_VERSION)


def frame(kind: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return a frame as its header and its payload."""
    return _FRAME.pack(kind, len(payload), _checksum(kind, payload)), payload


def _checksum(kind: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(kind + len(payload).to_bytes(8, "little")))


class FrameReader:
    """Reads one batch's file, frame by frame.

    Attributes:
        offset: byte at which the last frame began.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        """Check that it is a file of ours.

        Raises:
            WireError: it is not, or of a newer format.
        """
        self._file, self._path, self.offset = file, path, 0
        self._size = os.fstat(file.fileno()).st_size
        raw = file.read(_START.size)
        if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
            raise self.broken("not a file of a dump")
        if len(raw) < _START.size:
            raise self.broken("truncated")
        version = _START.unpack(raw)[1]
        if version > FORMAT_VERSION:
            raise WireTooNew(
                f"{path}: format {version} is newer than {FORMAT_VERSION}; upgrade rollstream"
            )
        if version < 1:
            raise self.broken("not a file of a dump")

    def broken(self, why: str) -> WireError:
        """Return the error of a file that cannot be read, with the byte."""
        return WireError(f"{self._path} at byte {self.offset}: {why}")

    def next(self, *, skip: bool = False) -> tuple[bytes, bytes]:
        """Return the kind and the payload of the next frame.

        Args:
            skip: leave the payload out, unread and unchecked.

        Raises:
            WireError: truncated or corrupt.
        """
        self.offset = self._file.tell()
        raw = self._file.read(_FRAME.size)
        if len(raw) < _FRAME.size:
            raise self.broken("truncated")
        kind, length, checksum = _FRAME.unpack(raw)
        if kind not in (HEAD, GROUP, TAIL):
            raise self.broken(f"corrupt: no kind of frame is {kind!r}")
        if length > self._size - self._file.tell():  # before anything of that size is made
            raise self.broken("truncated, or corrupt: the frame would end behind the file")
        if skip:
            self._file.seek(length, os.SEEK_CUR)
            return kind, b""
        payload = self._file.read(length)
        if len(payload) < length or _checksum(kind, payload) != checksum:
            raise self.broken("corrupt: the checksum of the frame is another")
        return kind, payload

    def refuse_more(self) -> None:
        """Refuse a file that goes on behind its last frame."""
        self.offset = self._file.tell()
        if self.offset != self._size:
            raise self.broken("corrupt: there is more behind the last frame")


def unpack(reader: FrameReader, payload: bytes) -> dict[str, Any]:
    """Return the record of a frame.

    Raises:
        WireError: none.
    """
    try:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise reader.broken(f"not a record: {type(error).__name__} {error}") from None
    if not isinstance(record, dict):
        raise reader.broken("not a record")
    return record


def pack(record: Mapping[str, Any], what: str) -> bytes:
    """Return the payload of a frame.

    Raises:
        WireError: a value without a wire form.
    """
    try:
        packed: bytes = msgpack.packb(record, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{what}: a value has no wire form: {error}") from None
    return packed


@dataclass(frozen=True, slots=True)
class Head:
    """What the file of a batch says of itself before its groups."""

    dump: str
    number: int
    groups: list[tuple[int, bytes]]
    """(id, digest) of every group, in order."""
    kind: str
    """`taken` by `rollstream dump`, `peeked` at, or `trained`: handed out to a trainer."""
    weight_version: int
    written_unix_s: float

    def to_payload(self) -> bytes:
        """Return the frame's payload."""
        record = asdict(self) | {"wire": WIRE_VERSION}
        return pack(record, f"head of batch {self.number}")


def read_head(reader: FrameReader) -> Head:
    """Return what the first frame says.

    Raises:
        WireError: it says nothing of ours, or of a newer wire version.
    """
    kind, payload = reader.next()
    if kind != HEAD:
        raise reader.broken("corrupt: the first frame is no head")
    record = unpack(reader, payload)
    try:
        _refuse_newer(f"byte {reader.offset}", "wire version", record["wire"], WIRE_VERSION)
        head = Head(
            dump=record["dump"],
            number=record["number"],
            groups=[(gid, digest) for gid, digest in record["groups"]],
            kind=record["kind"],
            weight_version=record["weight_version"],
            written_unix_s=record["written_unix_s"],
        )
        if not all(type(gid) is int and isinstance(dig, bytes) for gid, dig in head.groups):
            raise ValueError("groups are named by other things than numbers and digests")
    except WireTooNew as error:
        raise WireTooNew(f"{reader.broken(str(error))}") from None
    except (LookupError, TypeError, ValueError) as error:
        raise reader.broken(f"not a head: {error!r}") from None
    return head


def read_group_payloads(
    reader: FrameReader, head: Head, wanted: list[bool]
) -> Iterator[tuple[int, bytes]]:
    """Yield (place, payload) of the wanted groups; behind the last, check that the file ends there.

    Raises:
        WireError: truncated, corrupt, or another number of groups than the head says.
    """
    for place in range(len(head.groups)):
        kind, payload = reader.next(skip=not wanted[place])
        if kind != GROUP:
            raise reader.broken(f"corrupt: {len(head.groups)} groups are announced, {place} there")
        if wanted[place]:
            yield place, payload
    kind, payload = reader.next()
    if kind != TAIL or unpack(reader, payload).get("groups") != len(head.groups):
        raise reader.broken("corrupt: the last frame is no tail of these groups")
    reader.refuse_more()
