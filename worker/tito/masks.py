"""Which sampled tokens a policy of today may be trained on, by the weight versions of the calls.

Owns the mask of a sample that was sampled over several versions. Never changes tokens, log-probs or
calls, and does no I/O. Invariant: the mask has one entry per response token, however many versions
there were, and takes positions away only: what no call sampled, or what was masked before, stays 0.

Pure: `weights.mask_offpolicy` will decide whether a worker asks for it; a trainer may, today.
"""

from __future__ import annotations

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
