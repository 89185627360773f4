"""`python -m tests.e2e.fidelity`: roll out, compare, print, exit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time

from examples.demo.children import ChildFailed
from rollstream.errors import StreamError
from tests.e2e.command import (
    EXIT_INTERRUPTED,
    EXIT_WRONG,
    conclude,
    end_on_sigterm,
    new_folder,
    sayer,
)
from tests.e2e.fidelity.options import ROOT, VOCABULARY, parse
from tests.e2e.fidelity.proof import judge, roll_out
from tests.e2e.fidelity.report import Report

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
    end_on_sigterm()
    folder = new_folder(ROOT / "out" / "fidelity", kept=KEPT_RUNS)
    report, started = Report(asked=options.samples), time.monotonic()
    say = sayer(silent=options.json)
    try:
        findings = judge(roll_out(options, folder, report, say), report, options.damage, say)
    except KeyboardInterrupt:
        sys.stderr.write("fidelity: stopped; every process that it started was ended\n")
        return EXIT_INTERRUPTED
    except (ChildFailed, StreamError) as error:
        sys.stderr.write(f"fidelity: {error}\nEverything is in {folder}\n")
        return EXIT_WRONG
    report.seconds["all"] = time.monotonic() - started
    code = conclude("fidelity", report, findings[:SAID_FINDINGS], folder)
    if not code:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
