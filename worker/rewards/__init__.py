"""Rewards: what a finished trajectory is worth, in this process or in one of its own."""

from .answers import answer_of, boxed, final_text
from .scorer import BUILT_IN, Scorer, build_scorer, needs_isolation

__all__ = [
    "BUILT_IN",
    "Scorer",
    "answer_of",
    "boxed",
    "build_scorer",
    "final_text",
    "needs_isolation",
]
