"""One vLLM request as bytes: a head, the ids as they already lie in memory, and two brackets.

Owns the words in which vLLM is asked, over both of its routes that take token ids. Never does I/O,
and never encodes ids. Invariant: what `Sampling` says is what is asked for, in vLLM's names; no
parameter is left to a default of the server's (`/v1/completions` takes those of the model's
generation_config.json, top_p and top_k among them).

    /inference/v1/generate  {"sampling_params":{…},"stream":false,…,"token_ids":[1,2,3]}
    /v1/completions         {"temperature":1.0,…,"stream":false,…,"prompt":[1,2,3]}
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from rollstream.sample import UNKNOWN_VERSION

from ...sampling import Sampling
from .replay import Asked
from .request import Prefixes

SESSION_HEADER = "x-session-id"
"""Read by vLLM's router, which keeps a session on one engine."""
REQUEST_HEADER = "x-request-id"
"""vLLM takes the id of a request from here where it is there, e.g. set by a proxy on the way: ours
is sent, so that the id that we abort is the one that the engine has."""


class Route(StrEnum):
    """Where token ids are sent."""

    GENERATE = "generate"
    COMPLETIONS = "completions"


PATHS = {Route.GENERATE: "/inference/v1/generate", Route.COMPLETIONS: "/v1/completions"}

_ENCODER = msgspec.json.Encoder()
_STREAM = b'"stream":true,"stream_options":{"include_usage":true}'
"""Counts and what the prefix cache gave come in an event of their own, and only where asked for."""
_ALL = -1
"""What `Sampling.top_k` says for all tokens; vLLM says 0."""
_COMPLETION_FLAGS: dict[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
}
"""Ids, ids in the names of log-probs, and which weights sampled them: left out unless asked for."""


class VllmWriter:
    """Writes heads of requests; what a group's calls have in common is encoded once."""

    def __init__(self, route: Route, *, model: str = "") -> None:
        """`model` is named in every request; empty names none."""
        self._route = route
        self._prefixes = Prefixes(_encode_params if route is Route.GENERATE else _encode_flat)
        self._model = b'"model":%b,' % _ENCODER.encode(model) if model else b""

    def head(
        self,
        sampling: Sampling,
        *,
        rid: str,
        salt: int = UNKNOWN_VERSION,
        replay: Asked | None,
        interval: int = 0,
    ) -> bytes:
        """Return everything in front of the ids.

        Args:
            sampling: the effective parameters.
            rid: of this try.
            salt: the weight version that the prefix cache is salted with; unknown is no salt.
            replay: from which row on routed experts are wanted; the server's flag says whether.
            interval: a stream is asked for, with so many new tokens in an event; 0 asks for none.
        """
        is_generate = self._route is Route.GENERATE
        start = b',"stream_interval":%d' % interval if interval else b""
        if replay is not None and replay.start:
            start += b',"routed_experts_prompt_start":%d' % replay.start
        return b'%b"max_tokens":%d,"seed":%d%b%b,%b,"request_id":"%b",%b%b%b:[' % (
            self._prefixes.of(sampling),
            sampling.max_new_tokens,
            sampling.seed,
            start,
            b"}" if is_generate else b"",
            _STREAM if interval else b'"stream":false',
            rid.encode(),
            self._model,
            b"" if salt == UNKNOWN_VERSION else b'"cache_salt":"v%d",' % salt,
            b'"token_ids"' if is_generate else b'"prompt"',
        )


def _words(sampling: Sampling) -> dict[str, Any]:
    words: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0 if sampling.top_k == _ALL else sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_new_tokens,
        "logprobs": 1,
        "skip_special_tokens": False,
        "watermarking": False,  # of an engine that marks its texts, unless told not to
    }
    if sampling.stop:
        words["stop"] = sampling.stop
    if sampling.stop_token_ids:
        words["stop_token_ids"] = sampling.stop_token_ids
    if sampling.logit_bias:
        words["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if grammar := _grammar(sampling):
        words["structured_outputs"] = grammar
    return words


def _grammar(sampling: Sampling) -> dict[str, str]:
    named = {"json": sampling.json_schema, "regex": sampling.regex, "grammar": sampling.ebnf}
    return {name: text for name, text in named.items() if text}


def _encode_params(sampling: Sampling) -> bytes:
    # Texts that end a reply are looked for in its text, so only then is there to be one.
    words = {**_words(sampling), "detokenize": bool(sampling.stop)}
    return b'{"sampling_params":' + _ENCODER.encode(words)[:-1] + b","


def _encode_flat(sampling: Sampling) -> bytes:
    return _ENCODER.encode({**_words(sampling), **_COMPLETION_FLAGS})[:-1] + b","
