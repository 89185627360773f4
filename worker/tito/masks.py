"""Which sampled tokens a policy of today may be trained on, by the weight versions of the calls.

Owns the mask of a sample that was sampled over several versions. Never changes tokens, log-probs or
calls, and does no I/O. Invariant: the mask has one entry per response token, however many versions
there were, and takes positions away only: what no call sampled, or what was masked before, stays 0.

Pure: `weights.mask_offpolicy` decides whether a worker asks for it; a trainer may, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollstream.sample import UNKNOWN_VERSION, LossMask, Sample


def on_policy_mask(sample: Sample, version: int) -> LossMask:
    """Return the sample's mask without the tokens of versions older than `version`.

    A span of an unknown version counts as old: nobody can say that it is not.

    Shape: [response_length] uint8.

    Args:
        sample: keeps its own mask; assign the result, and `validate` holds.
        version: the oldest one that may be trained on.
    """
    length, offset = sample.response_length, sample.prompt_length
    fresh = np.zeros(length, dtype=np.uint8)
    for call in sample.calls:
        for number, start, end in call.versions:
            if number != UNKNOWN_VERSION and number >= version:
                fresh[start - offset : end - offset] = 1
    held = sample.sampled_mask() if sample.loss_mask is None else sample.loss_mask
    return np.asarray(held & fresh, dtype=np.uint8)


def mask_off_policy(leaves: Sequence[Sample]) -> None:
    """Narrow the masks of one trajectory to the newest weight version that had a part in it.

    Where an engine reports no versions and the weights changed during a call, nobody knows from
    which token on: all of that call counts as old.

    Args:
        leaves: its samples; one whose tokens are all of the newest version is left alone, and so
            are all where no version is known.
    """
    spans = [span for leaf in leaves for call in leaf.calls for span in call.versions]
    versions = {version for version, _, _ in spans}
    newest = max(versions, default=UNKNOWN_VERSION)
    if newest == UNKNOWN_VERSION or len(versions) == 1:
        return
    for leaf in leaves:
        if leaf.calls:
            leaf.loss_mask = on_policy_mask(leaf, newest)
