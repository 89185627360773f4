"""What one trajectory counts in metrics, whatever its shape.

Owns the sums over leaves. Never publishes. Invariant: leaves that branch from one another share
calls, and each call counts once, in the first leaf that has it.

Unit: tokens, but for `turns` and `oldest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.sample import UNKNOWN_VERSION, Call, Sample


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
    oldest: int = UNKNOWN_VERSION
    """The oldest known weight version of any sampled token."""

    @classmethod
    def of(cls, leaves: Sequence[Sample]) -> TokenTally:
        """Count a trajectory."""
        tally = cls()
        if len(leaves) == 1:  # nearly all are so
            tally._add_whole(leaves[0])
            return tally
        seen = set[str]()
        for leaf in leaves:
            shared = [call for call in leaf.calls if call.rid in seen] if seen else []
            if shared:
                tally._add_branch(leaf, shared, seen)
            else:
                tally._add_whole(leaf)
            seen.update(call.rid for call in leaf.calls if call.rid)
        return tally

    def _add_whole(self, leaf: Sample) -> None:
        cache, response = leaf.prefix_cache_info, leaf.response_length
        sampled = self._add_calls(leaf.calls)
        self.prompt += cache.total_prompt_tokens
        self.cached += cache.cached_tokens
        self.tool += response - sampled
        self.trainable += leaf.effective_response_length

    def _add_branch(self, leaf: Sample, shared: Sequence[Call], seen: set[str]) -> None:
        # What leaves share is their beginning.
        behind = max(call.end for call in shared)
        sampled = self._add_calls([call for call in leaf.calls if call.rid not in seen])
        self.tool += len(leaf.tokens) - behind - sampled
        self.trainable += leaf.effective_response_length

    def _add_calls(self, calls: Sequence[Call]) -> int:
        """Count calls; returns how many tokens they sampled."""
        sampled, oldest = 0, self.oldest
        for call in calls:
            sampled += call.end - call.start
            # Not the first call's alone: a turn that goes on at another engine may get older ones.
            for span in call.versions:
                version = span[0]
                if version != UNKNOWN_VERSION and (version < oldest or oldest == UNKNOWN_VERSION):
                    oldest = version
        self.turns += len(calls)
        self.sampled += sampled
        self.oldest = oldest
        return sampled
