"""The simulated engine: one port, SGLang's protocol and vLLM's, the scripted policy behind both.

Owns the table of paths and the calls that no real engine has (`/sim…`). Never reads a protocol's
fields. Invariant: whichever protocol a request came by, one core samples it, so that pauses, labels
and faults are the same for all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

import msgspec

from rollstream.errors import ConfigError

from ..server_words import Refused, error_body
from .core import SimCore
from .faults import Fault, FaultConfig, Order
from .fronts import Routes, json_object
from .http import Exchange
from .numbers import ReplayConfig
from .policy import NOTICE, Policy
from .sglang import SglangFront
from .vllm import VllmFront

_ENCODER = msgspec.json.Encoder()


class Protocols(StrEnum):
    """What is served."""

    BOTH = "both"
    """`/update_weight_version`, which both have, is SGLang's."""
    SGLANG = "sglang"
    VLLM = "vllm"


class LogProbsMode(StrEnum):
    """What a log-prob is of."""

    AUTO = "auto"
    """As the servers have it by default: SGLang with the temperature, vLLM without (raw)."""
    TEMPERATURE = "temperature"
    RAW = "raw"
    PROCESSED = "processed"
    """The same as `temperature`: this engine truncates no distribution."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the protocols are spoken."""

    protocols: Protocols = Protocols.BOTH
    logprobs_mode: LogProbsMode = LogProbsMode.AUTO
    versioned: bool = False
    """Log-probs depend on the weights that sampled the token."""
    vllm_dev: bool = True
    """Without it vLLM's control calls are 404."""
    vllm_old: bool = False
    """Replies of older vLLM servers: `token_id:17`, no weight versions, no output mode."""
    model: str = ""
    """The only model name that vLLM's calls take; empty takes every name."""
    incremental: bool = False
    """Events of SGLang's streams say what is new, not all so far."""


class SimEngine:
    """Answers exchanges; everything runs on one loop.

    Attributes:
        core: the requests in flight.
        counts: requests by what happened to them, for tests and people.
        paths: requests by path.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        faults: FaultConfig | None = None,
        context_tokens: int = 32768,
        weight_version: str = "default",
        replay: ReplayConfig | None = None,
        dialect: Dialect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        dialect = dialect or Dialect()
        replay = replay or ReplayConfig()
        self.core = SimCore(
            policy,
            faults or FaultConfig(),
            weight_version=weight_version,
            versioned=dialect.versioned,
            clock=clock,
        )
        self.counts = self.core.counts
        self.paths: Counter[str] = Counter()
        mode = dialect.logprobs_mode
        self.sglang = SglangFront(
            self.core,
            context_tokens=context_tokens,
            replay=replay,
            is_raw=mode is LogProbsMode.RAW,
            is_incremental=dialect.incremental,
        )
        self._vllm = VllmFront(
            self.core,
            context_tokens=context_tokens,
            replay=replay,
            is_raw=mode in (LogProbsMode.RAW, LogProbsMode.AUTO),
            is_dev=dialect.vllm_dev,
            is_old=dialect.vllm_old,
            model=dialect.model,
        )
        self._routes: Routes = {
            **(self._vllm.routes() if dialect.protocols is not Protocols.SGLANG else {}),
            **(self.sglang.routes() if dialect.protocols is not Protocols.VLLM else {}),
            "/sim": ("GET", self._sim),
            "/sim/next": ("POST", self._next),
            "/sim/faults": ("POST", self._set_faults),
            "/sim/pause": ("POST", self._pause_for),
            "/sim/restart": ("POST", self._restart),
            "/sim/weights": ("POST", self._set_weights),
        }

    @property
    def policy(self) -> Policy:
        """Return what decides what is said."""
        return self.core.policy

    @property
    def weight_version(self) -> str:
        """Return the label of the weights."""
        return self.core.weight_version

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, at once or later."""
        found = self._routes.get(exchange.path)
        if found is None:
            self.counts["unknown_path"] += 1
            exchange.answer(404, error_body(f"the simulated engine has no {exchange.path}"))
            return
        self.paths[exchange.path] += 1
        methods, route = found
        if exchange.method not in methods:
            exchange.answer(405, b'{"detail":"Method Not Allowed"}')
            return
        try:
            route(exchange)
        except Refused as refusal:
            self.counts["refused"] += 1
            exchange.answer(refusal.status, refusal.body)

    # -- what no real engine has

    def _sim(self, exchange: Exchange) -> None:
        """Answer what it is, its rates, and what it did."""
        core = self.core
        state = {
            "notice": NOTICE,
            "policy": core.policy.config.to_dict(),
            "faults": core.faults.to_dict(),
            "in_flight": len(core.flights),
            "most_in_flight": core.most_in_flight,
            "weight_version": core.weight_version,
            "weights": core.weights,
            "paused": core.paused,
            "counts": dict(core.counts),
            "paths": dict(self.paths),
        }
        exchange.answer(200, _ENCODER.encode(state))

    def _next(self, exchange: Exchange) -> None:
        """Take orders for the next requests: names of faults, null for none, or both in one."""
        damage = json_object(exchange.body).get("damage")
        if not isinstance(damage, list):
            raise Refused('expected {"damage": [kind, null, {"kind": …, "after": tokens}, …]}')
        num = self.core.order([_order(one) for one in damage])
        exchange.answer(200, _ENCODER.encode({"ordered": num}))

    def _set_faults(self, exchange: Exchange) -> None:
        """Take the shares of faults from here on, by name; what is left out no longer happens."""
        shares = json_object(exchange.body)
        if not all(_is_number(share) for share in shares.values()):
            raise Refused('expected {"name of a fault": share, …}')
        try:
            self.core.set_faults(shares)
        except ConfigError as error:
            raise Refused(str(error)) from None
        exchange.answer(200, b"{}")

    def _pause_for(self, exchange: Exchange) -> None:
        seconds = json_object(exchange.body).get("seconds")
        if not _is_number(seconds) or seconds < 0:
            raise Refused('expected {"seconds": number}')
        self.core.pause_for(float(seconds))
        exchange.answer(200, b"{}")

    def _restart(self, exchange: Exchange) -> None:
        label = json_object(exchange.body).get("weight_version")
        self.core.restart(None if label is None else str(label))
        exchange.answer(200, b"{}")

    def _set_weights(self, exchange: Exchange) -> None:
        """Put other weights in, and name nothing: what a trainer's push does to a real server.

        With `weight_version` they are named by it, as SGLang's calls that push weights can.
        """
        body = json_object(exchange.body)
        weights, label = body.get("weights"), body.get("weight_version")
        if not isinstance(weights, str) or not isinstance(label, str | None):
            raise Refused('expected {"weights": label, "weight_version": label or none}')
        self.core.set_weights(weights, label)
        exchange.answer(200, b"{}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(one: Any) -> Order:
    after = None
    if isinstance(one, dict):
        one, after = one.get("kind"), one.get("after")
    if one is None:
        return Order(None)
    try:
        return Order(Fault(one), after)
    except ValueError:
        raise Refused(f"{one!r} is no fault; there are {', '.join(Fault)}") from None
