"""The command line, and the sizes that follow from it. Never starts anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.fidelity.breaks import BREAKS, OF_ENGINE

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = ROOT / ".cache" / "qwen3" / "tokenizer.json"
SAMPLES_A_GROUP = 4
MAX_TURNS = 12
TEMPERATURES = (1.0, 0.7)
TOLERANCE = 1e-4
"""Between the log-prob that the trainer gets and the teacher's."""
NUM_WORKERS = 2
CONCURRENCY = 12
"""Samples in flight at the engine, in both parts: its batch."""
MAX_NEW_TOKENS, MAX_RESPONSE, MAX_CONTEXT = 64, 900, 1600
TOP_P = 0.9


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    json: bool
    samples: int
    """At least so many are checked; half of them went through the service."""
    seed: int
    damage: str | None
    """Name of a break; the proof must fail."""

    @property
    def groups(self) -> int:
        """Groups of each part."""
        return -(-self.samples // (2 * SAMPLES_A_GROUP))


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; exits where it is wrong."""
    cli = argparse.ArgumentParser(
        prog="python -m tests.e2e.fidelity", description=(__doc__ or "").splitlines()[0]
    )
    cli.add_argument("--json", action="store_true", help="print the one line of JSON only")
    cli.add_argument("--samples", type=int, default=208)
    cli.add_argument("--seed", type=int, default=1, help="of weights, prompts and disturbances")
    cli.add_argument(
        "--break", dest="damage", choices=[*BREAKS, *OF_ENGINE], help="damage it: it must fail"
    )
    given = cli.parse_args(arguments)
    if given.samples < 1:
        cli.error("--samples must be positive")
    return Options(given.json, given.samples, given.seed, given.damage)
