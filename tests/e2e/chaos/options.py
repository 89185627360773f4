"""The command line of the chaos run, and the sizes that follow from it.

Owns the options. Never starts anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = ROOT / ".cache" / "qwen3" / "tokenizer.json"
NUM_WORKERS, NUM_AGGREGATORS, NUM_ENGINES = 4, 2, 2
SAMPLES_A_GROUP = 4
GROUPS_A_BATCH = 2
CAPACITY = 48
"""Groups that may be live at once."""
LEASE_S = 1.5
MAX_SENTENCES = 3
"""Of the stand-in's text: it is short, so that two cores carry everybody."""
ROWS_A_SECOND = 25
"""More than the trainer's pace lets through, so that the source never runs dry under chaos."""
MAX_ROWS = 60_000
"""All within one window above the frontier (65,536), so that the tail can be skipped at once."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    seconds: float
    seed: int
    json: bool
    keep: bool
    """The folder stays, whatever comes of the run."""

    @property
    def num_rows(self) -> int:
        """Prompts in the source; what chaos leaves of them is skipped at its end."""
        return min(MAX_ROWS, int(self.seconds * ROWS_A_SECOND) + 20 * CAPACITY)


def parse(arguments: Sequence[str]) -> Options:
    """Return the options; a wrong command line ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.chaos",
        description="A run of real processes under kills, freezes, cut connections, a Redis that "
        "crashes and injected failures. Exit code 0 only when nothing was lost, nothing was "
        "trained twice, every token is as the engine sampled it, the accounts add up, and the "
        "run drained afterwards.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="of chaos")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the schedule")
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout, no more")
    parser.add_argument("--keep", action="store_true", help="keep logs and journals in any case")
    given = parser.parse_args(arguments)
    if not 1 <= given.seconds <= 86_400:
        parser.error(f"--seconds {given.seconds:g}: 1 to 86400")
    if given.seed < 0:
        parser.error(f"--seed {given.seed}: not negative")
    return Options(seconds=given.seconds, seed=given.seed, json=given.json, keep=given.keep)
