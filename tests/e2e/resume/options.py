"""The command line, and the sizes that follow from it. Never starts anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = ROOT / ".cache" / "qwen3" / "tokenizer.json"
PROMPTS_A_SECOND = 8
"""Default number of prompts per second of faults: several lifetimes of a trainer."""
MIN_PROMPTS = 48


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    json: bool
    seconds: float
    """How long processes are killed; training goes on to its end afterwards."""
    prompts: int
    """Prompts of all epochs together; a multiple of `epochs`."""
    epochs: int
    seed: int
    workers: int


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; exits where it is wrong."""
    cli = argparse.ArgumentParser(prog="python -m tests.e2e.resume", description=__doc__)
    cli.add_argument("--json", action="store_true", help="print the one line of JSON only")
    cli.add_argument("--seconds", type=float, default=60.0, help="of faults (default 60)")
    cli.add_argument("--prompts", type=int, default=None, help="of all epochs together")
    cli.add_argument("--epochs", type=int, default=2)
    cli.add_argument("--seed", type=int, default=0, help="of the faults (timing stays real)")
    cli.add_argument("--workers", type=int, default=2)
    given = cli.parse_args(arguments)
    if min(given.seconds, given.epochs, given.workers, given.prompts or 1) <= 0:
        cli.error("--seconds, --prompts, --epochs and --workers must be positive")
    prompts = given.prompts or max(MIN_PROMPTS, int(given.seconds * PROMPTS_A_SECOND))
    return Options(
        json=given.json,
        seconds=given.seconds,
        prompts=max(1, prompts // given.epochs) * given.epochs,
        epochs=given.epochs,
        seed=given.seed,
        workers=given.workers,
    )
