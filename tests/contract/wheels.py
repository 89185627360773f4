"""Reads single files out of the engines' published wheels, without fetching or installing them.

Owns where a wheel is (pip says it) and which bytes of it are asked for. Never names a registry: pip
is asked as it is set up on this machine. Invariant: what is read is a member of the very wheel that
pip would install, and `bytes_read` says what that cost.

Both wheels are large (SGLang 39 MB, vLLM several hundred), and a contract needs a few files of
source: a wheel is a zip archive, whose members can be asked for one by one by HTTP range.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLATFORM = (
    *("--implementation", "cp", "--python-version", "3.11"),
    *("--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64"),
    *("--abi", "cp311", "--abi", "abi3", "--abi", "none"),
)
"""The same wheel whatever machine this is: it is read, not run."""
_BLOCK = 256 << 10
"""Least that is asked for at once; the list of members lies at the end of the archive."""


class NoWheelError(RuntimeError):
    """The wheel can be neither found nor read; says what to do."""


@dataclass(frozen=True)
class Wheel:
    """Where pip says that a wheel is."""

    requirement: str
    url: str


def find(requirement: str, *, timeout_s: float = 60.0) -> Wheel:
    """Ask pip which wheel it would install; it reads the metadata, and not the wheel.

    Raises:
        NoWheelError: pip reaches no package index, or finds none.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", *_PLATFORM),
            *("--target", folder, "--report", str(report), requirement),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            error = done.stderr.strip().splitlines()[-1:] or [""]
        except subprocess.TimeoutExpired:
            error = [f"pip did not end within {timeout_s:g} s"]
        if not report.exists():
            raise NoWheelError(
                f"the wheel {requirement} could not be found; run this again with access to a "
                f"package index ({error[0]})"
            )
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return Wheel(requirement, found[0]["download_info"]["url"])


class RangeReader(io.RawIOBase):
    """A file behind HTTP, read in blocks as they are asked for.

    Attributes:
        bytes_read: what came over the network.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        """Ask how long the file is."""
        super().__init__()
        self._url, self._timeout_s = url, timeout_s
        self._position = 0
        self._held: tuple[int, bytes] = (0, b"")
        self.bytes_read = 0
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=timeout_s
            ) as answer:
                self.size = int(answer.headers["content-length"])
        except (OSError, TypeError, ValueError) as error:
            raise NoWheelError(f"the wheel cannot be asked for its length: {error}") from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), self.size - self._position)
        if wanted <= 0:
            return 0
        start, held = self._held
        offset = self._position - start
        if not 0 <= offset < len(held) or offset + wanted > len(held):
            start, held = self._held = self._position, self._fetch(self._position, wanted)
            offset = 0
        piece = held[offset : offset + wanted]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _fetch(self, start: int, wanted: int) -> bytes:
        end = min(self.size, start + max(wanted, _BLOCK)) - 1
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end}"})
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            if answer.status != 206:
                raise NoWheelError("the package index does not answer range requests")
            data: bytes = answer.read()
        self.bytes_read += len(data)
        return data


def read_members(wheel: Wheel, members: Iterable[str]) -> tuple[dict[str, str], int]:
    """Return {member: its text}, and how many bytes that took.

    Raises:
        NoWheelError: the index serves no ranges, or the wheel has no such member.
    """
    raw = RangeReader(wheel.url)
    texts: dict[str, str] = {}
    with zipfile.ZipFile(io.BufferedReader(raw, _BLOCK)) as archive:
        for member in members:
            try:
                texts[member] = archive.read(member).decode("utf-8")
            except KeyError:
                raise NoWheelError(f"{wheel.requirement} has no {member}") from None
    return texts, raw.bytes_read
