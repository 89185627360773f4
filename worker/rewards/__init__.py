"""Rewards: what a finished trajectory is worth, in this process or in one of its own."""

from .answers import answer_of, boxed
from .kinds import BUILT_IN, always_isolated, needs_isolation
from .scorer import Scorer, build_scorer

__all__ = [
    "BUILT_IN",
    "Scorer",
    "always_isolated",
    "answer_of",
    "boxed",
    "build_scorer",
    "needs_isolation",
]
