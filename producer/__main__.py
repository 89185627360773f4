"""`python -m producer [--table.key value]...`: puts prompts into the queue, within capacity."""

from __future__ import annotations

import sys

from rollstream.config import Loaded, run_app


def main() -> int:
    """Run the producer; return its exit code."""
    name = __package__ or "producer"
    prog = "rollstream producer" if name.startswith("rollstream.") else f"python -m {name}"
    return run_app(_run, prog)


def _run(loaded: Loaded) -> int:
    # Behind the configuration: --help and a wrong key answer before anything heavy is imported.
    from .app import run

    return run(loaded)


if __name__ == "__main__":
    sys.exit(main())
