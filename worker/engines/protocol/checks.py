"""What every protocol's replies are held against: ids, log-probs, version spans, error bodies.

Owns what does not depend on whose words a reply is written in. Never knows a protocol's fields.
Invariant: what passes here may be trained on; what does not is an `EngineFault`, and its tokens are
discarded.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeVar

import msgspec
import numpy as np

from rollstream.sample import UNKNOWN_VERSION, LogProbs, TokenIds

from ...types import Finish
from ..faults import MESSAGE_CHARS, Detail, detail_of_status, fault
from .versions import VersionMap

Reply = TypeVar("Reply")

LOGPROB_EPSILON = 1e-4
"""A log-prob may exceed 0 by this: rounding of a float32 log-softmax, with room to spare."""
NO_EVIDENCE = -9999.0
"""vLLM's log-prob of a token that has none, or NaN, or -inf. Nothing at or below it can be sampled:
a float32 softmax is 0 from -104 on."""
_LOWEST = float(np.nextafter(NO_EVIDENCE, 0.0))
_INT32 = np.iinfo(np.int32)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a body raises that is no JSON of ours; brackets may nest deeper than Python's stack."""


class VersionSpan(msgspec.Struct, gc=False):
    """One entry of a reply's `weight_versions`, alike in both protocols."""

    version: str | int | None
    start: int
    end: int


def decoded(status: int, raw: bytes, decoder: msgspec.json.Decoder[Reply], engine: str) -> Reply:
    """Return the reply that a body is, where it is one.

    Raises:
        EngineFault: another status than 200, no JSON, or JSON of another shape.
    """
    if status != 200:
        message = error_text(raw)
        raise fault(detail_of_status(status, message), f"{engine} answered {status}: {message}")
    try:
        return decoder.decode(raw)
    except UNREADABLE as error:
        raise fault(Detail.BAD_REPLY, f"{engine}: {error}: {error_text(raw)}") from None


def error_text(raw: bytes) -> str:
    """Return the message of an error body in any of the shapes that servers use, cut."""
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE:
        body = raw[: 4 * MESSAGE_CHARS].decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return str(body)[:MESSAGE_CHARS]


def check_count(num_sampled: int, max_new_tokens: int | None, engine: str) -> None:
    """Refuse a reply that sampled more than was permitted."""
    if max_new_tokens is not None and num_sampled > max_new_tokens:
        raise fault(
            Detail.BAD_REPLY,
            f"{engine} sampled {num_sampled} tokens where {max_new_tokens} were permitted",
        )


def check_cut(num_sampled: int, finish: Finish, engine: str) -> None:
    """Refuse a reply that was cut at its budget, or at the context, with nothing sampled.

    At least one token is always asked for, and a prompt that leaves no room is refused.
    """
    if finish is Finish.LENGTH and num_sampled == 0:
        raise fault(Detail.BAD_REPLY, f"{engine}: finish reason length, and not one token")


def check_lengths(num_ids: int, num_log_probs: int, num_said: int | None, engine: str) -> None:
    """Refuse ids and log-probs that are not equally many, or not as many as the engine says."""
    if num_log_probs != num_ids or (num_said is not None and num_said != num_ids):
        raise fault(
            Detail.LOGPROB_LENGTH_MISMATCH,
            f"{engine}: {num_ids} ids, {num_log_probs} log-probs, completion_tokens {num_said}",
        )


def check_prompt(num_said: int | None, num_sent: int, engine: str) -> None:
    """Refuse a reply to another prompt than the one that was sent."""
    if num_said is not None and num_said != num_sent:
        raise fault(
            Detail.PROMPT_MISMATCH,
            f"{engine} saw {num_said} prompt tokens of the {num_sent} that were sent; "
            "does it truncate prompts?",
        )


def check_same_ids(ids: list[int], entry_ids: list[int], engine: str) -> None:
    """Refuse log-probs of other ids; both lists are equally long."""
    if ids != entry_ids:
        at = next(i for i, (a, b) in enumerate(zip(ids, entry_ids, strict=True)) if a != b)
        raise fault(
            Detail.ID_MISMATCH,
            f"{engine}: output id {at} is {ids[at]}, its log-prob is of {entry_ids[at]}",
        )


def checked_ids(plain: list[int], max_token_id: int, engine: str) -> TokenIds:
    """Return the ids as an array, all of them inside the vocabulary.

    Shape: [C] int32.
    """
    if plain:
        low, high = min(plain), max(plain)
        if low < 0 or high > min(max_token_id, _INT32.max):
            raise fault(
                Detail.BAD_TOKEN,
                f"{engine}: id {low if low < 0 else high} is outside 0..{max_token_id}; is this "
                "the model of model.tokenizer?",
            )
    return np.array(plain, dtype=np.int32)


def checked_log_probs(given: Sequence[float | None], engine: str) -> LogProbs:
    """Return the log-probs, parsed as float64 and cast once: bit-equal to the engine's float32.

    Shape: [C] float32.
    """
    exact = np.array(given, dtype=np.float64)
    if len(exact) and not (exact.min() >= _LOWEST and exact.max() <= LOGPROB_EPSILON):
        at = int(np.argmin((exact >= _LOWEST) & (exact <= LOGPROB_EPSILON)))
        raise fault(Detail.BAD_LOGPROB, f"{engine}: log-prob {at} is {given[at]}")
    return exact.astype(np.float32)


def version_spans(
    spans: Sequence[VersionSpan] | None,
    label: str | int | None,
    num_tokens: int,
    *,
    dispatched: int,
    versions: VersionMap,
    engine: str,
) -> list[tuple[int, int, int]]:
    """Return which weight version sampled which tokens, covering all of them.

    A label alone is that of the weights at the end. Where they are newer than those at dispatch
    nobody knows from which token on: all count as those at dispatch, and an empty span behind them
    names the newer ones. Where they are older, all tokens are of those at most.

    Args:
        spans: as the reply has them.
        label: of the newest weights, for a reply without spans.
        num_tokens: C.
        dispatched: the weight version current at dispatch.
        versions: what labels mean.
        engine: for messages.
    """
    if num_tokens == 0:
        return []
    if not spans:
        newest = versions.of(label, dispatched)
        if newest > dispatched != UNKNOWN_VERSION:
            return [(dispatched, 0, num_tokens), (newest, num_tokens, num_tokens)]
        return [(newest, 0, num_tokens)]
    read: list[tuple[int, int, int]] = []
    behind = 0
    for span in spans:
        if span.start != behind or span.end <= behind:
            _broken_spans(spans, num_tokens, engine)
        behind = span.end
        read.append((versions.of(span.version, dispatched), span.start, behind))
    if behind != num_tokens:
        _broken_spans(spans, num_tokens, engine)
    return read


def _broken_spans(spans: Sequence[VersionSpan], num_tokens: int, engine: str) -> NoReturn:
    said = [(span.start, span.end) for span in spans]
    raise fault(
        Detail.BAD_REPLY, f"{engine}: weight_versions {said} do not cover {num_tokens} tokens"
    )


def counter(value: int | None) -> int:
    """Return a counter of the engine's; 0 for none, and for what counts nothing (below 0, huge)."""
    return value if value is not None and 0 <= value <= _INT32.max else 0
