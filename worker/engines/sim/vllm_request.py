"""vLLM's `/inference/v1/generate` and `/v1/completions` as the simulated engine reads them.

Owns the checks that vLLM makes before it samples. Never answers anything itself. Invariant: what a
real server of this protocol refuses is refused here too, in its words, and what it ignores (unknown
keys, also of `sampling_params`) is ignored and counted by the caller; what this engine cannot do is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..protocol.request import new_rid
from ..server_words import VllmRefused, vllm_check_length

SAMPLING_KEYS: frozenset[str] = frozenset(
    "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k "
    "min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs "
    "prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize "
    "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
    "stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias "
    "allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget "
    "repetition_detection routed_experts_prompt_start trace_decode_token_ids".split()
)
"""What vLLM takes; it ignores any other key without a word."""
_UNABLE: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "logprob_token_ids": (None,),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "trace_decode_token_ids": (None,),
    "echo": (None, False),
    "suffix": (None,),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
}
"""What a script cannot honour, with the values that ask for nothing."""
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, 2.0, "temperature must be in [0, 2], got {}."),
    "top_p": (1e-9, 1.0, "top_p must be in (0, 1], got {}."),
    "top_k": (-1, 1 << 31, "top_k must be 0 (disable), or at least 1, got {}."),
    "min_p": (0.0, 1.0, "min_p must be in [0, 1], got {}."),
    "presence_penalty": (-2.0, 2.0, "presence_penalty must be in [-2, 2], got {}."),
    "frequency_penalty": (-2.0, 2.0, "frequency_penalty must be in [-2, 2], got {}."),
    "repetition_penalty": (1e-9, 1e9, "repetition_penalty must be greater than zero, got {}."),
    "max_tokens": (1, 1 << 62, "max_tokens must be at least 1, got {}."),
    "min_tokens": (0, 1 << 62, "min_tokens must be greater than or equal to 0, got {}."),
    "logprobs": (-1, 1 << 31, "logprobs must be non-negative or -1, got {}."),
    "stream_interval": (1, 1 << 62, "stream_interval must be at least 1, got {}."),
}
_INTEGERS: tuple[str, ...] = tuple(
    "max_tokens min_tokens seed logprobs top_k routed_experts_prompt_start stream_interval".split()
)
MAX_SALT_CHARS = 1024


class _Generate(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    features: Any = None
    content_parts: Any = None


_DECODER = msgspec.json.Decoder(_Generate)


@dataclass(frozen=True, slots=True)
class VllmBody:
    """A request that will be answered."""

    rid: str
    """As the reply names it and an abort must: with the path's prefix."""
    input_ids: list[int]
    sampling: dict[str, Any]
    """In the names of `Policy.reply`."""
    num_log_probs: int | None
    """None returns none."""
    return_token_ids: bool
    names_ids: bool
    """Log-probs of `/v1/completions` name ids rather than texts."""
    returns_versions: bool
    """`/v1/completions` says which weights sampled what."""
    experts_from: int
    """First position whose routed experts are wanted."""
    interval: int
    """New tokens of an event, where a stream is asked for; 0 asks for none."""
    counts_in_stream: bool
    """A stream ends with an event of counts (`include_usage`)."""
    unknown: tuple[str, ...]
    """Sampling keys that vLLM would not have read."""


def read_generate(
    raw: bytes, header_id: str | None, *, context_tokens: int, model: str
) -> VllmBody:
    """Return what `/inference/v1/generate` asks for.

    Args:
        raw: the body.
        header_id: of `X-Request-Id`, which wins.
        context_tokens: of the model.
        model: that is served; empty takes every name.

    Raises:
        VllmRefused: in vLLM's words where vLLM refuses it too.
    """
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None
    if not body.token_ids:
        raise _invalid("token_ids: List should have at least 1 item after validation, not 0")
    if min(body.token_ids) < 0:
        raise _invalid("token_ids must not contain negative values")
    _check_salt(body.cache_salt)
    if body.output_mode != "tokens":
        raise VllmRefused(
            f"output_mode={body.output_mode!r} requires a tokenizer, but this server does not load "
            "one (--tokens-only or --skip-tokenizer-init). Send the request to a server that loads "
            "a tokenizer, or use output_mode='tokens'."
        )
    if body.features or body.content_parts:
        raise VllmRefused("the simulated engine takes token_ids, no images")
    sampling = body.sampling_params
    if sampling.get("stop") and sampling.get("detokenize") is False:
        raise _invalid(
            "stop strings are only supported when detokenize is True. Set `detokenize=True` to use "
            "stop."
        )
    _check(sampling, body.priority, body.model, model)
    vllm_check_length(len(body.token_ids), context_tokens)
    return _body(
        f"generate-tokens-{header_id or body.request_id or new_rid()}",
        body.token_ids,
        sampling,
        context_tokens=context_tokens,
        default_tokens=context_tokens,
        return_token_ids=body.return_token_ids is True,
        unknown=tuple(sampling.keys() - SAMPLING_KEYS),
        stream=body.stream is True,
        options=body.stream_options,
    )


