"""vLLM's protocol in front of the simulated engine.

Owns vLLM's paths and its control calls. Never samples, and keeps no request.
Invariant: a client cannot tell these answers from vLLM's own: request ids come back with their
prefix and abort by it, exactly; in the pauses `abort` and `wait` a new request is a 503, in `keep`
it waits; control calls exist in dev mode only.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ..server_words import Refused, VllmRefused, vllm_error_body
from .core import Pause, SimCore
from .damage import Frame, cut_to, spoil
from .faults import STATUSES, Fault
from .flight import ABORTED, Deliver, End, Flight, Stream
from .fronts import Routes, end_stream, json_object, send, send_event, status_words
from .http import Exchange
from .numbers import ReplayConfig, routed_experts
from .vllm_reply import EventWriter, ReplyWriter
from .vllm_request import VllmBody, read_completion, read_generate

_ENCODER = msgspec.json.Encoder()
_PAUSED = vllm_error_body(
    "Generation is paused. Please retry after it resumes.", 503, "ServiceUnavailableError"
)
_ERRORS = frozenset({Fault.ABORT_CODE, Fault.ABORT_503, Fault.NAN})
"""What is a finish reason in SGLang, and an HTTP error here."""


class VllmFront:
    """Reads requests, and writes replies, in vLLM's words."""

    def __init__(
        self,
        core: SimCore,
        *,
        context_tokens: int,
        replay: ReplayConfig,
        is_raw: bool,
        is_dev: bool = True,
        is_old: bool = False,
        model: str = "",
    ) -> None:
        self._core = core
        self._context_tokens = context_tokens
        self._replay = replay
        self._is_raw = is_raw
        self._is_dev = is_dev
        self._writer = ReplyWriter(core.policy.vocabulary, replay, model=model, is_old=is_old)
        self._model = model
        self._serial = itertools.count()
        self._rejects = False
        core.on_restart.append(self._accept)

    def routes(self) -> Routes:
        """Return (methods, handler) by path."""
        always: Routes = {
            "/inference/v1/generate": ("POST", self._generate),
            "/inference/v1/abort_requests": ("POST", self._abort),
            "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }
        control: Routes = {
            "/pause": ("POST", self._pause),
            "/resume": ("POST", self._resume),
            "/is_paused": ("GET", self._is_paused),
            "/abort_requests": ("POST", self._abort_some_or_all),
            "/update_weight_version": ("POST", self._update_weight_version),
            "/finish_weight_update": ("POST", self._finish_weight_update),
            "/weight_info": ("GET", self._weight_info),
        }
        return {**always, **control} if self._is_dev else always

    # -- generation

    def _generate(self, exchange: Exchange) -> None:
        self._check_type(exchange)
        request = read_generate(
            exchange.body,
            exchange.header(b"x-request-id"),
            context_tokens=self._context_tokens,
            model=self._model,
        )
        answer = partial(self._answer_generate, request)
        self._begin(exchange, request, request.rid, answer, self._writer.generate_event)

    def _complete(self, exchange: Exchange) -> None:
        self._check_type(exchange)
        request = read_completion(
            _vllm_object(exchange.body),
            exchange.header(b"x-request-id"),
            context_tokens=self._context_tokens,
            model=self._model,
        )
        answer = partial(self._answer_completion, request)
        self._begin(exchange, request, f"{request.rid}-0", answer, self._writer.completion_event)

    def _check_type(self, exchange: Exchange) -> None:
        sent = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
        if sent != "application/json":
            raise VllmRefused(
                "Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
            )

    def _begin(
        self,
        exchange: Exchange,
        request: VllmBody,
        rid: str,
        answer: Deliver,
        write: EventWriter,
    ) -> None:
        core = self._core
        size = core.policy.vocabulary.size
        if max(request.input_ids) >= size:
            raise VllmRefused(f"Token id {max(request.input_ids)} is out of vocabulary")
        if self._rejects:
            core.counts["rejected_in_pause"] += 1
            exchange.answer(503, _PAUSED)
            return
        core.counts["ignored_sampling_keys"] += len(request.unknown)
        order = core.draw()
        if order.fault is not None and order.fault in STATUSES:
            self._answer_status(exchange, order.fault)
            return
        sampling = request.sampling
        if self._is_raw:
            sampling = sampling | {"temperature": 1.0}
        stream = None
        if request.interval:
            exchange.begin()
            stream = Stream(partial(self._tell, request, write), request.interval)
        core.fly(
            f"{rid}#{next(self._serial)}",  # vLLM lets two requests have one id
            exchange,
            answer,
            rid=rid,
            prompt=request.input_ids,
            sampling=sampling,
            order=order,
            waits_frozen=False,
            stream=stream,
        )

    def _answer_status(self, exchange: Exchange, fault: Fault) -> None:
        status, words, kind = STATUSES[fault], status_words(self._core, fault), None
        if fault is Fault.QUEUE_FULL:
            words = (
                "The engine is currently busy and cannot accept new requests. Please try again "
                "later or on a different instance."
            )
        elif status == 400:
            kind = "BadRequestError"
        elif status == 500:
            kind = "InternalServerError"
        exchange.answer(status, vllm_error_body(words, status, kind))

    def _frame(self, request: VllmBody, flight: Flight, num: int, end: End | None) -> Frame | None:
        """Return what the reply says, or (without an end) what an event of it says so far.

        None where an error was answered in its place.
        """
        core, fault = self._core, flight.fault
        if fault in _ERRORS and end is not None and end is not ABORTED:
            self._answer_error(flight, 503 if fault is Fault.ABORT_503 else 500)
            return None
        # What is wrong with a reply is wrong from its first event on.
        size = num if end is not None or fault is None else max(num, flight.cut)
        ids: list[int] = flight.reply.ids[:size].tolist()
        frame = Frame(
            rid=request.rid,
            ids=ids,
            log_probs=core.log_probs(flight, size).tolist(),
            log_prob_ids=ids if fault is None else list(ids),
            end=end,
            num_prompt=len(request.input_ids),
            num_said=size,
            spans=core.spans(flight, size) if size else [],
            version=core.weight_version,
            experts=None,
        )
        if self._replay.layers and num and end is not None:
            frame.experts = routed_experts(
                core.fed(flight, num), request.experts_from, self._replay
            )
        if fault is not None:
            spoil(
                frame,
                fault,
                vocabulary_size=core.policy.vocabulary.size,
                limit=request.sampling["max_new_tokens"],
            )
            if fault is Fault.OTHER_RID:
                frame.rid = f"generate-tokens-{frame.rid}"
        if end is None:
            cut_to(frame, num)
        return frame

    def _answer_error(self, flight: Flight, status: int) -> None:
        kind = "ServiceUnavailableError" if status == 503 else "InternalServerError"
        words = "Internal server error" if status == 500 else "Request failed; please retry"
        body = vllm_error_body(words, status, kind)
        if flight.stream is None:
            flight.exchange.answer(status, body)
        else:
            end_stream(flight.exchange, body)

    def _answer_generate(self, request: VllmBody, flight: Flight, num: int, end: End) -> None:
        frame = self._frame(request, flight, num, end)
        if frame is None:
            return
        if flight.stream is None:
            send(flight.exchange, self._writer.generate(frame, request), flight.fault)
        else:
            self._end_stream(request, flight, frame, self._writer.generate_event)

    def _answer_completion(self, request: VllmBody, flight: Flight, num: int, end: End) -> None:
        frame = self._frame(request, flight, num, end)
        if frame is None:
            return
        if flight.stream is None:
            text = self._core.policy.vocabulary.decode(flight.reply.ids[:num])
            send(flight.exchange, self._writer.completion(frame, request, text), flight.fault)
        else:
            self._end_stream(request, flight, frame, self._writer.completion_event)

    def _tell(self, request: VllmBody, write: EventWriter, flight: Flight, num: int) -> None:
        frame = self._frame(request, flight, num, None)
        assert frame is not None
        send_event(flight.exchange, write(frame, request, flight.sent), flight.fault)

    def _end_stream(
        self, request: VllmBody, flight: Flight, frame: Frame, write: EventWriter
    ) -> None:
        counts = self._writer.counts_event(frame, request)
        events = (write(frame, request, flight.sent), *([] if counts is None else [counts]))
        end_stream(flight.exchange, *events, fault=flight.fault)

    # -- control

    def _abort(self, exchange: Exchange) -> None:
        """Answer first, abort then."""
        ids = _vllm_object(exchange.body).get("request_ids")
        if ids is None:
            raise VllmRefused("Missing 'request_ids' in request body", kind="Bad Request")
        chosen = frozenset([ids] if isinstance(ids, str) else ids)
        exchange.answer(200, b"", b"text/plain")
        asyncio.get_running_loop().call_soon(self._abort_now, chosen)

    def _abort_now(self, chosen: frozenset[str]) -> int:
        num = self._core.abort(lambda flight: flight.rid in chosen)
        self._core.counts["aborts_of_nothing"] += num == 0
        return num

    def _abort_some_or_all(self, exchange: Exchange) -> None:
        ids = _vllm_object(exchange.body).get("request_ids")
        if ids:
            self._abort_now(frozenset(ids))
            num = len(ids)
        else:
            num = self._core.abort(lambda _: True)
        exchange.answer(200, _ENCODER.encode({"status": "aborted", "aborted": num}))

    def _pause(self, exchange: Exchange) -> None:
        mode = dict(parse_qsl(exchange.query)).get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise VllmRefused(
                "1 validation error:\n  query.mode: Input should be 'abort', 'wait' or 'keep'",
                kind="Bad Request",
                param="query.mode",
            )
        self._rejects = mode != "keep"
        if mode == "abort":
            self._core.abort(lambda _: True)
        self._core.pause(Pause.FREEZE if mode == "keep" else Pause.DRAIN)
        done = partial(exchange.answer, 200, b'{"status":"paused"}')
        if mode == "keep":
            done()
        else:
            self._core.when_idle(done)

    def _resume(self, exchange: Exchange) -> None:
        self._accept()
        self._core.resume()
        exchange.answer(200, b'{"status":"resumed"}')

    def _accept(self) -> None:
        self._rejects = False

    def _is_paused(self, exchange: Exchange) -> None:
        is_paused = self._core.paused is not None
        exchange.answer(200, _ENCODER.encode({"is_paused": is_paused}))

    def _update_weight_version(self, exchange: Exchange) -> None:
        """Take a label; unlike SGLang's call of this name it aborts nothing."""
        label = _vllm_object(exchange.body).get("new_version")
        if not isinstance(label, str):
            raise VllmRefused(
                "1 validation error:\n  body.new_version: Input should be a valid string",
                kind="Bad Request",
                param="body.new_version",
            )
        self._core.set_version(label)
        exchange.answer(200, _ENCODER.encode({"success": True, "new_version": label}))

    def _finish_weight_update(self, exchange: Exchange) -> None:
        label = _vllm_object(exchange.body).get("weight_version")
        if label is not None:
            self._core.set_version(str(label))
        exchange.answer(200, b'{"message":"Weight update finished"}')

    def _weight_info(self, exchange: Exchange) -> None:
        exchange.answer(200, _ENCODER.encode({"weight_version": self._core.weight_version}))

    def _models(self, exchange: Exchange) -> None:
        card = {"id": self._model or "simulated", "object": "model", "owned_by": "vllm"}
        exchange.answer(200, _ENCODER.encode({"object": "list", "data": [card]}))

    def _health(self, exchange: Exchange) -> None:
        exchange.answer(200, b"", b"text/plain")


def _vllm_object(raw: bytes) -> dict[str, Any]:
    try:
        return json_object(raw)
    except Refused as refusal:
        raise VllmRefused(str(refusal), kind="Bad Request") from None
