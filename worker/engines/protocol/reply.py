"""One SGLang reply: bytes in, arrays out, and nothing believed that can be checked.

Owns the typed reply and its validation. Never does I/O, and never reads the engine's text.
Invariant: a `Completion` that leaves here has as many finite log-probs as ids, of the same ids,
inside the vocabulary and no more than were permitted, behind the prompt that we sent, version spans
that cover it, and exactly the replay rows that were asked for; anything else is an `EngineFault`
and its tokens are discarded. Its arrays are read-only: what was sampled is nobody's to change.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

import msgspec

from rollstream.sample import PrefixCacheInfo, SpecInfo

from ...types import Completion, Finish
from ..faults import Detail, detail_of_status, fault
from .checks import (
    VersionSpan,
    check_count,
    check_cut,
    check_lengths,
    check_prompt,
    check_same_ids,
    checked_ids,
    checked_log_probs,
    counter,
    decoded,
    version_spans,
)
from .replay import Asked, ReplayFields, read_experts, read_indexer
from .versions import VersionMap

_NAN_STOP = "NaN happened"
_NO_LABELS = VersionMap()


class _Entry(msgspec.Struct, array_like=True, gc=False):
    log_prob: float | None
    token_id: int
    text: str | None = None


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
    weight_versions: list[VersionSpan] | None = None
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None
    spec_verify_ct: int | None = None


class _Reply(msgspec.Struct, gc=False):
    meta_info: _Meta
    output_ids: list[int] | None = None


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
    versions: VersionMap = _NO_LABELS,
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
        versions: what labels of weights mean.

    Raises:
        EngineFault: by the table in `faults`.
    """
    reply = decoded(status, raw, _DECODER, engine)
    meta = reply.meta_info
    if meta.id is not None and meta.id != rid:
        raise fault(
            Detail.BAD_REPLY, f"{engine} answered request {rid} with the reply of {meta.id}"
        )
    finish = _finish(meta.finish_reason, engine)
    plain_ids, entries = _plain(reply, engine)
    check_count(len(plain_ids), max_new_tokens, engine)
    check_cut(len(plain_ids), finish, engine)
    ids = checked_ids(plain_ids, max_token_id, engine)
    log_probs = checked_log_probs([entry.log_prob for entry in entries], engine)
    check_prompt(meta.prompt_tokens, num_prompt, engine)
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
        versions=version_spans(
            meta.weight_versions,
            meta.weight_version,
            len(ids),
            dispatched=version,
            versions=versions,
            engine=engine,
        ),
        engine=engine,
        rid=rid,
        matched=_matched(meta.finish_reason),
        cache=PrefixCacheInfo(counter(meta.cached_tokens), num_prompt),
        spec=_spec(meta, len(ids)),
        routed_experts=experts,
        indexer_topk=read_indexer(meta, replay, num_fed=num_fed, finish=finish, engine=engine),
    )


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
    check_lengths(len(ids), len(entries), meta.completion_tokens, engine)
    check_same_ids(ids, entry_ids, engine)
    return ids, entries


def _spec(meta: _Meta, num_tokens: int) -> SpecInfo:
    accepted = meta.spec_num_correct_drafts
    if accepted is None:
        accepted = meta.spec_accept_token_num
    drafted = meta.spec_num_proposed_drafts
    if drafted is None:
        drafted = meta.spec_draft_token_num
    return SpecInfo(counter(accepted), counter(drafted), counter(meta.spec_verify_ct), num_tokens)
