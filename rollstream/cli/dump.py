"""The arguments of `dump`.

Owns what may be asked. Never does it: `rollstream.cli.dumping` does, imported when it is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_dump(
    commands: Any,
    parents: list[argparse.ArgumentParser],
    count: Callable[[str], int],
    seconds: Callable[[str], float],
) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "dump",
        parents=parents,
        help="write finished groups to files, for GroupStream.from_dump",
        description=(
            "Become the run's trainer (one that is connected is taken over), write each batch "
            "to DIR, then ack it. A repeat goes on where the last one ended."
        ),
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="of the dump; made where missing")
    parser.add_argument(
        "--groups", metavar="N", type=count, default=32, help="groups a file (default 32)"
    )
    parser.add_argument("--batches", metavar="K", type=count, help="end after K (else: the run's)")
    parser.add_argument(
        "--stall",
        metavar="SECONDS",
        type=seconds,
        default=600.0,
        help="give up where nothing ends for so long (default 600)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--peek", action="store_true", help="copy what is ready or delivered now; take nothing"
    )
    what.add_argument(
        "--check", action="store_true", help="read the dump in DIR from end to end, no Redis"
    )


def dump(args: argparse.Namespace) -> int:
    """Run the command."""
    from rollstream.cli.dumping import dump as run

    return run(args)
