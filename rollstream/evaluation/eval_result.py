"""What an evaluation came to.

Owns the result of `GroupStream.evaluate` and its figures. Never does I/O. Invariant: one entry per
prompt, and in it each of the n members is among the samples or among the missing.

Axes: P prompts, G members of each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstream.errors import Status
from rollstream.group import FinishedGroup, Missing, reward_number
from rollstream.sample import UNKNOWN_VERSION, Sample


@dataclass(slots=True)
class EvalResult:
    """What an evaluation came to."""

    name: str
    n: int
    groups: list[FinishedGroup]
    """One per prompt, in order; `group_index` is its place. What did not end well is in `missing`,
    with a reason: a stop reason, what the queue ended it for, `timeout`, or `unreadable`."""
    seconds: float = 0.0

    def flat(self) -> list[Sample]:
        """Return every sample, leaves side by side."""
        return [sample for group in self.groups for sample in group.flat()]

    @property
    def missing(self) -> list[tuple[int, Missing]]:
        """(place of the prompt, member that is not there) of all."""
        return [(group.group_index, one) for group in self.groups for one in group.missing]

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Rewards by prompt and member; NaN where there is none.

        Shape: [P, G].
        """
        found = np.full((len(self.groups), self.n), np.nan)
        for place, group in enumerate(self.groups):
            for trajectory in group.samples:
                sample = trajectory[0] if isinstance(trajectory, list) else trajectory
                number = reward_number(sample.reward, group.reward_key)
                if number is not None:
                    found[place, sample.member] = number
        return found

    @property
    def versions(self) -> dict[int, int]:
        """Weight version → tokens that it sampled, oldest first; -1 is unknown."""
        tokens: Counter[int] = Counter()
        for group in self.groups:
            for trajectory in group.samples:
                leaves = trajectory if isinstance(trajectory, list) else [trajectory]
                # Leaves share the calls of their common prefix.
                for call in {call.rid: call for leaf in leaves for call in leaf.calls}.values():
                    for version, start, end in call.versions:
                        tokens[version] += end - start
        return dict(sorted(tokens.items()))

    @property
    def is_mixed(self) -> bool:
        """Whether more than one weight version sampled it: it measures none of them alone."""
        return len(self.versions) > 1

    def metrics(self) -> dict[str, float]:
        """Return figures for a tracker, all under `eval/<name>/`.

        Unit: seconds, tokens, versions. Rewards count members: nine leaves of one trajectory weigh
        one.
        """
        flat, rewards, versions = self.flat(), self.rewards, self.versions
        figures: dict[str, float] = {
            "prompts": len(self.groups),
            "samples": sum(len(group.samples) for group in self.groups),
            "truncated": sum(sample.status is Status.TRUNCATED for sample in flat),
            "seconds": self.seconds,
            "missing": len(self.missing),
            "mixed_versions": float(self.is_mixed),
        }
        for _, one in self.missing:
            key = f"missing/{one.reason or one.status.value}"
            figures[key] = figures.get(key, 0) + 1
        known = rewards[~np.isnan(rewards)]
        if known.size:
            figures["reward_mean"], figures["reward_std"] = float(known.mean()), float(known.std())
            figures["reward_min"], figures["reward_max"] = float(known.min()), float(known.max())
        if flat:
            lengths = [sample.response_length for sample in flat]
            figures["response_length_mean"] = float(np.mean(lengths))
            figures["response_length_max"] = max(lengths)
        numbered = [version for version in versions if version != UNKNOWN_VERSION]
        if numbered:
            figures["version_min"], figures["version_max"] = min(numbered), max(numbered)
        return {f"eval/{self.name}/{name}": value for name, value in figures.items()}
