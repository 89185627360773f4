"""What goes wrong on purpose, and how long a reply takes: draws from one seeded generator.

Owns rates, latencies, their order, and the orders of tests (`next`). Never touches what the policy
says: a fault ends a reply early, spoils its frame (`damage` does that), or keeps it from arriving.
Invariant: the tokens of a reply that a client may believe are a prefix of what `Policy.expected`
gives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

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
    # Answered at once, with that HTTP status.
    OVERFLOW = "overflow"
    HTTP_400 = "400"
    HTTP_404 = "404"
    HTTP_408 = "408"
    HTTP_429 = "429"
    HTTP_500 = "500"
    QUEUE_FULL = "queue_full"
    # Instead of an answer.
    HANG = "hang"
    HALF_BODY = "half_body"
    NOT_JSON = "not_json"
    # An answer of which one thing is wrong.
    ABORT_503 = "abort_503"
    ABORT_EMPTY = "abort_empty"
    NO_FINISH = "no_finish"
    UNKNOWN_FINISH = "unknown_finish"
    LOGPROBS_MISSING = "logprobs_missing"
    LOGPROBS_SHORT = "logprobs_short"
    LOGPROBS_LONG = "logprobs_long"
    LOGPROB_NULL = "logprob_null"
    LOGPROB_POSITIVE = "logprob_positive"
    LOGPROB_NAN = "logprob_nan"
    LOGPROB_LOWEST = "logprob_lowest"
    LOGPROBS_WRONG = "logprobs_wrong"
    OTHER_IDS = "other_ids"
    BAD_TOKEN = "bad_token"
    NEGATIVE_TOKEN = "negative_token"
    TOO_MANY = "too_many"
    EMPTY_LENGTH = "empty_length"
    COMPLETION_TOKENS = "completion_tokens"
    PROMPT_CUT = "prompt_cut"
    OTHER_RID = "other_rid"
    SPANS_GAP = "spans_gap"
    SPANS_OVERLAP = "spans_overlap"
    SPANS_SHORT = "spans_short"
    SPANS_WRONG = "spans_wrong"
    NO_VERSION = "no_version"
    EXPERTS_MISSING = "experts_missing"
    EXPERTS_SHORT = "experts_short"
    EXPERTS_GARBAGE = "experts_garbage"


CUTS = frozenset({Fault.LENGTH, Fault.ABORT, Fault.ABORT_CODE, Fault.NAN, Fault.ABORT_503})
"""Faults that end a reply somewhere before its end."""
BREAKS = frozenset({Fault.RESET, Fault.HALF_BODY, Fault.HANG})
"""Faults of the transport: they cut a stream anywhere, without its end."""
STATUSES: Mapping[Fault, int] = {
    Fault.UNAVAILABLE: 503,
    Fault.OVERFLOW: 400,
    Fault.HTTP_400: 400,
    Fault.HTTP_404: 404,
    Fault.HTTP_408: 408,
    Fault.HTTP_429: 429,
    Fault.HTTP_500: 500,
    Fault.QUEUE_FULL: 503,
}
"""Faults that are an HTTP status at once, before anything is sampled."""
NEED_TOKENS = frozenset(
    {
        Fault.LOGPROBS_MISSING,
        Fault.LOGPROBS_SHORT,
        Fault.LOGPROB_NULL,
        Fault.LOGPROB_POSITIVE,
        Fault.LOGPROB_NAN,
        Fault.LOGPROB_LOWEST,
        Fault.LOGPROBS_WRONG,
        Fault.OTHER_IDS,
        Fault.BAD_TOKEN,
        Fault.NEGATIVE_TOKEN,
        Fault.SPANS_GAP,
        Fault.SPANS_OVERLAP,
        Fault.SPANS_SHORT,
    }
)
"""Faults that cannot happen to a reply without tokens."""
NAMED: Mapping[Fault, str] = {
    Fault.UNAVAILABLE: "unavailable",
    Fault.RESET: "reset",
    Fault.SLOW: "slow",
    Fault.LENGTH: "length",
    Fault.ABORT: "abort",
    Fault.ABORT_CODE: "abort_code",
    Fault.NAN: "nan",
    Fault.NO_END: "no_end",
    Fault.VERSION_CHANGE: "version_change",
}
"""Faults that have a field of `FaultConfig` of their own."""

FaultName: TypeAlias = str


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
    """The first tokens are sampled and reported as of the version before (from version 1 on)."""
    slow_factor: float = 20.0
    latency_median_s: float = 0.05
    latency_sigma: float = 0.5
    """Of the log-normal distribution of what a reply takes whatever its length."""
    token_s: float = 0.0005
    """And per token."""
    seed: int = 0
    others: Mapping[FaultName, float] = field(default_factory=dict)
    """Shares of the faults without a field here, by their names in `Fault`."""

    def rates(self) -> dict[Fault, float]:
        """Return the share of each fault."""
        own = {kind: getattr(self, name) for kind, name in NAMED.items()}
        return own | {Fault(name): share for name, share in self.others.items()}

    def with_shares(self, shares: Mapping[FaultName, float]) -> FaultConfig:
        """Return the same latencies with these shares of faults and no others."""
        return FaultConfig(
            slow_factor=self.slow_factor,
            latency_median_s=self.latency_median_s,
            latency_sigma=self.latency_sigma,
            token_s=self.token_s,
            seed=self.seed,
            others=dict(shares),
        )

    def check(self) -> None:
        """Raise where the numbers make no sense.

        Raises:
            ConfigError: naming the value.
        """
        for name in self.others:
            if name not in set(Fault):
                raise ConfigError(f"{name!r} is no fault; there are {', '.join(Fault)}")
        for kind, rate in self.rates().items():
            if not 0.0 <= rate <= 1.0:
                raise ConfigError(f"--fault-{kind.value.replace('_', '-')} {rate}: give 0 to 1")
        if sum(self.rates().values()) > 1.0 + 1e-9:
            raise ConfigError("the shares of all faults together are more than 1")
        if self.latency_median_s < 0 or self.latency_sigma < 0 or self.token_s < 0:
            raise ConfigError("latencies cannot be negative")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Order:
    """What a test wants of one request."""

    fault: Fault | None
    after: int | None = None
    """Where a reply that the fault ends early has its end, in tokens; None draws one. Of a stream,
    also where its connection breaks."""


class FaultDice:
    """Draws one fault or none, a latency and a cut for each request, in order of arrival."""

    def __init__(self, config: FaultConfig) -> None:
        self.draw_from(config)
        self._random = random.Random(config.seed)
        self._orders: deque[Order] = deque()

    def order(self, orders: Sequence[Order]) -> int:
        """Say what happens to the next requests, before any draw; return how many that are."""
        self._orders.extend(orders)
        return len(self._orders)

    def draw_from(self, config: FaultConfig) -> None:
        """Draw by other shares and latencies from here on; orders stay.

        Raises:
            ConfigError: naming the value.
        """
        config.check()
        self._config = config
        self._rates = [(kind, rate) for kind, rate in config.rates().items() if rate > 0.0]

    def next(self) -> Order:
        """Return what happens to the next request: an order where there is one, else a draw."""
        return self._orders.popleft() if self._orders else Order(self.fault())

    def fault(self) -> Fault | None:
        """Return what the dice say for the next request."""
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

    def cut(self, num_tokens: int, least: int = 0) -> int:
        """Return where a reply of so many tokens ends: before its end, at `least` at the earliest.

        One that has no more than those keeps them.
        """
        return self._random.randrange(least, num_tokens) if num_tokens > least else num_tokens
