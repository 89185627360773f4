"""That a reward judged a sample and did not edit it.

Owns what of a sample is held while it is scored, and the comparison behind that. Never copies
tokens: their arrays are read-only, so it is enough to know that they are the same. Invariant: what
was checked when the sample ended is what will be trained, or less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.errors import RewardFault
from rollstream.sample import Sample

MAY = "it may narrow loss_mask or set remove_sample"
_FACTS = ("calls", "response_length", "index", "member")


@dataclass(slots=True)
class Sampled:
    """What of a sample nobody may replace any more."""

    tokens: object
    rollout_log_probs: object
    facts: tuple[object, ...]
    """As `_FACTS` names them; a call can be edited in its place, so of each its numbers."""
    mask: np.ndarray[Any, Any]

    @classmethod
    def of(cls, leaf: Sample) -> Sampled:
        """Hold a sample."""
        return cls(leaf.tokens, leaf.rollout_log_probs, _facts_of(leaf), _mask_of(leaf).copy())

    def check(self, leaf: Sample) -> None:
        """Compare it with what it is now.

        Raises:
            RewardFault: other tokens, log-probs, calls or numbers; a mask of other numbers than 0
                and 1, or one that trains what it did not.
            ContractError: a mask that does not fit.
        """
        if name := self._replaced(leaf):
            raise RewardFault(f"the reward replaced {name}; {MAY}", detail="invalid")
        leaf.validate()
        mask = _mask_of(leaf)
        if not np.array_equal(mask, mask != 0):
            raise RewardFault("the reward left a loss_mask of other numbers than 0 and 1",
                              detail="invalid")  # fmt: skip
        if bool((mask > self.mask).any()):
            raise RewardFault(f"the reward widened loss_mask; {MAY}", detail="invalid")

    def _replaced(self, leaf: Sample) -> str:
        """Return the name of what is another by now, or nothing."""
        if leaf.tokens is not self.tokens:
            return "tokens"
        if leaf.rollout_log_probs is not self.rollout_log_probs:
            return "rollout_log_probs"
        pairs = zip(_FACTS, self.facts, _facts_of(leaf), strict=True)
        return next((name for name, was, now in pairs if was != now), "")


def _facts_of(leaf: Sample) -> tuple[object, ...]:
    calls = [(call.rid, call.start, call.end, tuple(call.versions)) for call in leaf.calls]
    return calls, leaf.response_length, leaf.index, leaf.member


def _mask_of(leaf: Sample) -> np.ndarray[Any, Any]:
    """Return where it is trained; without a mask that is what was sampled."""
    return leaf.sampled_mask() if leaf.loss_mask is None else np.asarray(leaf.loss_mask)
