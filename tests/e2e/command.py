"""What the commands that prove something have in common: a folder, words, an interrupt, an end.

Owns the command's side of a proof. Never plays one and never judges it. Invariant: a proof that
found something says what and where, and its folder stays.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

EXIT_WRONG, EXIT_INTERRUPTED = 1, 130
KEPT_RUNS = 4
"""Folders of earlier runs that stay, this one included."""
SAID_FINDINGS = 15


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


class TimedReport(Report, Protocol):
    """One that says how long it took."""

    seconds: float


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


def run_proof(
    name: str,
    report: TimedReport,
    prove: Callable[[Path], Sequence[object]],
    *,
    root: Path,
    keeps: bool,
    failures: tuple[type[Exception], ...],
) -> int:
    """Run a proof in a new folder, and print what it gave; return the exit code.

    Args:
        name: of the command.
        report: gets its seconds.
        prove: plays it, given the folder; returns what is wrong.
        root: of the checkout.
        keeps: the folder stays also where nothing is wrong.
        failures: what it raises where it came to no end.
    """
    end_on_sigterm()
    folder = new_folder(root / "out" / name, kept=KEPT_RUNS)
    started = time.monotonic()
    try:
        findings = prove(folder)
    except KeyboardInterrupt:
        _say(f"{name}: stopped; every process that it started was ended")
        return EXIT_INTERRUPTED
    except failures as error:
        _say(f"{name}: {error}\nEverything is in {folder}")
        return EXIT_WRONG
    report.seconds = time.monotonic() - started
    code = conclude(name, report, findings[:SAID_FINDINGS], folder)
    if not code and not keeps:
        shutil.rmtree(folder, ignore_errors=True)
    return code


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
