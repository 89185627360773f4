"""SGLang's protocol in front of the simulated engine.

Owns SGLang's paths, its replies and its control calls. Never samples, and keeps no request but
those that a pause holds back. Invariant: a client cannot tell these answers from SGLang's own, but
for what `/model_info` and `/sim` say; a request that comes in a pause hangs until it is over.
"""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..server_words import Refused, error_body, weight_label
from .core import Pause, SimCore
from .damage import Frame, cut_to, spoil
from .faults import STATUSES, Fault
from .flight import End, Flight, Stream
from .fronts import Routes, end_stream, json_object, send, send_event, status_words
from .http import Exchange
from .numbers import ReplayConfig, routed_experts
from .policy import NOTICE
from .protocol import GenerateBody, read_generate, wants_stream

_ENCODER = msgspec.json.Encoder()
HEALTH_TIMEOUT_S = 20.0
"""How long `/health` waits for a token, which a paused server does not sample."""
_PAUSES = {"retract": Pause.RETRACT, "in_place": Pause.FREEZE}


class SglangFront:
    """Reads requests, and writes replies, in SGLang's words."""

    def __init__(
        self,
        core: SimCore,
        *,
        context_tokens: int,
        replay: ReplayConfig,
        is_raw: bool,
        is_incremental: bool = False,
    ) -> None:
        self._core = core
        self._is_incremental = is_incremental
        self._context_tokens = context_tokens
        self._replay = replay
        self._is_raw = is_raw
        self.held: list[Exchange] = []
        """`/generate` calls that came in a pause."""
        core.on_resume.append(self._release)
        core.on_restart.append(self._drop_held)

    def routes(self) -> Routes:
        """Return (methods, handler) by path."""
        return {
            "/generate": ("POST", self._generate),
            "/abort_request": ("POST", self._abort_request),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/health": ("GET", self._health),
            "/health_generate": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/update_weight_version": ("POST", self._update_weight_version),
            "/flush_cache": ("GET POST", self._flush_cache),
            "/pause_generation": ("POST", self._pause),
            "/continue_generation": ("POST", self._continue),
        }

    # -- generation

    def _generate(self, exchange: Exchange) -> None:
        core = self._core
        if core.paused is not None:
            self.held.append(exchange)
            return
        try:
            request = read_generate(
                exchange.body, self._context_tokens, core.policy.vocabulary.size, core.flights
            )
        except Refused as refusal:
            if refusal.is_contract or not wants_stream(exchange.body):
                raise
            core.counts["refused"] += 1
            _end_with_error(exchange, str(refusal))
            return
        order = core.draw()
        if order.fault is not None and order.fault in STATUSES:
            self._answer_status(exchange, order.fault, request)
            return
        sampling = request.sampling
        if self._is_raw:
            sampling = sampling | {"temperature": 1.0}
        core.fly(
            request.rid,
            exchange,
            partial(self._answer, request),
            rid=request.rid,
            prompt=request.input_ids,
            sampling=sampling,
            order=order,
            waits_frozen=True,
            stream=self._begin_stream(exchange, request) if request.interval else None,
        )

    def _begin_stream(self, exchange: Exchange, request: GenerateBody) -> Stream:
        exchange.begin()
        return Stream(partial(self._tell, request), request.interval)

    def _answer_status(self, exchange: Exchange, fault: Fault, request: GenerateBody) -> None:
        if request.interval and fault in (Fault.OVERFLOW, Fault.HTTP_400):
            _end_with_error(exchange, status_words(self._core, fault))
            return
        if fault is Fault.HTTP_404:
            exchange.answer(404, b'{"detail":"Not Found"}')
            return
        exchange.answer(STATUSES[fault], error_body(status_words(self._core, fault)))

    def _answer(self, request: GenerateBody, flight: Flight, num: int, end: End) -> None:
        raw = self._body(request, flight, num, end)
        if flight.stream is None:
            send(flight.exchange, raw, flight.fault)
        else:
            end_stream(flight.exchange, raw, fault=flight.fault)

    def _tell(self, request: GenerateBody, flight: Flight, num: int) -> None:
        send_event(flight.exchange, self._body(request, flight, num, None), flight.fault)

    def _body(self, request: GenerateBody, flight: Flight, num: int, end: End | None) -> bytes:
        """Return a reply, or (without an end) an event of one that goes on."""
        frame = self._frame(request, flight, num, end)
        meta = self._meta(frame, self._core.elapsed_s(flight))
        if end is None:
            meta["finish_reason"] = None
        if request.score_from is not None:
            self._add_scores(meta, request, request.score_from)
        start = flight.sent if self._is_incremental else 0
        body = {
            "text": self._core.policy.vocabulary.decode(flight.reply.ids[start:num]),
            "output_ids": frame.ids,
            "meta_info": meta,
        }
        if start and end is not None and end.queued:
            body["output_ids"] = frame.ids[-1:]  # as SGLang has it, with all of its log-probs
        elif start:
            body["output_ids"] = frame.ids[start:]
            if frame.log_probs is not None:
                meta["output_token_logprobs"] = meta["output_token_logprobs"][start:]
        return _ENCODER.encode(body)

    def _frame(self, request: GenerateBody, flight: Flight, num: int, end: End | None) -> Frame:
        core, fault = self._core, flight.fault
        # What is wrong with a reply is wrong from its first event on.
        size = num if end is not None or fault is None else max(num, flight.cut)
        ids: list[int] = flight.reply.ids[:size].tolist()
        queued = end is not None and end.queued
        frame = Frame(
            rid=request.rid,
            ids=ids,
            log_probs=core.log_probs(flight, size).tolist(),
            log_prob_ids=ids if fault is None else list(ids),
            end=end,
            num_prompt=None if queued else len(request.input_ids),
            num_said=size,
            spans=core.spans(flight, size),
            version=core.weight_version,
            experts=None,
        )
        if request.experts_from is not None and self._replay.layers and end and not queued:
            frame.experts = routed_experts(
                core.fed(flight, num), request.experts_from, self._replay
            )
        if fault is not None:
            limit = request.sampling.get("max_new_tokens")
            spoil(
                frame,
                fault,
                vocabulary_size=core.policy.vocabulary.size,
                limit=128 if limit is None else limit,
            )
        if end is None:
            cut_to(frame, num)
        return frame

    def _meta(self, frame: Frame, elapsed_s: float) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": frame.rid}
        if frame.end is not None:
            meta["finish_reason"] = _finish(frame.end, len(frame.ids))
        if frame.num_prompt is not None:
            meta["prompt_tokens"] = frame.num_prompt
        if frame.version is not None:
            meta["weight_version"] = frame.version
        if frame.num_said is not None:
            meta["completion_tokens"] = frame.num_said
        if frame.num_prompt is not None:
            meta["cached_tokens"] = 0
        meta["e2e_latency"] = elapsed_s
        if frame.log_probs is not None:
            num = len(frame.log_probs)
            meta["output_token_logprobs"] = list(
                zip(frame.log_probs, frame.log_prob_ids, [None] * num, strict=True)
            )
        if frame.spans is not None:
            meta["weight_versions"] = frame.spans
        if frame.experts is not None:
            rows = frame.experts.astype("<i4", copy=False)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return meta

    def _add_scores(self, meta: dict[str, Any], request: GenerateBody, start: int) -> None:
        ids = request.input_ids[start:]
        # As in SGLang: the first entry has no log-prob, whatever position it is of.
        scores = [
            None,
            *self._core.score(np.array(request.input_ids, dtype=np.int32), start + 1).tolist(),
        ]
        meta["input_token_logprobs"] = list(zip(scores, ids, [None] * len(ids), strict=True))
        self._core.counts["scored"] += 1

    # -- control

    def _abort_request(self, exchange: Exchange) -> None:
        body = json_object(exchange.body)
        rid, everything = str(body.get("rid") or ""), body.get("abort_all") is True
        if everything:
            self._core.abort(lambda _: True)
        elif rid:  # an empty rid would be a prefix of every other: ignored
            num = self._core.abort(lambda flight: flight.rid.startswith(rid))
            self._core.counts["aborts_of_nothing"] += num == 0
        exchange.answer(200, b'{"success":true}')

    def _update_weight_version(self, exchange: Exchange) -> None:
        body = json_object(exchange.body)
        if "new_version" not in body:
            raise Refused("new_version is missing")
        label = weight_label(body["new_version"])
        if body.get("abort_all_requests", True):
            self._core.abort(lambda _: True)
        self._core.set_version(label)
        message = f"Weight version updated to {label}"
        exchange.answer(
            200, _ENCODER.encode({"success": True, "message": message, "new_version": label})
        )

    def _pause(self, exchange: Exchange) -> None:
        mode = json_object(exchange.body).get("mode", "abort")
        if mode not in ("abort", *_PAUSES):
            raise Refused(f"mode {mode!r}: expected abort, retract or in_place")
        if mode == "abort":
            self._core.abort(lambda _: True)
        self._core.pause(_PAUSES.get(mode, Pause.FREEZE))
        exchange.answer(200, b'{"message":"Generation paused successfully.","status":"ok"}')

    def _continue(self, exchange: Exchange) -> None:
        self._core.resume()
        exchange.answer(200, b'{"message":"Generation continued successfully.","status":"ok"}')

    def _release(self) -> None:
        held, self.held = self.held, []
        for waiting in held:
            if not waiting.closed:
                try:
                    self._generate(waiting)
                except Refused as refusal:
                    self._core.counts["refused"] += 1
                    waiting.answer(refusal.status, refusal.body)

    def _drop_held(self) -> None:
        held, self.held = self.held, []
        for waiting in held:
            waiting.drop()

    def _flush_cache(self, exchange: Exchange) -> None:
        busy = bool(self._core.flights)
        text = b"Flush cache failed.\n" if busy else b"Cache flushed.\n"
        exchange.answer(400 if busy else 200, text, b"text/plain")

    def _model_info(self, exchange: Exchange) -> None:
        info = {
            "model_path": f"simulated engine: {NOTICE}",
            "served_model_name": "simulated",
            "tokenizer_path": "",
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._core.weight_version,
            "load_format": None,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "simulated": True,
        }
        exchange.answer(200, _ENCODER.encode(info))

    def _health(self, exchange: Exchange) -> None:
        """Answer at once while tokens are sampled; a paused server samples none and is ill."""
        if self._core.paused not in (Pause.FREEZE, Pause.RETRACT):
            exchange.answer(200, b"", b"text/plain")
            return
        self._core.counts["health_in_pause"] += 1

        def give_up() -> None:
            is_up = self._core.paused is None
            exchange.answer(200 if is_up else 503, b"", b"text/plain")

        asyncio.get_running_loop().call_later(HEALTH_TIMEOUT_S, give_up)

    def _ready(self, exchange: Exchange) -> None:
        exchange.answer(200 if self._core.paused is None else 503, b"", b"text/plain")


def _end_with_error(exchange: Exchange, message: str) -> None:
    """Answer a stream that SGLang refuses: it has begun with HTTP 200 before it looks."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }
    exchange.begin()
    end_stream(exchange, _ENCODER.encode({"error": error}))


def _finish(end: End, num: int) -> dict[str, Any]:
    if end.kind == "abort":
        finish: dict[str, Any] = {"type": "abort", "message": end.message}
        if not end.queued:
            err_type = None if end.status is None else "InternalServerError"
            finish |= {"status_code": end.status, "err_type": err_type}
        return finish
    if end.kind == "length":
        return {"type": "length", "length": num}
    return {"type": end.kind, "matched": end.matched}
