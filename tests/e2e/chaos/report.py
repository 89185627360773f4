"""The one line that a chaos run prints, and what keeps it from being a success.

Owns the keys: the issue's, in its order, then a few more. Never computes a figure.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Report:
    """Keys of the JSON line; docs/chaos.md defines them."""

    enqueued: int
    acked: int
    dropped: dict[str, int]
    lost: int
    twice: int
    token_mismatches: int
    accounting_difference: int
    fenced: int
    replays: int
    kills: dict[str, int]
    longest_stall_s: float
    drain_s: float | None
    """None: it did not drain."""
    seconds: float
    seed: int
    freezes: dict[str, int]
    cuts: dict[str, int]
    trained: int
    """Groups in the surviving history."""
    trained_again: int
    """Groups that abandoned lives had trained on as well."""
    calls_audited: int
    rewinds: int
    """Of the run, by restarted trainers and by live ones that told a crashed Redis again."""
    forgotten_bytes: int
    """That Redis had acknowledged and lost with its host."""
    exits: dict[str, int]
    """Processes that ended by themselves while chaos was on: `role:exit code`."""
    findings: list[str] = field(default_factory=list)
    """What looks wrong beside the figures; empty is the rule."""

    def to_json(self) -> str:
        """Return the one line."""
        return json.dumps(asdict(self))

    def for_people(self) -> str:
        """Return the figures as lines of text."""
        return "\n".join(f"  {name:<22} {value}" for name, value in asdict(self).items())

    @property
    def is_clean(self) -> bool:
        """Whether nobody needs to look at what was logged."""
        return not self.problems() and not self.findings

    def problems(self) -> list[str]:
        """Say what keeps the run from being a success; empty is success."""
        meaning = {
            "lost": "groups of which nothing says how they ended",
            "twice": "groups that were trained on twice in one history",
            "token_mismatches": "calls or samples that are not what the engine sampled",
            "accounting_difference": "of enqueued and acked + dropped + live, or out of place",
        }
        found = [
            f"{name} = {getattr(self, name)}: {text}"
            for name, text in meaning.items()
            if getattr(self, name) != 0
        ]
        if self.drain_s is None:
            found.append("it did not drain")
        return found


def say(text: str) -> None:
    """Tell a person something, beside the line."""
    sys.stderr.write(f"chaos: {text}\n")
    sys.stderr.flush()
