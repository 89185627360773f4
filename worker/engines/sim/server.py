"""The simulated engine: SGLang's protocol over HTTP, with the scripted policy behind it.

Owns requests in flight, their timers, aborts, pauses and the weight version. Never decides what is
said (`policy`) or what goes wrong (`faults`). Invariant: every reply's tokens are a prefix of the
policy's, whatever happens meanwhile, and nothing here blocks: a request in flight is one timer.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollstream.sample import TokenIds

from ..server_words import Refused, error_body, version_spans, weight_label
from .faults import CUTS, Fault, FaultConfig, FaultDice
from .http import Exchange
from .numbers import ReplayConfig, routed_experts
from .policy import NOTICE, Policy, Reply
from .protocol import GenerateBody, read_generate

_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True, eq=False)
class _Flight:
    """One request that is being answered."""

    exchange: Exchange
    request: GenerateBody
    reply: Reply
    fault: Fault | None
    cut: int
    """How many tokens it gets if nothing stops it earlier."""
    started_s: float
    duration_s: float
    timer: asyncio.TimerHandle | None = None
    elapsed_s: float = 0.0
    """Before the last pause."""
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version that ended, after how many tokens)"""


class SimEngine:
    """Answers exchanges; everything runs on one loop.

    Attributes:
        counts: requests by what happened to them, for tests and people.
        weight_version: as SGLang labels it: "default" until someone updates it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        faults: FaultConfig | None = None,
        context_tokens: int = 32768,
        weight_version: str = "default",
        replay: ReplayConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.faults = faults or FaultConfig()
        self.weight_version = weight_version
        self.replay = replay or ReplayConfig()
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._dice = FaultDice(self.faults)
        self._context_tokens = context_tokens
        self._flights: dict[str, _Flight] = {}
        self._paused = False
        self._held: list[Exchange] = []
        self._routes: dict[str, Callable[[Exchange], None]] = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/health": self._health,
            "/ready": self._ready,
            "/update_weight_version": self._update_weight_version,
            "/flush_cache": self._flush_cache,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/sim": self._sim,
        }

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, at once or later."""
        route = self._routes.get(exchange.path)
        if route is None:
            exchange.answer(404, error_body(f"the simulated engine has no {exchange.path}"))
            return
        try:
            route(exchange)
        except Refused as refusal:
            self.counts["refused"] += 1
            exchange.answer(400, refusal.body)

    # -- generation

    def _generate(self, exchange: Exchange) -> None:
        if self._paused:
            self._held.append(exchange)
            return
        request = read_generate(
            exchange.body, self._context_tokens, self.policy.vocabulary.size, set(self._flights)
        )
        self.counts["requests"] += 1
        fault = self._dice.fault()
        if fault is Fault.UNAVAILABLE:
            self.counts[fault.value] += 1
            exchange.answer(503, error_body("the simulated engine is overloaded on purpose"))
            return
        reply = self.policy.reply(request.input_ids, request.sampling)
        cut, fault = self._cut(reply, fault)
        if fault is not None:
            self.counts[fault.value] += 1
        loop = asyncio.get_running_loop()
        flight = _Flight(
            exchange=exchange,
            request=request,
            reply=reply,
            fault=fault,
            cut=cut,
            started_s=self._clock(),
            duration_s=self._dice.latency_s(cut, fault),
        )
        self._flights[request.rid] = flight
        exchange.on_close = lambda: self._forget(flight)
        flight.timer = loop.call_later(flight.duration_s, self._land, flight)

    def _cut(self, reply: Reply, fault: Fault | None) -> tuple[int, Fault | None]:
        """Return how many tokens the reply gets; a fault that cannot happen to it is none."""
        num = len(reply.ids)
        if fault in CUTS:
            return self._dice.cut(num), fault
        if fault is Fault.NO_END:
            if reply.finish == "stop" and isinstance(reply.matched, int) and num > 1:
                return num - 1, fault
            return num, None
        if fault is Fault.VERSION_CHANGE:
            possible = num > 1 and self.weight_version.isdigit() and int(self.weight_version) > 0
            return num, fault if possible else None
        return num, fault

    def _land(self, flight: _Flight) -> None:
        """Answer a request whose time has come."""
        self._forget(flight)
        if flight.fault is Fault.RESET:
            flight.exchange.drop()
            return
        self._answer(flight, flight.cut, self._finish(flight))

    def _finish(self, flight: _Flight) -> dict[str, Any]:
        fault, reply = flight.fault, flight.reply
        if fault is Fault.ABORT:
            return _abort_reason("Aborted by the simulated engine on purpose")
        if fault is Fault.ABORT_CODE:
            return _abort_reason("The simulated engine failed on purpose", 500)
        if fault is Fault.NAN:
            return {"type": "stop", "matched": "NaN happened"}
        if fault is Fault.LENGTH or reply.finish == "length":
            return {"type": "length", "length": flight.cut}
        return {"type": "stop", "matched": reply.matched}

    def _answer(self, flight: _Flight, num: int, finish: dict[str, Any]) -> None:
        ids = flight.reply.ids[:num].tolist()
        log_probs = flight.reply.log_probs[:num].tolist()
        if flight.fault is Fault.VERSION_CHANGE and num > 1:
            flight.changes.insert(0, (str(int(self.weight_version) - 1), num // 2))
        elapsed_s = flight.elapsed_s + self._clock() - flight.started_s
        meta = {
            "id": flight.request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(flight.request.input_ids),
            "weight_version": self.weight_version,
            "completion_tokens": num,
            "cached_tokens": 0,
            "e2e_latency": elapsed_s,
            "output_token_logprobs": list(zip(log_probs, ids, [None] * num, strict=True)),
            "weight_versions": version_spans(flight.changes, self.weight_version, num),
        }
        self._add_numbers(meta, flight.request, flight.reply.ids[:num])
        body = {
            "text": self.policy.vocabulary.decode(flight.reply.ids[:num]),
            "output_ids": ids,
            "meta_info": meta,
        }
        self.counts[f"finish_{finish['type']}"] += 1
        flight.exchange.answer(200, _ENCODER.encode(body))

    def _add_numbers(self, meta: dict[str, Any], request: GenerateBody, sampled: TokenIds) -> None:
        """Add the log-probs of the prompt and the routed experts, where they were asked for."""
        fed = np.concatenate([np.asarray(request.input_ids, dtype=np.int32), sampled])
        start = request.score_from
        if start is not None:
            ids = request.input_ids[start:]
            # As in SGLang: the first entry has no log-prob, whatever position it is of.
            scores = [None, *self.policy.score(fed[: len(request.input_ids)], start + 1).tolist()]
            meta["input_token_logprobs"] = list(zip(scores, ids, [None] * len(ids), strict=True))
            self.counts["scored"] += 1
        if request.experts_from is not None and self.replay.layers:
            rows = routed_experts(fed, request.experts_from, self.replay)
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()

    def _forget(self, flight: _Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        flight.exchange.on_close = None
        self._flights.pop(flight.request.rid, None)

    def _said(self, flight: _Flight) -> int:
        """Return how many tokens a request has so far."""
        elapsed_s = flight.elapsed_s
        if flight.timer is not None:
            elapsed_s += self._clock() - flight.started_s
        share = elapsed_s / flight.duration_s if flight.duration_s > 0 else 1.0
        return min(flight.cut, math.floor(flight.cut * share))

    def _abort(self, flight: _Flight) -> None:
        """End a request now; its own reply carries what it has."""
        num = self._said(flight)
        self._forget(flight)
        self.counts["aborted"] += 1
        self._answer(flight, num, _abort_reason("Aborted by a request"))

    # -- control

    def _abort_request(self, exchange: Exchange) -> None:
        body = _object(exchange.body)
        rid, everything = str(body.get("rid") or ""), body.get("abort_all") is True
        if everything or rid:  # an empty rid would be a prefix of every other: ignored
            for flight in list(self._flights.values()):
                if everything or flight.request.rid.startswith(rid):
                    self._abort(flight)
        exchange.answer(200, b'{"success":true}')

    def _update_weight_version(self, exchange: Exchange) -> None:
        body = _object(exchange.body)
        if "new_version" not in body:
            raise Refused("new_version is missing")
        if body.get("abort_all_requests", True):
            for flight in list(self._flights.values()):
                self._abort(flight)
        for flight in self._flights.values():
            num = self._said(flight)
            if num > 0:
                flight.changes.append((self.weight_version, num))
        self.weight_version = weight_label(body["new_version"])
        message = f"Weight version updated to {self.weight_version}"
        exchange.answer(
            200,
            _ENCODER.encode(
                {"success": True, "message": message, "new_version": self.weight_version}
            ),
        )

    def _pause(self, exchange: Exchange) -> None:
        mode = _object(exchange.body).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(f"mode {mode!r}: expected abort, retract or in_place")
        self._paused = True
        for flight in list(self._flights.values()):
            if mode == "abort":
                self._abort(flight)
            elif flight.timer is not None:
                flight.timer.cancel()
                flight.timer = None
                flight.elapsed_s += self._clock() - flight.started_s
        exchange.answer(200, b'{"message":"Generation paused successfully.","status":"ok"}')

    def _continue(self, exchange: Exchange) -> None:
        self._paused = False
        loop = asyncio.get_running_loop()
        for flight in self._flights.values():
            if flight.timer is None:
                flight.started_s = self._clock()
                left_s = max(0.0, flight.duration_s - flight.elapsed_s)
                flight.timer = loop.call_later(left_s, self._land, flight)
        held, self._held = self._held, []
        for waiting in held:
            if not waiting.closed:
                self.handle(waiting)
        exchange.answer(200, b'{"message":"Generation continued successfully.","status":"ok"}')

    def _flush_cache(self, exchange: Exchange) -> None:
        busy = bool(self._flights)
        text = b"Flush cache failed.\n" if busy else b"Cache flushed.\n"
        exchange.answer(400 if busy else 200, text, b"text/plain")

    def _model_info(self, exchange: Exchange) -> None:
        info = {
            "model_path": f"simulated engine: {NOTICE}",
            "served_model_name": "simulated",
            "tokenizer_path": "",
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": None,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "simulated": True,
        }
        exchange.answer(200, _ENCODER.encode(info))

    def _health(self, exchange: Exchange) -> None:
        exchange.answer(200, b"", b"text/plain")

    def _ready(self, exchange: Exchange) -> None:
        exchange.answer(503 if self._paused else 200, b"", b"text/plain")

    def _sim(self, exchange: Exchange) -> None:
        """Answer what no real engine has: what it is, its rates, and what it did."""
        state = {
            "notice": NOTICE,
            "policy": self.policy.config.to_dict(),
            "faults": self.faults.to_dict(),
            "in_flight": len(self._flights),
            "counts": dict(self.counts),
        }
        exchange.answer(200, _ENCODER.encode(state))


def _abort_reason(message: str, status_code: int | None = None) -> dict[str, Any]:
    err_type = None if status_code is None else "InternalServerError"
    return {
        "type": "abort",
        "message": message,
        "status_code": status_code,
        "err_type": err_type,
    }


def _object(raw: bytes) -> dict[str, Any]:
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    return body
