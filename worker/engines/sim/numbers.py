"""The numbers of the scripted policy: log-probs and routed experts, as functions of a prefix.

A STAND-IN FOR A MODEL, NOT A MODEL: they are hashes, and mean nothing.

Owns them. Never looks at a seed, a clock or a shared generator: as in a model, what a token's
log-prob and experts are depends on the tokens up to it (and, where the caller names one, on the
weight version) and on nothing else, so that a prefill of the same tokens gives the same numbers.
Invariant: one wrong, missing or shifted token changes the numbers of every position behind it.

Axis: L tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollstream.sample import LogProbs, TokenIds

Bits: TypeAlias = npt.NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_LOG_PROB_KEY = 0x1B873593CC9E2D51
_EXPERT_KEY = 0x85EBCA6B27D4EB2F


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The shape of the routed experts that are served; no layers serve none."""

    layers: int = 0
    top_k: int = 2
    num_experts: int = 64
    dtype: str = ""
    """Of vLLM's rows; empty is the narrowest that holds the experts, as vLLM has it."""

    @property
    def narrowest(self) -> str:
        """Return the narrowest of vLLM's dtypes."""
        return "uint8" if self.num_experts <= 256 else "uint16"


def mix(key: int, counters: Bits) -> Bits:
    """Return one well-mixed 64-bit number per counter (splitmix64)."""
    with np.errstate(over="ignore"):
        z = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def unit(bits: Bits) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 bits, exact on every machine."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def prefix_hashes(ids: TokenIds) -> Bits:
    """Return per position a hash of all tokens up to it, itself included.

    Shape: [L]. A polynomial in a fixed base modulo 2^64, all prefixes in one pass.
    """
    size = len(ids)
    up, down = _powers(_BASE, size), _powers(_INVERSE, size)
    with np.errstate(over="ignore"):
        terms = (np.asarray(ids).astype(np.uint64) + np.uint64(1)) * _SPREAD * down
        return np.asarray(np.cumsum(terms, dtype=np.uint64) * up)


_POWERS: dict[int, Bits] = {}


def _powers(base: int, size: int) -> Bits:
    known = _POWERS.get(base)
    if known is None or len(known) < size:
        steps = np.full(max(size, 1024) * 2, base, dtype=np.uint64)
        steps[0] = 1
        with np.errstate(over="ignore"):
            known = _POWERS[base] = np.multiply.accumulate(steps)
    return known[:size]


def log_probs(
    ids: TokenIds,
    start: int,
    temperature: float = 1.0,
    version: str | int | Sequence[str | int] | None = None,
) -> LogProbs:
    """Return the log-prob of every token from `start` on, after all tokens before it.

    In (-4.01, 0): mostly near 0, sometimes far from it. At T = 1 products only: IEEE fixes their
    bits, which it does not for powers and logarithms. At another T a token is one of two, itself
    and the rest.

    Args:
        ids: [L] all tokens.
        start: first position that is wanted.
        temperature: of the softmax; 0 is greedy, at T = 1.
        version: the label of the weights, one for all or one for each position; "7" and 7 are the
            same. None has no weights: the numbers are of the tokens alone.

    Shape: [L - start] float32.
    """
    hashes = prefix_hashes(ids)[start:]
    if version is not None:
        hashes = hashes ^ _version_keys(version)
    share = unit(mix(_LOG_PROB_KEY, hashes))
    exact = -(share * share * share * 4.0) - 2.0**-20
    if temperature not in (0.0, 1.0):
        chosen, rest = exact / temperature, np.log1p(-np.exp(exact)) / temperature
        exact = chosen - np.logaddexp(chosen, rest)
    return np.asarray(exact, dtype=np.float32)


def _version_keys(version: str | int | Sequence[str | int]) -> Bits | np.uint64:
    if isinstance(version, (str, int)):
        return np.uint64(_version_key(str(version)))
    return np.array([_version_key(str(one)) for one in version], dtype=np.uint64)


@lru_cache(maxsize=1024)
def _version_key(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


def routed_experts(ids: TokenIds, start: int, config: ReplayConfig) -> npt.NDArray[np.int32]:
    """Return the experts of every token from `start` on; the last token was never fed in.

    Shape: [L - 1 - start, layers, top_k], `top_k` different experts each.
    """
    hashes = prefix_hashes(ids)[start : max(start, len(ids) - 1)]
    rows = np.empty((len(hashes), config.layers, config.top_k), dtype=np.int32)
    experts, places = np.uint64(config.num_experts), np.arange(config.top_k, dtype=np.uint64)
    furthest = np.uint64(max(1, config.num_experts // config.top_k))
    for layer in range(config.layers):
        draws = mix(_EXPERT_KEY + layer, hashes)[:, None]
        step = np.uint64(1) + (draws >> np.uint64(32)) % furthest
        step = np.minimum(step, furthest)
        rows[:, layer] = (draws % experts + places * step) % experts
    return rows
