"""`python -m tests.e2e.weights`: parse, play, judge, print, exit."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tests.e2e.weights.options import parse
from tests.e2e.weights.scenes import ROOT, VOCABULARY

EXIT_WRONG, EXIT_INTERRUPTED = 1, 130
KEPT_RUNS = 4
SAID_FINDINGS = 15


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"weights: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from tests.e2e.weights.report import Report
    from tests.e2e.weights.run import ChildFailed, SceneFailed, prove

    signal.signal(signal.SIGTERM, _interrupt)
    folder = new_folder(ROOT / "out" / "weights")
    report, started = Report(options.least_updates), time.monotonic()
    try:
        findings = prove(options, folder, report, _silent if options.json else _say)
    except KeyboardInterrupt:
        sys.stderr.write("weights: stopped; every process that it started was ended\n")
        return EXIT_INTERRUPTED
    except (ChildFailed, SceneFailed) as error:
        sys.stderr.write(f"weights: {error}\nEverything is in {folder}\n")
        return EXIT_WRONG
    report.seconds = time.monotonic() - started
    sys.stdout.write(report.to_json() + "\n")
    for finding in findings[:SAID_FINDINGS]:
        sys.stderr.write(f"{finding}\n")
    for text in report.broken:
        sys.stderr.write(f"weights: the promise is broken: {text}\n")
    for text in report.missing:
        sys.stderr.write(f"weights: too little to mean something: {text}\n")
    if report.broken or report.missing:
        sys.stderr.write(f"Everything is in {folder}\n")
        return EXIT_WRONG
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _silent(text: str) -> None:
    del text


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def new_folder(above: Path) -> Path:
    """Return a new folder; of the older ones the latest few are kept."""
    above.mkdir(parents=True, exist_ok=True)
    older = sorted(above.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in older[: -KEPT_RUNS + 1]:
        shutil.rmtree(path, ignore_errors=True)
    folder = above / secrets.token_hex(4)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
