"""`python -m tests.e2e.fidelity`: roll out, compare, print, exit."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from examples.demo.children import ChildFailed
from rollstream.errors import StreamError
from tests.e2e.fidelity.options import ROOT, VOCABULARY, parse
from tests.e2e.fidelity.proof import judge, roll_out
from tests.e2e.fidelity.report import Report

EXIT_WRONG, EXIT_INTERRUPTED = 1, 130
KEPT_RUNS = 2
"""A run keeps two models, 160 MB."""
SAID_FINDINGS = 12


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"fidelity: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("fidelity: it runs a real model, which needs PyTorch; run make hf\n")
        return EXIT_WRONG
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, _interrupt)
    folder = new_folder(ROOT / "out" / "fidelity")
    report, started = Report(asked=options.samples), time.monotonic()
    say = _silent if options.json else _say
    try:
        findings = judge(roll_out(options, folder, report, say), report, options.damage, say)
    except KeyboardInterrupt:
        sys.stderr.write("fidelity: stopped; every process that it started was ended\n")
        return EXIT_INTERRUPTED
    except (ChildFailed, StreamError) as error:
        sys.stderr.write(f"fidelity: {error}\nEverything is in {folder}\n")
        return EXIT_WRONG
    report.seconds["all"] = time.monotonic() - started
    sys.stdout.write(report.to_json() + "\n")
    for finding in findings[:SAID_FINDINGS]:
        sys.stderr.write(f"{finding}\n")
    for text in report.broken:
        sys.stderr.write(f"fidelity: the promise is broken: {text}\n")
    for text in report.missing:
        sys.stderr.write(f"fidelity: too little to mean something: {text}\n")
    if report.broken or report.missing:
        sys.stderr.write(f"Everything is in {folder}\n")
        return EXIT_WRONG
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
