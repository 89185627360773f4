"""One SGLang reply: bytes in, arrays out, and nothing believed that can be checked.

Owns the typed reply and its validation. Never does I/O, and never reads the engine's text.
Invariant: a `Completion` that leaves here has as many finite log-probs as ids, of the same ids,
inside the vocabulary and no more than were permitted, behind the prompt that we sent, version spans
that cover it, and exactly the replay rows that were asked for; anything else is an `EngineFault`
and its tokens are discarded. Its arrays are read-only: what was sampled is nobody's to change.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
import numpy as np

from rollstream.sample import UNKNOWN_VERSION, LogProbs, PrefixCacheInfo, SpecInfo, TokenIds

from ..types import Completion, Finish
from .faults import MESSAGE_CHARS, Detail, detail_of_status, fault
from .replay import Asked, ReplayFields, read_experts, read_indexer

LOGPROB_EPSILON = 1e-4
"""A log-prob may exceed 0 by this: rounding of a float32 log-softmax, with room to spare."""
_LOWEST = float(np.finfo(np.float32).min)
_NAN_STOP = "NaN happened"
_DEFAULT_LABEL = "default"
_INT32 = np.iinfo(np.int32)
_VERSION_DIGITS = 18
_BEYOND_VERSIONS = 10**_VERSION_DIGITS


class _Entry(msgspec.Struct, array_like=True, gc=False):
    log_prob: float | None
    token_id: int
    text: str | None = None


class _Span(msgspec.Struct, gc=False):
    version: str | int | None
    start: int
    end: int


class _FinishReason(msgspec.Struct, gc=False):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(ReplayFields, gc=False):
    id: str | None = None
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[_Entry] | None = None
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None
    spec_verify_ct: int | None = None


class _Reply(msgspec.Struct, gc=False):
    meta_info: _Meta
    output_ids: list[int] | None = None


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a body raises that is no JSON of ours; brackets may nest deeper than Python's stack."""
_DECODER = msgspec.json.Decoder(_Reply)
_ENCODER = msgspec.json.Encoder()


def read_reply(
    status: int,
    raw: bytes,
    *,
    rid: str,
    engine: str,
    num_prompt: int,
    version: int,
    max_token_id: int,
    max_new_tokens: int | None = None,
    replay: Asked | None = None,
) -> Completion:
    """Return what an engine answered, validated.

    Args:
        status: of HTTP.
        raw: the whole body.
        rid: of the request.
        engine: base URL, for the provenance and for messages.
        num_prompt: how many ids we sent.
        version: the weight version current at dispatch.
        max_token_id: the highest id of the vocabulary.
        max_new_tokens: what the request permitted.
        replay: what the request asked for.

    Raises:
        EngineFault: by the table in `faults`.
    """
    if status != 200:
        message = error_text(raw)
        raise fault(detail_of_status(status, message), f"{engine} answered {status}: {message}")
    try:
        reply = _DECODER.decode(raw)
    except UNREADABLE as error:
        raise fault(Detail.BAD_REPLY, f"{engine}: {error}: {error_text(raw)}") from None
    meta = reply.meta_info
    if meta.id is not None and meta.id != rid:
        raise fault(
            Detail.BAD_REPLY, f"{engine} answered request {rid} with the reply of {meta.id}"
        )
    finish = _finish(meta.finish_reason, engine)
    plain_ids, entries = _plain(reply, engine)
    if max_new_tokens is not None and len(plain_ids) > max_new_tokens:
        raise fault(
            Detail.BAD_REPLY,
            f"{engine} sampled {len(plain_ids)} tokens where {max_new_tokens} were permitted",
        )
    ids = _ids(plain_ids, max_token_id, engine)
    log_probs = _log_probs(entries, engine)
    if meta.prompt_tokens is not None and meta.prompt_tokens != num_prompt:
        raise fault(
            Detail.PROMPT_MISMATCH,
            f"{engine} saw {meta.prompt_tokens} prompt tokens of the {num_prompt} that were sent; "
            "does it truncate prompts?",
        )
    num_fed = num_prompt + len(ids) - 1
    experts = read_experts(
        meta.routed_experts, replay, num_fed=num_fed, finish=finish, engine=engine
    )
    ids.flags.writeable = log_probs.flags.writeable = False
    return Completion(
        ids=ids,
        log_probs=log_probs,
        json=_ENCODER.encode(plain_ids)[1:-1],
        finish=finish,
        versions=_versions(meta, len(ids), version, engine),
        engine=engine,
        rid=rid,
        matched=_matched(meta.finish_reason),
        cache=PrefixCacheInfo(_count(meta.cached_tokens), num_prompt),
        spec=_spec(meta, len(ids)),
        routed_experts=experts,
        indexer_topk=read_indexer(meta, replay, num_fed=num_fed, finish=finish, engine=engine),
    )


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


def _finish(reason: _FinishReason | None, engine: str) -> Finish:
    if reason is None:
        raise fault(Detail.UNKNOWN_FINISH, f"{engine}: the reply has no finish reason")
    try:
        finish = Finish(reason.type)
    except ValueError:
        raise fault(
            Detail.UNKNOWN_FINISH, f"{engine}: unknown finish reason {reason.type!r}"
        ) from None
    if finish is Finish.ABORT and reason.status_code is not None:
        text = f"aborted with status {reason.status_code}: {reason.message}"
        if 400 <= reason.status_code < 500:  # routers and older servers answer it with HTTP 200
            raise fault(
                detail_of_status(reason.status_code, reason.message or ""), f"{engine}: {text}"
            )
        raise fault(Detail.ABORT_ERROR, f"{engine}: {text}")
    if finish is Finish.STOP and reason.matched == _NAN_STOP:
        raise fault(Detail.NAN, f"{engine}: sampling met NaN; its tokens were discarded")
    return finish


