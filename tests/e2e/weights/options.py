"""The command line. Never starts anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.weights.breaks import NAMES
from tests.e2e.weights.scenes import UPDATES_A_MODE, Scene, full_scenes, quick_scenes


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    json: bool
    seed: int
    scenes: tuple[Scene, ...]
    least_updates: int
    """Of each mode."""
    damage: str | None
    keep: bool
    """The folder stays."""


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; exits where it is wrong."""
    cli = argparse.ArgumentParser(
        prog="python -m tests.e2e.weights",
        description="Weight updates in both modes under a service that is disturbed. Exit code 0 "
        "only if every sample is what its recorded version sampled, and nothing was lost.",
    )
    cli.add_argument("--json", action="store_true", help="print the one line of JSON only")
    cli.add_argument("--seed", type=int, default=1, help="of prompts and disturbances")
    cli.add_argument(
        "--updates", type=int, default=UPDATES_A_MODE, help="of each mode, all scenes together"
    )
    cli.add_argument("--quick", action="store_true", help="one short scene")
    cli.add_argument("--scene", action="append", help="only this one; may be repeated")
    cli.add_argument("--keep", action="store_true", help="keep logs and records in any case")
    cli.add_argument("--break", dest="damage", choices=NAMES, help="damage it: it must fail")
    given = cli.parse_args(arguments)
    if given.updates < 4:
        cli.error("--updates must be at least 4")
    scenes = quick_scenes() if given.quick else full_scenes(given.updates)
    if given.scene:
        unknown = sorted(set(given.scene) - {scene.name for scene in scenes})
        if unknown:
            cli.error(f"no scene {unknown[0]}: choose from {[scene.name for scene in scenes]}")
        scenes = [scene for scene in scenes if scene.name in given.scene]
    whole = not given.quick and not given.scene
    return Options(
        json=given.json,
        seed=given.seed,
        scenes=tuple(scenes),
        least_updates=given.updates if whole else 0,
        damage=given.damage,
        keep=given.keep,
    )