def read_completion(
    fields: dict[str, Any], header_id: str | None, *, context_tokens: int, model: str
) -> VllmBody:
    """Return what `/v1/completions` asks for; its sampling parameters are fields of the body.

    Raises:
        VllmRefused: in vLLM's words where vLLM refuses it too.
    """
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or not all(type(one) is int for one in prompt):
        raise VllmRefused("the simulated engine takes one prompt of token ids")
    _check_salt(fields.get("cache_salt"))
    _check(fields, fields.get("priority") or 0, fields.get("model"), model)
    if fields.get("stream_options") and not fields.get("stream"):
        raise VllmRefused(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    limit = fields.get("max_tokens")
    if limit is not None and limit > context_tokens:
        raise VllmRefused(
            f"max_tokens={limit} cannot be greater than max_model_len={context_tokens}. Please "
            "request fewer output tokens.",
            param="max_tokens",
        )
    if len(prompt) > context_tokens:
        raise VllmRefused(
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt "
            f"contains {len(prompt)} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if len(prompt) == context_tokens:
        raise VllmRefused("max_tokens must be at least 1, got 0.", param="max_tokens")
    return _body(
        f"cmpl-{header_id or fields.get('request_id') or new_rid()}",
        prompt,
        fields,
        context_tokens=context_tokens,
        default_tokens=16,
        return_token_ids=fields.get("return_token_ids") is True,
        unknown=(),
        stream=fields.get("stream") is True,
        options=fields.get("stream_options"),
    )


def _body(
    rid: str,
    ids: list[int],
    sampling: Mapping[str, Any],
    *,
    context_tokens: int,
    default_tokens: int,
    return_token_ids: bool,
    unknown: tuple[str, ...],
    stream: bool,
    options: Mapping[str, Any] | None,
) -> VllmBody:
    limit = sampling.get("max_tokens")
    wanted = default_tokens if limit is None else limit
    own: dict[str, Any] = {"max_new_tokens": min(wanted, context_tokens - len(ids))}
    for theirs, name in (
        ("seed", "sampling_seed"),
        ("stop", "stop"),
        ("stop_token_ids", "stop_token_ids"),
        ("temperature", "temperature"),
    ):
        if sampling.get(theirs) is not None:
            own[name] = sampling[theirs]
    return VllmBody(
        rid=rid,
        input_ids=ids,
        sampling=own,
        num_log_probs=sampling.get("logprobs"),
        return_token_ids=return_token_ids,
        names_ids=sampling.get("return_tokens_as_token_ids") is True,
        returns_versions=sampling.get("return_weight_versions") is True,
        experts_from=min(len(ids), sampling.get("routed_experts_prompt_start") or 0),
        interval=(sampling.get("stream_interval") or 1) if stream else 0,
        counts_in_stream=(options or {}).get("include_usage") is True,
        unknown=unknown,
    )


def _invalid(message: str) -> VllmRefused:
    """Return what a body is refused with that its types do not take."""
    return VllmRefused(f"1 validation error:\n  {message}", kind="Bad Request")


def _check_salt(salt: Any) -> None:
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS):
        raise _invalid("Parameter 'cache_salt' must be a non-empty string if provided.")


def _check(sampling: Mapping[str, Any], priority: int, asked: str | None, model: str) -> None:
    if model and asked and asked != model:
        raise VllmRefused(
            f"The model `{asked}` does not exist. Valid aliases: {model}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )
    if priority:
        raise VllmRefused(f"Got priority {priority} but Priority scheduling is not enabled.")
    for key in _INTEGERS:
        value = sampling.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise _invalid(f"{key}: Input should be a valid integer, got {value!r}")
    for key, (low, high, words) in _RANGES.items():
        value = sampling.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _invalid(f"{key}: Input should be a valid number, got {value!r}")
        if not low <= value <= high:
            raise VllmRefused(words.format(value))
    for key, nothing in _UNABLE.items():
        if key in sampling and sampling[key] not in nothing:
            raise VllmRefused(f"the simulated engine cannot honour {key}")