def _matched(reason: _FinishReason | None) -> int | str | None:
    matched = None if reason is None else reason.matched
    if isinstance(matched, list):  # a stop of several ids: the last one ended it
        return matched[-1] if matched else None
    return matched


def _plain(reply: _Reply, engine: str) -> tuple[list[int], list[_Entry]]:
    """Return ids and log-prob entries, equally many and of the same ids.

    A list that is missing is empty (an aborted request has few fields); without `output_ids` the
    entries name the ids.
    """
    meta = reply.meta_info
    entries = meta.output_token_logprobs or []
    entry_ids = [entry.token_id for entry in entries]
    ids = entry_ids if reply.output_ids is None else reply.output_ids
    num_said = meta.completion_tokens
    if len(ids) != len(entries) or (num_said is not None and num_said != len(ids)):
        raise fault(
            Detail.LOGPROB_LENGTH_MISMATCH,
            f"{engine}: {len(ids)} ids, {len(entries)} log-probs, completion_tokens {num_said}",
        )
    if ids != entry_ids:
        at = next(i for i, (a, b) in enumerate(zip(ids, entry_ids, strict=True)) if a != b)
        raise fault(
            Detail.ID_MISMATCH,
            f"{engine}: output id {at} is {ids[at]}, its log-prob is of {entry_ids[at]}",
        )
    return ids, entries


def _ids(plain: list[int], max_token_id: int, engine: str) -> TokenIds:
    if plain:
        low, high = min(plain), max(plain)
        if low < 0 or high > min(max_token_id, _INT32.max):
            raise fault(
                Detail.BAD_TOKEN,
                f"{engine}: id {low if low < 0 else high} is outside 0..{max_token_id}; is this "
                "the model of model.tokenizer?",
            )
    return np.array(plain, dtype=np.int32)


def _log_probs(entries: list[_Entry], engine: str) -> LogProbs:
    """Return the log-probs, parsed as float64 and cast once: bit-equal to the engine's float32."""
    exact = np.array([entry.log_prob for entry in entries], dtype=np.float64)
    if len(exact) and not (exact.min() >= _LOWEST and exact.max() <= LOGPROB_EPSILON):
        at = int(np.argmin((exact >= _LOWEST) & (exact <= LOGPROB_EPSILON)))
        raise fault(Detail.BAD_LOGPROB, f"{engine}: log-prob {at} is {entries[at].log_prob}")
    return exact.astype(np.float32)


def read_version(label: str | int | None, dispatched: int) -> int:
    """Return the weight version that an engine's label means.

    A number of at most 18 digits counts, as a string or not (beyond is a digest, and nothing that
    the wire can hold). `default` is what SGLang says from its start until the
    first update: version 0 if nothing newer was current at dispatch, else unknown (a restarted
    engine, or one whose updates set no version). Anything else is unknown.
    """
    if isinstance(label, int):
        return label if 0 <= label < _BEYOND_VERSIONS else UNKNOWN_VERSION
    if label is None:
        return UNKNOWN_VERSION
    if label.isascii() and label.isdigit():
        return int(label) if len(label) <= _VERSION_DIGITS else UNKNOWN_VERSION
    return 0 if label == _DEFAULT_LABEL and dispatched == 0 else UNKNOWN_VERSION


def _versions(
    meta: _Meta, num_tokens: int, dispatched: int, engine: str
) -> list[tuple[int, int, int]]:
    if num_tokens == 0:
        return []
    if not meta.weight_versions:
        return [(read_version(meta.weight_version, dispatched), 0, num_tokens)]
    spans: list[tuple[int, int, int]] = []
    behind = 0
    for span in meta.weight_versions:
        if span.start != behind or span.end <= behind:
            _broken_spans(meta, num_tokens, engine)
        version, behind = read_version(span.version, dispatched), span.end
        spans.append((version, span.start, span.end))
    if behind != num_tokens:
        _broken_spans(meta, num_tokens, engine)
    return spans


def _broken_spans(meta: _Meta, num_tokens: int, engine: str) -> NoReturn:
    spans = [(span.start, span.end) for span in meta.weight_versions or ()]
    raise fault(
        Detail.BAD_REPLY, f"{engine}: weight_versions {spans} do not cover {num_tokens} tokens"
    )


def _spec(meta: _Meta, num_tokens: int) -> SpecInfo:
    accepted = meta.spec_num_correct_drafts
    if accepted is None:
        accepted = meta.spec_accept_token_num
    drafted = meta.spec_num_proposed_drafts
    if drafted is None:
        drafted = meta.spec_draft_token_num
    return SpecInfo(_count(accepted), _count(drafted), _count(meta.spec_verify_ct), num_tokens)


def _count(value: int | None) -> int:
    """Return a counter of the engine's; 0 for none, and for what counts nothing (below 0, huge)."""
    return value if value is not None and 0 <= value <= _INT32.max else 0
