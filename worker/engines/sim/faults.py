"""What goes wrong on purpose, and how long a reply takes: draws from one seeded generator.

Owns rates, latencies and their order. Never touches what the policy says: a fault ends a reply
early, spoils its frame, or keeps it from arriving. Invariant: the tokens of every reply are a
prefix of what `Policy.expected` gives.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from rollstream.errors import ConfigError


class Fault(StrEnum):
    """What may happen to one request."""

    UNAVAILABLE = "503"
    RESET = "reset"
    SLOW = "slow"
    LENGTH = "length"
    ABORT = "abort"
    ABORT_CODE = "abort_code"
    NAN = "nan"
    NO_END = "no_end"
    VERSION_CHANGE = "version_change"


CUTS = frozenset({Fault.LENGTH, Fault.ABORT, Fault.ABORT_CODE, Fault.NAN})
"""Faults that end a reply somewhere before its end."""


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Shares of requests (0..1), and how long replies take."""

    unavailable: float = 0.0
    """HTTP 503 at once."""
    reset: float = 0.0
    """The connection is closed in place of a reply."""
    slow: float = 0.0
    """The reply takes `slow_factor` times as long."""
    length: float = 0.0
    """Finish `length` before the budget is used up."""
    abort: float = 0.0
    """Finish `abort` without a status code: resumable."""
    abort_code: float = 0.0
    """Finish `abort` with status code 500 and tokens that must not be used."""
    nan: float = 0.0
    """Finish `stop`, matched "NaN happened"."""
    no_end: float = 0.0
    """Finish `stop` without the end token."""
    version_change: float = 0.0
    """The first tokens are reported as of the version before (from version 1 on)."""
    slow_factor: float = 20.0
    latency_median_s: float = 0.05
    latency_sigma: float = 0.5
    """Of the log-normal distribution of what a reply takes whatever its length."""
    token_s: float = 0.0005
    """And per token."""
    seed: int = 0

    def rates(self) -> dict[Fault, float]:
        """Return the share of each fault."""
        names = [field.name for field in fields(self)][: len(Fault)]
        return {kind: getattr(self, name) for kind, name in zip(Fault, names, strict=True)}

    def check(self) -> None:
        """Raise where the numbers make no sense.

        Raises:
            ConfigError: naming the value.
        """
        for kind, rate in self.rates().items():
            if not 0.0 <= rate <= 1.0:
                raise ConfigError(f"--fault-{kind.value.replace('_', '-')} {rate}: give 0 to 1")
        if sum(self.rates().values()) > 1.0:
            raise ConfigError("the shares of all faults together are more than 1")
        if self.latency_median_s < 0 or self.latency_sigma < 0 or self.token_s < 0:
            raise ConfigError("latencies cannot be negative")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class FaultDice:
    """Draws one fault or none, a latency and a cut for each request, in order of arrival."""

    def __init__(self, config: FaultConfig) -> None:
        config.check()
        self._config = config
        self._random = random.Random(config.seed)
        self._rates = [(kind, rate) for kind, rate in config.rates().items() if rate > 0.0]

    def fault(self) -> Fault | None:
        """Return what happens to the next request."""
        unit = self._random.random()
        for kind, rate in self._rates:
            if unit < rate:
                return kind
            unit -= rate
        return None

    def latency_s(self, num_tokens: int, fault: Fault | None) -> float:
        """Return how long the reply takes."""
        config = self._config
        base_s = 0.0
        if config.latency_median_s > 0.0:
            base_s = config.latency_median_s * self._random.lognormvariate(0, config.latency_sigma)
        total_s = base_s + config.token_s * num_tokens
        return total_s * config.slow_factor if fault is Fault.SLOW else total_s

    def cut(self, num_tokens: int) -> int:
        """Return where a reply of so many tokens ends: before its end, at 0 at the earliest."""
        return self._random.randrange(num_tokens) if num_tokens > 0 else 0
