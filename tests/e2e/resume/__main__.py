"""`python -m tests.e2e.resume`: parse, run, print, exit."""

from __future__ import annotations

import sys
import time

from examples.demo.children import ChildFailed
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from tests.e2e.command import EXIT_INTERRUPTED, EXIT_WRONG, end_on_sigterm, new_folder
from tests.e2e.resume.cast import RUN
from tests.e2e.resume.director import Broken, Director
from tests.e2e.resume.options import ROOT, VOCABULARY, parse
from tests.e2e.resume.storage import Storage
from tests.e2e.resume.summary import summarize

KEPT_RUNS = 5
BY_A_REWIND = frozenset({"seen", "withdrawn", "run_aborted"})
"""Drops after which the prompt comes again, or that say that it was trained."""


def main() -> int:
    """Run once; return the exit code."""
    options = parse(sys.argv[1:])
    if not VOCABULARY.exists():
        sys.stderr.write(f"resume: there is no {VOCABULARY}; run make setup\n")
        return EXIT_WRONG
    end_on_sigterm()
    folder = new_folder(ROOT / "out" / "resume", kept=KEPT_RUNS)
    started = time.monotonic()
    storage = Storage()
    try:
        with storage.server:
            director = Director(options, folder, storage)
            survivor = director.run()
            dropped, problems = last_look(storage.url)
            summary = summarize(
                director, survivor, dropped=dropped, problems=len(problems),
                seconds=time.monotonic() - started,
            )  # fmt: skip
    except KeyboardInterrupt:
        sys.stderr.write("resume: stopped; every process that it started was ended\n")
        return EXIT_INTERRUPTED
    except (Broken, ChildFailed) as error:
        sys.stderr.write(f"resume: {error}\nEverything is in {folder}\n")
        return EXIT_WRONG
    sys.stdout.write(summary.to_json() + "\n")
    for problem in problems:
        sys.stderr.write(f"rollstream audit: {problem}\n")
    if not summary.kept:
        sys.stderr.write(f"resume: the promise was broken; everything is in {folder}\n")
        return EXIT_WRONG
    if not options.json:
        sys.stderr.write("every prompt was trained exactly once in the surviving history\n")
    return 0


def last_look(url: str) -> tuple[frozenset[int], list[str]]:
    """Return which prompts were dropped for good, and what the queue's own audit finds."""
    queue = BlockingQueue.connect(url, RUN)
    try:
        drops = [d for d in queue.past(1000) if d["reason"] not in BY_A_REWIND]
        problems = queue.call(calls.audit(deep=True)).problems
    finally:
        queue.close()
    return frozenset(int(drop["group_index"]) for drop in drops), problems


if __name__ == "__main__":
    sys.exit(main())
