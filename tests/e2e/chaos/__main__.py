"""`python -m tests.e2e.chaos`: parse, run, print, exit. See docs/chaos.md."""

from __future__ import annotations

import shutil
import sys

from tests.e2e.chaos.options import VOCABULARY, parse
from tests.e2e.chaos.report import say
from tests.e2e.command import EXIT_INTERRUPTED, EXIT_WRONG, end_on_sigterm


def main() -> int:
    """Run chaos; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        say(f"there is no {VOCABULARY}; run make setup")
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from examples.demo.children import ChildFailed
    from tests.e2e.chaos.run import Chaos
    from tests.e2e.chaos.stage import ChaosFailed

    end_on_sigterm()
    chaos = Chaos(options)
    try:
        report = chaos.run()
    except KeyboardInterrupt:
        shutil.rmtree(chaos.folder, ignore_errors=True)
        say("stopped; every process that it started was ended")
        return EXIT_INTERRUPTED
    except (ChaosFailed, ChildFailed) as error:
        say(f"{error}\neverything is in {chaos.folder}")
        return EXIT_WRONG
    problems = report.problems()
    for line in (*problems, *report.findings):
        say(f"{line}")
    if options.keep or not report.is_clean:
        say(f"everything is in {chaos.folder}")
    sys.stdout.write(f"{report.to_json() if options.json else report.for_people()}\n")
    return EXIT_WRONG if problems else 0


if __name__ == "__main__":
    sys.exit(main())
