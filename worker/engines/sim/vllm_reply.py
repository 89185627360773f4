"""A reply's frame in vLLM's words, as bytes.

Owns the shape of the two replies, whole and as events of a stream, of today's servers and of older
ones. Never samples and does no
I/O. Invariant: every field is one of vLLM's own classes, and what a frame leaves out is null.

Axes: C ids of one reply.
"""

from __future__ import annotations

import base64
import io
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from .damage import Frame
from .numbers import ReplayConfig
from .vllm_request import VllmBody
from .vocabulary import Vocabulary

_ENCODER = msgspec.json.Encoder()


EventWriter: TypeAlias = "Callable[[Frame, VllmBody, int], bytes]"
"""Writes the event of a frame: what is new in it behind so many ids."""


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None
    rank: int | None


class _Entry(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None
    rank: int | None
    top_logprobs: list[_Candidate]


class _OldEntry(msgspec.Struct, gc=False):
    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[Any]


class ReplyWriter:
    """Writes replies of one server."""

    def __init__(
        self, vocabulary: Vocabulary, replay: ReplayConfig, *, model: str, is_old: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._replay = replay
        self._model = model or "simulated"
        self._is_old = is_old

    def generate(self, frame: Frame, request: VllmBody) -> bytes:
        """Return the body of `/inference/v1/generate`."""
        choice = {"index": 0, **self._finish(frame), "token_ids": frame.ids}
        choice["routed_experts"] = _npy(frame.experts, self._replay)
        choice["sampling_mask"] = None
        body: dict[str, Any] = {
            "request_id": frame.rid,
            "model": self._model,
            "created": int(time.time()),
            "usage": _usage(frame),
            "prompt_logprobs": None,
            "prompt_token_ids": request.input_ids if request.return_token_ids else None,
            "kv_transfer_params": None,
        }
        if not self._is_old:
            choice["weight_versions"] = frame.spans
            body |= {
                "prompt_token_id_logprobs": None,
                "mm_placeholders": None,
                "metrics": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
            }
        choice["logprobs"] = None
        if request.num_log_probs is not None and frame.log_probs is not None:
            choice["logprobs"] = {"content": self._entries(frame, request.num_log_probs)}
        body["choices"] = [choice]
        return _ENCODER.encode(body)

    def completion(self, frame: Frame, request: VllmBody, text: str) -> bytes:
        """Return the body of `/v1/completions`."""
        choice = {
            "index": 0,
            "text": text,
            "logprobs": None,
            **self._finish(frame),
            "token_ids": frame.ids if request.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": request.input_ids if request.return_token_ids else None,
            "routed_experts": _npy(frame.experts, self._replay),
        }
        if request.num_log_probs is not None and frame.log_probs is not None:
            choice["logprobs"] = self._completion_log_probs(
                frame, frame.log_probs, request.names_ids
            )
        if not self._is_old and request.returns_versions:
            choice["weight_versions"] = frame.spans
        body = {
            "id": frame.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(frame),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return _ENCODER.encode(body)

    def generate_event(self, frame: Frame, request: VllmBody, start: int) -> bytes:
        """Return an event of `/inference/v1/generate`."""
        delta = _behind(frame, start)
        choice: dict[str, Any] = {"index": 0, **self._finish(frame), "token_ids": delta.ids}
        choice["routed_experts"] = _npy(frame.experts, self._replay)
        choice["sampling_mask"] = None
        if not self._is_old:
            choice["weight_versions"] = frame.spans
        choice["logprobs"] = None
        if request.num_log_probs is not None and delta.log_probs is not None:
            choice["logprobs"] = {"content": self._entries(delta, request.num_log_probs)}
        body: dict[str, Any] = {"request_id": frame.rid, "usage": None}
        if start == 0 and request.return_token_ids:
            body["prompt_token_ids"] = request.input_ids
        if not self._is_old:
            body["output_mode"] = "tokens"
        return _ENCODER.encode(body | {"choices": [choice]})

    def completion_event(self, frame: Frame, request: VllmBody, start: int) -> bytes:
        """Return an event of `/v1/completions`."""
        delta = _behind(frame, start)
        shown = np.array([max(one, 0) for one in delta.ids], dtype=np.int32)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._vocabulary.decode(shown),
            "logprobs": None,
            **self._finish(frame),
            "prompt_token_ids": None,
            "token_ids": delta.ids if request.return_token_ids else None,
        }
        if start == 0 and request.return_token_ids:
            choice["prompt_token_ids"] = request.input_ids
        if request.num_log_probs is not None and delta.log_probs is not None:
            choice["logprobs"] = self._completion_log_probs(
                delta, delta.log_probs, request.names_ids
            )
        if not self._is_old:
            choice["weight_versions"] = frame.spans if request.returns_versions else None
        body = {
            "id": frame.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "kv_transfer_params": None,
        }
        return _ENCODER.encode(body)

    def counts_event(self, frame: Frame, request: VllmBody) -> bytes | None:
        """Return the last event of a stream, None where it has none."""
        usage = _usage(frame)
        if usage is None or not request.counts_in_stream:
            return None
        usage = {name: value for name, value in usage.items() if value is not None}
        name = "id" if frame.rid.startswith("cmpl-") else "request_id"
        return _ENCODER.encode({name: frame.rid, "choices": [], "usage": usage})

    def _entries(self, frame: Frame, num_log_probs: int) -> list[_Entry] | list[_OldEntry]:
        pairs = zip(frame.log_prob_ids, frame.log_probs or (), strict=True)
        if self._is_old:
            return [_OldEntry(f"token_id:{token}", said, None, []) for token, said in pairs]
        if num_log_probs == 0:
            return [_Entry(token, said, 1, []) for token, said in pairs]
        return [_Entry(token, said, 1, [_Candidate(token, said, 1)]) for token, said in pairs]

    def _completion_log_probs(
        self, frame: Frame, said: list[Any], names_ids: bool
    ) -> dict[str, Any]:
        tokens = [
            f"token_id:{one}"
            if names_ids
            else self._vocabulary.decode(np.array([max(one, 0)], dtype=np.int32))
            for one in frame.log_prob_ids
        ]
        return {
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][:-1],
            "token_logprobs": said,
            "tokens": tokens,
            "top_logprobs": [{token: one} for token, one in zip(tokens, said, strict=True)],
        }

    def _finish(self, frame: Frame) -> dict[str, Any]:
        end = frame.end
        if end is None:
            return {"finish_reason": None, "stop_reason": None}
        # The model's own end token is no stop that anybody asked for.
        is_eos = end.matched == self._vocabulary.im_end
        return {"finish_reason": end.kind, "stop_reason": None if is_eos else end.matched}


def _behind(frame: Frame, start: int) -> Frame:
    """Return what is new in a frame behind so many ids."""
    log_probs = None if frame.log_probs is None else frame.log_probs[start:]
    return replace(
        frame,
        ids=frame.ids[start:],
        log_probs=log_probs,
        log_prob_ids=frame.log_prob_ids[start:],
    )


def _usage(frame: Frame) -> dict[str, Any] | None:
    if frame.num_prompt is None or frame.num_said is None:
        return None
    return {
        "prompt_tokens": frame.num_prompt,
        "total_tokens": frame.num_prompt + frame.num_said,
        "completion_tokens": frame.num_said,
        "prompt_tokens_details": None,
    }


def _npy(experts: npt.NDArray[np.int32] | None, replay: ReplayConfig) -> str | None:
    if experts is None:
        return None
    buffer = io.BytesIO()
    np.save(buffer, experts.astype(replay.dtype or replay.narrowest))
    return base64.b64encode(buffer.getvalue()).decode()
