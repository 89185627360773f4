"""Sampling parameters of a call, and the seed that makes it repeatable.

Owns `Sampling`, `call_seed` and `request_kwargs`. Never talks to an engine (each one names these in
its own words), and never decides what leaves the distribution (`rollstream.parameters` does).
Invariant: `Sampling` is the *effective* set, so what `Call.sampling` records is what the engine was
asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rollstream.errors import ConfigError
from rollstream.parameters import PARAMETERS, problem_of


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
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    json_schema: str = ""
    """The text of a JSON schema that the reply has to be of; like `regex` and `ebnf` a grammar."""
    regex: str = ""
    ebnf: str = ""

    def with_overrides(self, overrides: Mapping[str, Any]) -> Sampling:
        """Return these parameters with a prompt's or an environment's own.

        `stop_token_ids` come on top of those there are: without the ids that end a turn of the chat
        format a reply would run on into a turn of its own making.

        Raises:
            ConfigError: an unknown name, or a value that it cannot have.
        """
        values: dict[str, Any] = {}
        for name, value in overrides.items():
            if problem := problem_of(name, value):
                raise ConfigError(problem)
            if name in PARAMETERS:
                values[name] = _READ[name](value) if name in _READ else value
        if "stop_token_ids" in values:
            held = self.stop_token_ids
            own = (i for i in dict.fromkeys(values["stop_token_ids"]) if i not in held)
            values["stop_token_ids"] = (*held, *own)
        whole = replace(self, **values)
        if len(grammars := [name for name in _GRAMMARS if getattr(whole, name)]) > 1:
            raise ConfigError(f"{' and '.join(grammars)}: a reply can be of one grammar only")
        return whole

    def off_distribution(self) -> list[str]:
        """Return the parameters under which log-probs are not those of the sampled distribution."""
        return [name for name, rule in PARAMETERS.items() if rule.leaves(getattr(self, name))]

    def to_dict(self) -> dict[str, Any]:
        """Return what `Call.sampling` records: plain values, lists for tuples."""
        plain = {name: getattr(self, name) for name in _ALWAYS}
        plain["stop"], plain["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        if self.logit_bias:
            plain["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        for name in _GRAMMARS:
            if text := getattr(self, name):
                plain[name] = text
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


def _read_biases(given: Mapping[Any, Any]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(token), float(bias)) for token, bias in given.items() if bias))


def _read_schema(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, separators=(",", ":"))


_READ: dict[str, Any] = {
    "temperature": float,
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": _read_biases,
    "json_schema": _read_schema,
}
"""How a value of a configuration or a row becomes that of `Sampling`."""
_GRAMMARS = ("json_schema", "regex", "ebnf")
_ALWAYS = tuple(f.name for f in fields(Sampling) if f.name not in ("logit_bias", *_GRAMMARS))


def call_seed(run_seed: int, group_index: int | str, member: int, turn: int) -> int:
    """Return the seed of one call: the same under retry and resume, different for every member.

    Unit: 31 bits, so that every engine takes it.
    """
    text = f"{run_seed}:{group_index}:{member}:{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") & 0x7FFFFFFF
