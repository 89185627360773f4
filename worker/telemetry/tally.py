"""What one trajectory counts in metrics, whatever its shape.

Owns the sums over leaves. Never publishes. Invariant: leaves that branch from one another share
calls, and each call counts once, in the first leaf that has it.

Unit: tokens, but for `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.sample import Sample


@dataclass(slots=True)
class TokenTally:
    """Sums over the leaves of one trajectory."""

    turns: int = 0
    """Engine calls."""
    prompt: int = 0
    cached: int = 0
    """Of the prompts. Engines say it of whole leaves here, so a leaf that shares calls with an
    earlier one adds to neither: their ratio is that of the others."""
    sampled: int = 0
    tool: int = 0
    """Neither sampled nor in the first prompt."""
    trainable: int = 0

    @classmethod
    def of(cls, leaves: Iterable[Sample]) -> TokenTally:
        """Count a trajectory."""
        tally, seen = cls(), set[str]()
        for leaf in leaves:
            tally._add(leaf, seen)
            seen.update(call.rid for call in leaf.calls if call.rid)
        return tally

    def _add(self, leaf: Sample, seen: set[str]) -> None:
        self.trainable += leaf.effective_response_length
        shared = [call for call in leaf.calls if call.rid in seen] if seen else []
        if not shared:
            sampled = leaf.num_sampled
            self.turns += len(leaf.calls)
            self.prompt += leaf.prefix_cache_info.total_prompt_tokens
            self.cached += leaf.prefix_cache_info.cached_tokens
            self.sampled += sampled
            self.tool += leaf.response_length - sampled
            return
        # What leaves share is their beginning.
        behind = max(call.end for call in shared)
        new = [call for call in leaf.calls if call.rid not in seen]
        sampled = sum(call.end - call.start for call in new)
        self.turns += len(new)
        self.sampled += sampled
        self.tool += len(leaf.tokens) - behind - sampled
