"""A reward that means nothing, and is the same for the same sample.

Owns `deterministic_random`: for tests of everything behind a reward. Never depends on the process
or the time. Invariant: in [0, 1).
"""

from __future__ import annotations

import hashlib

from rollstream.sample import Sample


def random_reward(sample: Sample, run_seed: int) -> float:
    """Return a number that depends on the seed, the tokens and the response alone."""
    digest = hashlib.blake2b(str(run_seed).encode(), digest_size=8)
    digest.update(sample.tokens.astype("<i4", copy=False).tobytes())
    digest.update(sample.response.encode("utf-8", "replace"))
    return int.from_bytes(digest.digest(), "big") / 2**64
