"""SGLang's `/generate` as the simulated engine reads it: what is refused, and in which words.

Owns the checks that SGLang makes before it samples. Never answers anything itself. Invariant: what
a real server of this protocol refuses is refused here too (unknown sampling parameters, prompts
over the context, a rid in use), so that a client that works here works there; what this engine
cannot do is refused by name rather than ignored.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec

from ..protocol.request import new_rid
from ..server_words import Refused, check_length

_SAMPLING_KEYS: tuple[str, ...] = tuple(
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
    "presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag "
    "ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval "
    "logit_bias sampling_seed custom_params beam_width watermark choice".split()
)
"""What SGLang takes; anything else is HTTP 400 there and here."""
_UNABLE: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None,),
    "logit_bias": (None, {}),
    "ignore_eos": (None, False),
    "min_new_tokens": (None, 0),
    "beam_width": (None,),
    "choice": (None, []),
}
"""What a script cannot honour, with the values that ask for nothing."""


class _Body(msgspec.Struct):
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    stream: bool | None = None
    text: Any = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A request that will be answered."""

    rid: str
    input_ids: list[int]
    sampling: dict[str, Any]
    score_from: int | None = None
    """First input position that is scored; None scores none."""
    experts_from: int | None = None
    """First position whose routed experts are wanted; None wants none."""
    interval: int = 0
    """New tokens of an event, where a stream is asked for; 0 asks for none."""


_DECODER = msgspec.json.Decoder(_Body)


def read_generate(
    raw: bytes, context_tokens: int, vocabulary_size: int, in_use: Container[str]
) -> GenerateBody:
    """Return what is asked for.

    Raises:
        Refused: in SGLang's words where SGLang refuses it too.
    """
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(str(error), contract=True) from None
    ids = body.input_ids
    if body.text is not None or ids is None:
        raise Refused("the simulated engine takes input_ids, not text")
    if not ids:
        raise Refused("input_ids is empty")
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        raise Refused(f"input_ids has an id outside 0..{vocabulary_size - 1}")
    if body.rid is not None and body.rid in in_use:
        raise Refused(f"Duplicate request ID detected: {body.rid}")
    sampling = body.sampling_params or {}
    _check_sampling(sampling)
    check_length(len(ids), sampling.get("max_new_tokens"), context_tokens)
    return GenerateBody(
        body.rid or new_rid(),
        ids,
        sampling,
        _score_from(body, len(ids)),
        _experts_from(body, len(ids)),
        (sampling.get("stream_interval") or 1) if body.stream else 0,
    )


def wants_stream(raw: bytes) -> bool:
    """Return whether a body that is refused asked for a stream."""
    try:
        return _DECODER.decode(raw).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _score_from(body: _Body, num_ids: int) -> int | None:
    start = body.logprob_start_len
    if not body.return_logprob or start is None or start < 0 or start == num_ids:
        return None
    if start > num_ids:
        raise Refused(
            f"req.logprob_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={num_ids}. Please use a smaller logprob_start_len."
        )
    return start


def _experts_from(body: _Body, num_ids: int) -> int | None:
    if not body.return_routed_experts:
        return None
    start = body.routed_experts_start_len
    if not 0 <= start <= num_ids:
        raise Refused(
            f"recv_req.routed_experts_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={num_ids}. Please use a smaller routed_experts_start_len."
        )
    return start


def _check_sampling(sampling: dict[str, Any]) -> None:
    for key in sampling:
        if key not in _SAMPLING_KEYS:
            known = ", ".join(f"`{name}`" for name in _SAMPLING_KEYS)
            raise Refused(f"unknown field `{key}`, expected one of {known}", contract=True)
    for key, nothing in _UNABLE.items():
        if key in sampling and sampling[key] not in nothing:
            raise Refused(f"the simulated engine cannot honour {key}")
    for key in ("max_new_tokens", "sampling_seed", "stream_interval"):
        value = sampling.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise Refused(f"invalid type: {value!r}, expected i64", contract=True)
    limit = sampling.get("max_new_tokens")
    if limit is not None and limit < 0:
        raise Refused(f"max_new_tokens must be at least 0, got {limit}.")
