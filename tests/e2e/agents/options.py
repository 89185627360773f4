"""The command line. Never starts anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.agents.breaks import NAMES
from tests.e2e.agents.scenes import SESSIONS, Scene, full_scenes, quick_scenes

CALLS = 80
QUICK_SESSIONS = 48


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    json: bool
    seed: int
    scenes: tuple[Scene, ...]
    least_sessions: int
    calls: int
    """Calls of each kind that the overhead is measured over; 0 does not measure."""
    damage: str | None
    keep: bool
    """The folder stays."""


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; exits where it is wrong."""
    cli = argparse.ArgumentParser(
        prog="python -m tests.e2e.agents",
        description="Agents that misbehave, over two workers of which one is killed. Exit code 0 "
        "only if every reply that a client went on with is trained once, as it was sampled.",
    )
    cli.add_argument("--json", action="store_true", help="print the one line of JSON only")
    cli.add_argument("--seed", type=int, default=1, help="of agents and faults")
    cli.add_argument("--sessions", type=int, default=SESSIONS, help="all scenes together")
    cli.add_argument("--quick", action="store_true", help="two short scenes, nothing measured")
    cli.add_argument("--scene", action="append", help="only this one; may be repeated")
    cli.add_argument("--calls", type=int, default=CALLS, help="that the overhead is measured over")
    cli.add_argument("--keep", action="store_true", help="keep logs and journals in any case")
    cli.add_argument("--break", dest="damage", choices=NAMES, help="damage it: it must fail")
    given = cli.parse_args(arguments)
    if given.sessions < 8:
        cli.error("--sessions must be at least 8")
    scenes = full_scenes(given.sessions)
    if given.quick:
        scenes = quick_scenes(min(given.sessions, QUICK_SESSIONS))
    if given.scene:
        unknown = sorted(set(given.scene) - {scene.name for scene in scenes})
        if unknown:
            cli.error(f"no scene {unknown[0]}: choose from {[scene.name for scene in scenes]}")
        scenes = [scene for scene in scenes if scene.name in given.scene]
    return Options(
        json=given.json,
        seed=given.seed,
        scenes=tuple(scenes),
        least_sessions=sum(scene.sessions for scene in scenes),
        calls=0 if given.quick or given.scene else given.calls,
        damage=given.damage,
        keep=given.keep,
    )
