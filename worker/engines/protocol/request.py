"""One SGLang request as bytes: a head, the ids as they already lie in memory, and two brackets.

Owns the words in which SGLang is asked. Never does I/O, and never encodes ids: the caller holds
them as JSON pieces. Invariant: what `Sampling` says is what is asked for, in SGLang's names, and no
key that SGLang would refuse is ever sent.

    {"sampling_params":{…},"return_logprob":true,…,"rid":"…","routing_key":"…","input_ids":[1,2,3]}
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from rollstream.sample import UNKNOWN_VERSION

from ...sampling import Sampling
from ...types import RequestIds
from .replay import Asked

ROUTING_HEADER = "x-smg-routing-key"
"""Read by SGLang's router (policies manual and consistent_hashing)."""

_ALWAYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""What shapes the distribution is never left to the server, whose --preferred-sampling-params fill
in what a request does not say; likewise `max_new_tokens` (default 128 there)."""
_WHERE_SET = ("min_new_tokens", "stop", "stop_token_ids", "json_schema", "regex", "ebnf")
"""Sent only where they ask for something."""
_FIXED: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
_FLAGS = b',"return_logprob":true,"return_routed_experts":false,"return_indexer_topk":false,'
_TRUTH = {False: b"false", True: b"true"}
_ENCODER = msgspec.json.Encoder()


def new_rid() -> str:
    """Return a request id of 32 hex digits: SGLang aborts by prefix, so all have one length."""
    return os.urandom(16).hex()


class Prefixes:
    """What requests of the same parameters have in common, encoded once."""

    def __init__(self, encode: Callable[[Sampling], bytes]) -> None:
        self._encode = encode
        self._known: dict[tuple[Any, ...], bytes] = {}

    def of(self, sampling: Sampling) -> bytes:
        """Return the bytes of everything but the budget and the seed, which differ by call."""
        key = _key_of(sampling)
        prefix = self._known.get(key)
        if prefix is None:
            if len(self._known) >= _MAX_PREFIXES:
                self._known.clear()
            prefix = self._known[key] = self._encode(sampling)
        return prefix


class RequestWriter:
    """Writes heads of requests; what a group's calls have in common is encoded once."""

    def __init__(self, *, lora_path: str = "") -> None:
        """`lora_path` is the adapter of every request; empty asks in the bytes without one."""
        self._prefixes = Prefixes(_encode_prefix)
        self._adapter = b""
        if lora_path:
            self._adapter = b',"lora_path":' + _ENCODER.encode(lora_path)

    def head(
        self,
        sampling: Sampling,
        *,
        rid: str,
        routing_key: str,
        salt: int = UNKNOWN_VERSION,
        replay: Asked | None = None,
        interval: int = 0,
    ) -> bytes:
        """Return everything in front of the ids.

        Args:
            sampling: the effective parameters.
            rid: of this try.
            routing_key: any text.
            salt: the weight version that the prefix cache is salted with; unknown is no salt.
            replay: which rows are wanted back; None asks in the very bytes of a request without.
            interval: a stream is asked for, with so many new tokens in an event; 0 asks for none,
                in the very bytes as well.
        """
        extra = b"" if salt == UNKNOWN_VERSION else b',"extra_key":"v%d"' % salt
        paced = b',"stream_interval":%d' % interval if interval else b""
        return b'%b"max_new_tokens":%d,"sampling_seed":%d%b}%b"stream":%b,"rid":"%b",' % (
            self._prefixes.of(sampling),
            sampling.max_new_tokens,
            sampling.seed,
            paced,
            _FLAGS if replay is None else _replay_flags(replay),
            _TRUTH[interval > 0],
            rid.encode(),
        ) + b'"routing_key":%b%b%b,"input_ids":[' % (
            _ENCODER.encode(routing_key),
            extra,
            self._adapter,
        )


_MAX_PREFIXES = 1024
"""Prompts may carry sampling parameters of their own; the cache stays bounded whatever they do."""
_key_of = operator.attrgetter(
    *(f.name for f in fields(Sampling) if f.name not in ("max_new_tokens", "seed"))
)


def _encode_prefix(sampling: Sampling) -> bytes:
    words: dict[str, Any] = {name: getattr(sampling, name) for name in _ALWAYS}
    words |= {name: value for name in _WHERE_SET if (value := getattr(sampling, name))}
    if sampling.logit_bias:
        words["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return b'{"sampling_params":' + _ENCODER.encode({**words, **_FIXED})[:-1] + b","


def _replay_flags(asked: Asked) -> bytes:
    experts, indexer = asked.shape.experts is not None, asked.shape.indexer is not None
    start = b',"routed_experts_start_len":%d' % asked.start if experts else b""
    return b',"return_logprob":true,"return_routed_experts":%b%b,"return_indexer_topk":%b,' % (
        _TRUTH[experts],
        start,
        _TRUTH[indexer],
    )


TAIL = b"]}"


def body_bytes(head: bytes, prompt: RequestIds) -> bytes:
    """Return the whole body."""
    return b"".join((head, b",".join(prompt.pieces), TAIL))


def body_length(head: bytes, pieces: Sequence[bytes]) -> int:
    """Return how long `body_bytes` is, without making it."""
    return len(head) + sum(map(len, pieces)) + max(0, len(pieces) - 1) + len(TAIL)
