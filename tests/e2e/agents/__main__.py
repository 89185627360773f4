"""`python -m tests.e2e.agents`: parse, play, judge, measure, print, exit."""

from __future__ import annotations

import sys

from tests.e2e.agents.options import parse
from tests.e2e.agents.scenes import ROOT, VOCABULARY
from tests.e2e.command import EXIT_WRONG, run_proof, sayer


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"agents: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from tests.e2e.agents.report import Report
    from tests.e2e.agents.run import ChildFailed, SceneFailed, prove

    report = Report(options.least_sessions, measures=options.calls > 0)
    return run_proof(
        "agents",
        report,
        lambda folder: prove(options, folder, report, sayer(silent=options.json)),
        root=ROOT,
        keeps=options.keep,
        failures=(ChildFailed, SceneFailed),
    )


if __name__ == "__main__":
    sys.exit(main())
