"""`python -m producer [--fresh] [--table.key value]...`: puts prompts into the queue.

`--fresh` stands on the command line only: in a file it would remove the run at every restart.
"""

from __future__ import annotations

import functools
import sys

from rollstream.config import EXIT_CONFIG, Loaded, run_app

FORCE = "--fresh=force"
FRESH = ("--fresh", FORCE)


def main() -> int:
    """Run the producer; return its exit code."""
    name = __package__ or "producer"
    prog = "rollstream producer" if name.startswith("rollstream.") else f"python -m {name}"
    argv = sys.argv[1:]
    for arg in argv:
        if arg.startswith("--fresh") and arg not in FRESH:
            sys.stderr.write(f"{prog}: error: {arg}: expected {' or '.join(FRESH)}\n")
            return EXIT_CONFIG
    asked = [arg for arg in argv if arg in FRESH]
    rest = [arg for arg in argv if arg not in FRESH]
    return run_app(functools.partial(_run, fresh=asked[-1] if asked else ""), prog, rest)


def _run(loaded: Loaded, fresh: str) -> int:
    # Behind the configuration: --help and a wrong key answer before anything heavy is imported.
    from .app import run

    return run(loaded, fresh=bool(fresh), force=fresh == FORCE)


if __name__ == "__main__":
    sys.exit(main())
