"""What one trajectory counts in metrics, whatever its shape.

Owns the sums over leaves. Never publishes. Invariant: leaves that branch from one another share
calls, and each call counts once, in the first leaf that has it.

Unit: tokens, but for `turns` and `oldest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollstream.sample import UNKNOWN_VERSION, Call, Sample

Counts: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of a `TokenTally`."""
_NEVER = 1 << 63
"""A version that no run comes to."""


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
        sampled, oldest = _sums(calls)
        self.turns += len(calls)
        self.sampled += sampled
        if oldest != UNKNOWN_VERSION:
            known = self.oldest != UNKNOWN_VERSION
            self.oldest = min(self.oldest, oldest) if known else oldest
        return sampled


def counted(leaves: Sequence[Sample]) -> Counts:
    """Return the fields of the tally of a trajectory, in their order."""
    if len(leaves) != 1:
        tally = TokenTally.of(leaves)
        return (
            tally.turns, tally.prompt, tally.cached, tally.sampled, tally.tool, tally.trainable,
            tally.oldest,
        )  # fmt: skip
    leaf = leaves[0]  # nearly all are so, and making the tally is a fifth of counting it
    calls, cache = leaf.calls, leaf.prefix_cache_info
    sampled, oldest = _sums(calls)
    tool, trainable = leaf.response_length - sampled, leaf.effective_response_length
    return (
        len(calls), cache.total_prompt_tokens, cache.cached_tokens, sampled, tool, trainable,
        oldest,
    )  # fmt: skip


def _sums(calls: Sequence[Call]) -> tuple[int, int]:
    """Return (tokens that calls sampled, the oldest known version of any)."""
    sampled, oldest = 0, _NEVER
    for call in calls:
        sampled += call.end - call.start
        # Not the first call's alone: a turn that goes on at another engine may get older ones.
        for span in call.versions:
            version = span[0]
            if version < oldest and version != UNKNOWN_VERSION:
                oldest = version
    return sampled, UNKNOWN_VERSION if oldest == _NEVER else oldest
