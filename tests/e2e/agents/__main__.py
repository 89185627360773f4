"""`python -m tests.e2e.agents`: parse, play, judge, measure, print, exit."""

from __future__ import annotations

import shutil
import sys
import time

from tests.e2e.agents.options import parse
from tests.e2e.agents.scenes import ROOT, VOCABULARY
from tests.e2e.command import (
    EXIT_INTERRUPTED,
    EXIT_WRONG,
    conclude,
    end_on_sigterm,
    new_folder,
    sayer,
)

KEPT_RUNS = 4
SAID_FINDINGS = 15


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"agents: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from tests.e2e.agents.report import Report
    from tests.e2e.agents.run import ChildFailed, SceneFailed, prove

    end_on_sigterm()
    folder = new_folder(ROOT / "out" / "agents", kept=KEPT_RUNS)
    report = Report(options.least_sessions, measures=options.calls > 0)
    started = time.monotonic()
    try:
        findings = prove(options, folder, report, sayer(silent=options.json))
    except KeyboardInterrupt:
        sys.stderr.write("agents: stopped; every process that it started was ended\n")
        return EXIT_INTERRUPTED
    except (ChildFailed, SceneFailed) as error:
        sys.stderr.write(f"agents: {error}\nEverything is in {folder}\n")
        return EXIT_WRONG
    report.seconds = time.monotonic() - started
    code = conclude("agents", report, findings[:SAID_FINDINGS], folder)
    if not code and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
