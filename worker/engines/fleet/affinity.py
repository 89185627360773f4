"""Which engine a routing key lives at: rendezvous hashing, without any state.

Owns the hash. Never looks at what an engine does. Invariant: when an engine leaves only its own
keys move, and when one joins only the keys that become its own.
"""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def hash_of(text: str) -> int:
    """Return 64 bits of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """Return a well-mixed 64-bit number (the finalizer of splitmix64).

    The engine of a key is the one whose `mix(hash_of(key) ^ hash_of(url))` is the highest.
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
