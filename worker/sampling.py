"""Sampling parameters of a call, and the seed that makes it repeatable.

Owns `Sampling`, `call_seed`, `request_kwargs` and the list of parameters that leave the
distribution. Never talks to an engine: each engine names these in its own words. Invariant:
`Sampling` is the *effective* set, so what `Call.sampling` records is what the engine was asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rollstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """The effective parameters of one request."""

    temperature: float = 1.0
    max_new_tokens: int = 1024
    top_p: float = 1.0
    top_k: int = -1
    """-1 is all."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def with_overrides(self, overrides: dict[str, Any]) -> Sampling:
        """Return these parameters with a prompt's or an environment's own.

        Raises:
            ConfigError: an unknown name.
        """
        unknown = sorted(set(overrides) - _NAMES)
        if unknown:
            raise ConfigError(f"unknown sampling parameter {unknown[0]!r}; known: {sorted(_NAMES)}")
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in overrides.items()
        }
        return replace(self, **values)

    def off_distribution(self) -> list[str]:
        """Return the parameters under which log-probs are not those of the sampled distribution."""
        return [name for name, plain in _ON_DISTRIBUTION.items() if getattr(self, name) != plain]

    def to_dict(self) -> dict[str, Any]:
        """Return what `Call.sampling` records: plain values, lists for tuples."""
        plain = {name: getattr(self, name) for name in _ORDER}
        plain["stop"], plain["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        return plain


_CHAT_WORDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
               "sampling_seed": "seed"}  # fmt: skip
_CHAT_PARAMETERS = frozenset(
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "max_tokens max_completion_tokens min_tokens stop stop_token_ids seed logit_bias ignore_eos "
    "skip_special_tokens no_stop_trim logprobs top_logprobs tools tool_choice "
    "parallel_tool_calls response_format chat_template_kwargs".split()
)


def request_kwargs(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters in the words of a chat completions request, for an agent.

    Ours and SGLang's names become OpenAI's, unless the latter is given too. What such a request
    does not know, `model`, `messages` and None values are left out.
    """
    words = {name: value for name, value in sampling.items() if value is not None}
    for name, word in _CHAT_WORDS.items():
        if name in words:
            words.setdefault(word, words[name])
    return {name: value for name, value in words.items() if name in _CHAT_PARAMETERS}


_ORDER = tuple(f.name for f in fields(Sampling))
_NAMES = frozenset(_ORDER)
_ON_DISTRIBUTION: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def call_seed(run_seed: int, group_index: int | str, member: int, turn: int) -> int:
    """Return the seed of one call: the same under retry and resume, different for every member.

    Unit: 31 bits, so that every engine takes it.
    """
    text = f"{run_seed}:{group_index}:{member}:{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") & 0x7FFFFFFF
