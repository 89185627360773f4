"""`python -m tests.e2e.weights`: parse, play, judge, print, exit."""

from __future__ import annotations

import sys

from tests.e2e.command import EXIT_WRONG, run_proof, sayer
from tests.e2e.weights.options import parse
from tests.e2e.weights.scenes import ROOT, VOCABULARY


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"weights: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from tests.e2e.weights.report import Report
    from tests.e2e.weights.run import ChildFailed, SceneFailed, prove

    report = Report(options.least_updates)
    return run_proof(
        "weights",
        report,
        lambda folder: prove(options, folder, report, sayer(silent=options.json)),
        root=ROOT,
        keeps=options.keep,
        failures=(ChildFailed, SceneFailed),
    )


if __name__ == "__main__":
    sys.exit(main())
