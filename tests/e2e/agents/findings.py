"""What can be wrong, each with the figure that it counts into. Never finds anything itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Wrong(StrEnum):
    """A figure of the report that must be 0."""

    LOST = "lost"
    """A reply that its client went on with is in no sample, or trains nowhere; a prompt that never
    ended."""
    TWICE = "twice"
    """A call that trains in two samples; a member or group that was handed out twice."""
    TOKEN = "token_mismatches"
    """A sample is not what the engine was sent and sampled; a client read what was not sampled."""
    ACCOUNT = "accounting_difference"
    """Groups or tokens that nobody accounts for."""
    RETRY = "retries_lost"
    """An SDK's second try that got another reply than its first."""
    POLICY = "policy_breaks"
    """A reply is trained that the session's policy drops, or samples that it does not give."""
    DROP = "unexpected_drops"
    ODD = "odd"
    """Anything that should not be, beside the figures."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: Wrong
    where: str
    text: str
    count: int = 1
    """How much it adds to its figure."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"
