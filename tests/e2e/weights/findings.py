"""What can be wrong, each with the figure that it counts into. Never finds anything itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A figure of the report that must be 0."""

    LOST = "lost"
    TWICE = "twice"
    TOKEN = "token_mismatches"
    VERSION = "wrong_version_tokens"
    TOOL = "repeated_tool_calls"
    ACCOUNT = "accounting_difference"
    PAUSE = "calls_in_pauses"
    STALE = "stale_handed_out"
    MASK = "wrong_masks"
    BUDGET = "over_budget"
    EVALUATION = "evaluation_leaks"
    DROP = "unexpected_drops"
    ODD = "odd"
    """Anything that should not be, beside the figures."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    where: str
    text: str
    count: int = 1
    """How much it adds to its figure."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"
