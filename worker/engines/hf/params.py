"""SGLang's `sampling_params` as this engine reads them: names, types, bounds, and what is refused.

Owns the table of parameters. Never samples. Invariant: a parameter is either honoured or refused
with HTTP 400 in SGLang's shape; none is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..server_words import Refused

ALL = 1 << 30
"""`top_k` that keeps the whole vocabulary; SGLang's number."""
DEFAULT_NEW_TOKENS = 128
_GREEDY_BELOW = 1e-6
MAX_STOPS = 32

Read = Callable[[Any], Any]


def _wrong(value: Any, expected: str) -> Refused:
    return Refused(f"invalid type: {value!r}, expected {expected}", contract=True)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, "i64")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, "f64")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "a boolean")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong(value, "a string or a sequence of strings")
    return tuple(text for text in texts if text)


def _ids(value: Any) -> frozenset[int]:
    if not isinstance(value, list):
        raise _wrong(value, "a sequence of i64")
    return frozenset(_integer(entry) for entry in value if entry is not None)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(str(key).isdigit() for key in value):
        raise _wrong(value, "a map of token id to f64")
    return {int(key): _number(bias) for key, bias in value.items()}


def _ignored(value: Any) -> Any:
    return value


def _nothing(*empty: Any) -> Read:
    """Return a reader of a parameter that this engine cannot honour."""

    def read(value: Any) -> Any:
        if value not in empty:
            raise Refused("cannot honour")
        return value

    return read


READERS: dict[str, Read] = {
    "max_new_tokens": _integer,
    "stop": _texts,
    "stop_token_ids": _ids,
    "stop_regex": _nothing("", []),
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "frequency_penalty": _number,
    "presence_penalty": _number,
    "repetition_penalty": _number,
    "min_new_tokens": _integer,
    "n": _nothing(1),
    "json_schema": _nothing(""),
    "regex": _nothing(""),
    "ebnf": _nothing(""),
    "structural_tag": _nothing(""),
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "no_stop_trim": _flag,
    "stream_interval": _ignored,
    "logit_bias": _biases,
    "sampling_seed": _integer,
    "custom_params": _nothing({}),
    "beam_width": _nothing(1),
    "watermark": _nothing({}),
    "choice": _nothing([]),
}
"""Every key that SGLang 0.5.23 takes; null asks for nothing in all of them."""


@dataclass(slots=True)
class Params:
    """The effective sampling parameters of one request."""

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token may come."""
        return self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off before the draw."""
        return self.top_k < ALL or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on what was sampled before."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


_FIELDS = frozenset(Params.__dataclass_fields__)


def read_params(given: Any, vocabulary_size: int, *, has_text: bool) -> Params:
    """Return what a request's `sampling_params` ask for.

    Args:
        given: the decoded JSON value; None asks for the defaults.
        vocabulary_size: ids from here on do not exist.
        has_text: whether the engine has a tokenizer, which stop strings need.

    Raises:
        Refused: an unknown key, a wrong type, a value out of bounds, or what cannot be honoured.
    """
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise Refused("this engine takes one request per call: sampling_params is no object")
    values: dict[str, Any] = {}
    for key, value in given.items():
        reader = READERS.get(key)
        if reader is None:
            known = ", ".join(f"`{name}`" for name in READERS)
            raise Refused(f"unknown field `{key}`, expected one of {known}", contract=True)
        if value is None:
            continue
        try:
            read = reader(value)
        except Refused as refusal:
            if str(refusal) == "cannot honour":
                raise Refused(f"the hf engine cannot honour {key}") from None
            raise
        if key in _FIELDS:
            values[key] = read
    params = Params(**values)
    _check(params, vocabulary_size, has_text)
    if params.temperature < _GREEDY_BELOW:  # as SGLang: the log-probs are then those of T = 1
        params.temperature, params.top_k = 1.0, 1
    if params.top_k == -1:
        params.top_k = ALL
    return params


def _check(params: Params, vocabulary_size: int, has_text: bool) -> None:
    """Refuse what is out of bounds, in SGLang's words."""
    p = params
    if not math.isfinite(p.temperature) or p.temperature < 0.0:
        raise Refused(f"temperature must be a non-negative finite number, got {p.temperature}.")
    if p.top_k != -1 and p.top_k < 1:
        raise Refused(f"top_k must be -1 (disable) or at least 1, got {p.top_k}.")
    for name, value, low, high, interval in (
        ("top_p", p.top_p, math.ulp(0.0), 1.0, "(0, 1]"),
        ("min_p", p.min_p, 0.0, 1.0, "[0, 1]"),
        ("frequency_penalty", p.frequency_penalty, -2.0, 2.0, "[-2, 2]"),
        ("presence_penalty", p.presence_penalty, -2.0, 2.0, "[-2, 2]"),
        ("repetition_penalty", p.repetition_penalty, math.ulp(0.0), 2.0, "(0, 2]"),
    ):
        if not low <= value <= high:
            raise Refused(f"{name} must be in {interval}, got {value}.")
    if p.max_new_tokens < 0:
        raise Refused(f"max_new_tokens must be at least 0, got {p.max_new_tokens}.")
    if not 0 <= p.min_new_tokens <= p.max_new_tokens:
        raise Refused(
            f"min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got "
            f"{p.min_new_tokens}."
        )
    if any(key >= vocabulary_size for key in p.logit_bias):
        raise Refused(f"logit_bias must has keys in [0, {vocabulary_size - 1}].")
    if not all(math.isfinite(bias) for bias in p.logit_bias.values()):
        raise Refused("logit_bias must be finite.")
    if p.sampling_seed is not None and not -(2**63) <= p.sampling_seed < 2**63:
        raise Refused(f"sampling_seed must be in [-2**63, 2**63 - 1], got {p.sampling_seed}.")
    if len(p.stop) > MAX_STOPS:
        raise Refused(f"at most {MAX_STOPS} stop strings are allowed, got {len(p.stop)}")
    if p.stop and not has_text:
        raise Refused("stop needs text, and this model's folder has no tokenizer.json")
