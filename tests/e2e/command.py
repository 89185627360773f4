"""What the commands that prove something have in common: a folder, words, an interrupt, an end.

Owns the command's side of a proof. Never plays one and never judges it. Invariant: a proof that
found something says what and where, and its folder stays.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

EXIT_WRONG, EXIT_INTERRUPTED = 1, 130


class Report(Protocol):
    """The figures of one run."""

    @property
    def broken(self) -> Sequence[str]:
        """Promises that were not kept."""

    @property
    def missing(self) -> Sequence[str]:
        """What happened too seldom to mean something."""

    def to_json(self) -> str:
        """Return the one line."""


def end_on_sigterm() -> None:
    """Make SIGTERM what Ctrl-C is, so that every process is ended."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def sayer(*, silent: bool) -> Callable[[str], None]:
    """Return what tells people how it goes."""
    return _silent if silent else _say


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _silent(text: str) -> None:
    del text


def new_folder(above: Path, *, kept: int) -> Path:
    """Return a new folder; `kept` with it stay, the older ones go."""
    above.mkdir(parents=True, exist_ok=True)
    older = sorted(above.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in older[: max(0, len(older) - kept + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    folder = above / secrets.token_hex(4)
    folder.mkdir()
    return folder


def conclude(name: str, report: Report, findings: Sequence[object], folder: Path) -> int:
    """Print the line, and what is wrong; return the exit code."""
    sys.stdout.write(report.to_json() + "\n")
    for finding in findings:
        _say(str(finding))
    for text in report.broken:
        _say(f"{name}: the promise is broken: {text}")
    for text in report.missing:
        _say(f"{name}: too little to mean something: {text}")
    if report.broken or report.missing:
        _say(f"Everything is in {folder}")
        return EXIT_WRONG
    return 0
