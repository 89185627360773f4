"""SGLang's `/generate` body as this engine reads it, and the reply it writes.

Owns both frames. Never runs anything. Invariant: what the engine cannot do is HTTP 400 by name, and
a reply's ids, log-probs, `completion_tokens` and version spans are all of the same tokens.

Scoring a prompt (`logprob_start_len` = s of a prompt of L ids, read in SGLang 0.5.23):
`input_token_logprobs` has L - s entries `[log-prob, id, null]`, of the ids s..L-1. Entry 0 has no
log-prob (null) even where s > 0, so ask for one position earlier. They are log softmax(logits)
without any temperature, whatever the request's. With `max_new_tokens: 0` nothing is sampled.
"""

from __future__ import annotations

import base64
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..protocol.request import new_rid
from ..server_words import Refused, check_length, version_spans
from .params import read_params
from .task import Task


class _Body(msgspec.Struct):
    input_ids: list[Any] | None = None
    text: Any = None
    sampling_params: Any = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: Any = None
    return_hidden_states: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    return_indexer_topk: bool | None = None
    lora_path: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None


_DECODER = msgspec.json.Decoder(_Body)
_UNABLE = (
    *("stream", "top_logprobs_num", "token_ids_logprob", "return_hidden_states"),
    *("return_indexer_topk", "lora_path", "image_data", "video_data", "audio_data"),
    *("custom_logit_processor", "session_params"),
)
"""Top-level fields that would change the reply; other unknown keys are ignored, as in SGLang."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a request depends on the model."""

    context_tokens: int
    vocabulary_size: int
    has_text: bool
    has_experts: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """What only the reply needs to know of a request."""

    return_logprob: bool
    return_prompt: bool
    experts_start: int


def read_generate(raw: bytes, limits: Limits, in_use: Container[str]) -> tuple[Task, Frame]:
    """Return what is asked for.

    Raises:
        Refused: in SGLang's words where SGLang refuses it too.
    """
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(str(error), contract=True) from None
    for name in _UNABLE:
        if getattr(body, name):
            raise Refused(f"the hf engine cannot honour {name}")
    ids = _ids(body, limits)
    if isinstance(body.rid, list):
        raise Refused("this engine takes one request per call: rid is a list")
    if body.rid and body.rid in in_use:
        raise Refused(f"Duplicate request ID detected: {body.rid}")
    params = read_params(body.sampling_params, limits.vocabulary_size, has_text=limits.has_text)
    given = (body.sampling_params or {}).get("max_new_tokens")
    check_length(len(ids), given, limits.context_tokens)
    params.max_new_tokens = min(params.max_new_tokens, limits.context_tokens - len(ids))
    frame = Frame(
        bool(body.return_logprob),
        bool(body.return_prompt_token_ids),
        _experts_start(body, len(ids), limits),
    )
    task = Task(
        rid=body.rid or new_rid(),
        prompt=ids,
        params=params,
        score_from=_score_from(body, len(ids)),
        salt=body.extra_key or body.cache_salt or "",
        wants_experts=bool(body.return_routed_experts),
    )
    return task, frame


def _ids(body: _Body, limits: Limits) -> list[int]:
    ids = body.input_ids
    if body.text is not None or ids is None:
        raise Refused("the hf engine takes input_ids, not text")
    if not ids:
        raise Refused("input_ids is empty")
    if not all(type(token) is int for token in ids):
        raise Refused("this engine takes one request per call: input_ids is no list of integers")
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocabulary_size:
        raise Refused(
            f"input_ids has the id {low if low < 0 else high} outside "
            f"0..{limits.vocabulary_size - 1}"
        )
    return ids


def _score_from(body: _Body, num_prompt: int) -> int | None:
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if not body.return_logprob or start == -1:
        return None
    if not 0 <= start <= num_prompt:
        raise Refused(
            f"logprob_start_len={start} must be in [0, {num_prompt}], the number of input tokens."
        )
    return start if start < num_prompt else None


def _experts_start(body: _Body, num_prompt: int, limits: Limits) -> int:
    if not body.return_routed_experts:
        return 0
    if not limits.has_experts:
        raise Refused(
            "the hf engine cannot honour return_routed_experts: this model has no router whose "
            "choice it can read"
        )
    start = body.routed_experts_start_len or 0
    if not 0 <= start <= num_prompt:
        raise Refused(f"routed_experts_start_len={start} must be in [0, {num_prompt}].")
    return start


def reply(task: Task, frame: Frame, text: str, latency_s: float) -> dict[str, Any]:
    """Return the whole reply of a request that ended.

    Args:
        task: with its finish.
        frame: what was asked for.
        text: of its output.
        latency_s: since its arrival.
    """
    num = len(task.output)
    meta: dict[str, Any] = {
        "id": task.rid,
        "finish_reason": task.finish,
        "prompt_tokens": len(task.prompt),
        "completion_tokens": num,
        "cached_tokens": task.num_cached,
        "weight_version": task.version,
        "weight_versions": version_spans(task.changes, task.version, num) if num else [],
        "e2e_latency": latency_s,
    }
    if frame.return_logprob:
        nothing = [None] * num
        meta["input_token_logprobs"] = _scored(task)
        meta["output_token_logprobs"] = list(zip(task.log_probs, task.output, nothing, strict=True))
    if task.wants_experts:
        meta["routed_experts"] = _experts(task, frame.experts_start)
    body: dict[str, Any] = {"text": text, "output_ids": task.output, "meta_info": meta}
    if frame.return_prompt:
        body["prompt_token_ids"] = task.prompt
    return body


def _scored(task: Task) -> list[list[Any]]:
    if task.score_from is None:
        return []
    ids = task.prompt[task.score_from :]
    known = [None, *task.scores][: len(ids)]
    # An aborted request has scored as far as it came.
    return [[score, token, None] for score, token in zip(known, ids, strict=False)]


def _experts(task: Task, start: int) -> str | None:
    """Return base64 of raw int32 [rows, layers, top_k], from `start` to the last token fed in."""
    if not task.experts:
        return None
    rows = np.concatenate(task.experts)[start : len(task.prompt) + len(task.output) - 1]
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode()
