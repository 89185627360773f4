"""A reply's frame in vLLM's words, as bytes.

Owns the shape of the two replies, of today's servers and of older ones. Never samples and does no
I/O. Invariant: every field is one of vLLM's own classes, and what a frame leaves out is null.

Axes: C ids of one reply.
"""

from __future__ import annotations

import base64
import io
import itertools
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .damage import Frame
from .numbers import ReplayConfig
from .vllm_request import VllmBody
from .vocabulary import Vocabulary

_ENCODER = msgspec.json.Encoder()


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
