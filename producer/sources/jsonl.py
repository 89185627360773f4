"""`jsonl:PATH`: one JSON object a line.

Owns the index of the file (where each row begins) and the reading of one row. Never holds more
than one row. Invariant: JSON is read strictly (UTF-8, no NaN, no key twice, no number without a
finite value), and a file that changes under a run is an error, not other prompts.

One pass at the start hashes the content and finds the rows: blank lines are none, a byte order
mark and CRLF are taken. 12 bytes a row stay in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any, BinaryIO

from rollstream.errors import ConfigError

from . import BadRow, Row

MAX_ROW_BYTES = 16 << 20
CHECKED_BYTES = 128 << 20
CHECKED_ROWS = 200_000
"""Rows before both bounds are checked before anything is enqueued (some seconds of work)."""
_BOM = b"\xef\xbb\xbf"


class JsonlSource:
    """A file of JSON lines."""

    def __init__(self, path: str) -> None:
        self._offsets = array("Q")
        self._lines = array("I")
        try:
            self.path = Path(path).expanduser()
            kind = stat.S_IFMT(self.path.stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                # Rows are read at random, and a pipe or a device may have no end.
                raise ConfigError(f"{path} is not a file: write the rows to one")
            # Kept open: a file that is replaced by name stays what it was for this process.
            self._file: BinaryIO = self.path.open("rb")
            self._stamp = self._stamp_now()
            digest, size = self._index()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RuntimeError) as error:  # a null byte, the home of an unknown user
            raise ConfigError(f"{path!r} is no path: {error}") from None
        if (size, self._stamp) != (self._stamp[0], self._stamp_now()):
            self.close()
            raise ConfigError(f"{path} changed while it was read; start again once it is whole")
        if not self._offsets:
            self.close()
            raise ConfigError(f"{path} holds no rows")
        self.num_checked = min(CHECKED_ROWS, bisect_left(self._offsets, CHECKED_BYTES))
        self._offsets.append(size)
        self.fingerprint = f"jsonl {digest[:32]}"

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._lines)

    def row(self, number: int) -> Row:
        """Return row `number`; reads its bytes and nothing else."""
        where = f"{self.path}:{self._lines[number]}"
        start, end = self._offsets[number], self._offsets[number + 1]
        try:
            unchanged = self._stamp_now() == self._stamp
            # Blank lines may follow, so the span is no bound of the row itself.
            raw = os.pread(self._file.fileno(), min(end - start, MAX_ROW_BYTES + 2), start)
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
        if not unchanged:
            raise ConfigError(
                f"{self.path} changed while the run reads it; "
                "put it back, or start another run.name with the new file"
            )
        line = raw.partition(b"\n")[0].removeprefix(_BOM if number == 0 else b"").strip()
        if len(line) > MAX_ROW_BYTES:
            raise BadRow(where, f"the row is larger than {MAX_ROW_BYTES >> 20} MiB")
        return Row(where, parse_line(line, where))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self) -> tuple[str, int]:
        digest, offset, number = hashlib.sha256(), 0, 0
        while line := self._file.readline(MAX_ROW_BYTES):
            number += 1
            digest.update(line)
            if line.removeprefix(_BOM if number == 1 else b"").strip():
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)
            while line and not line.endswith(b"\n"):  # the rest of a line too long to hold
                line = self._file.readline(MAX_ROW_BYTES)
                digest.update(line)
                offset += len(line)
        return digest.hexdigest(), offset

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the object on one line.

    Raises:
        BadRow: not strict JSON, or not an object.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(where, f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise BadRow(where, f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise BadRow(where, "not JSON: nested too deeply") from None
    except ValueError as error:
        raise BadRow(where, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow(where, f"expected a JSON object, found {_KINDS.get(type(value), 'null')}")
    return value


_KINDS: dict[type, str] = {
    list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false",
}  # fmt: skip


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name!r} stands twice")
            seen.add(name)
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value
