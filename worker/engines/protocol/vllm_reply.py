"""One vLLM reply: bytes in, arrays out, and nothing believed that can be checked.

Owns the typed replies of vLLM's two token routes, and their validation. Never does I/O, and never
reads the engine's text. Invariant: as `reply`; what both protocols have in common is in `checks`.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import msgspec

from rollstream.sample import PrefixCacheInfo, SpecInfo

from ...types import Completion, Finish
from ..faults import Detail, fault
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
from .replay import read_experts_npy
from .versions import VersionMap
from .vllm_request import Route

if TYPE_CHECKING:
    from .http_base import Sent

ID_PREFIXES = {Route.GENERATE: "generate-tokens-", Route.COMPLETIONS: "cmpl-"}
"""What vLLM puts in front of the id of a request, in its replies and for aborts."""
_TOKEN_NAME = "token_id:"


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None


class _LogProbs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: _LogProbs | None = None
    routed_experts: msgspec.Raw = msgspec.Raw()
    weight_versions: list[VersionSpan] | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Speculation(msgspec.Struct, gc=False):
    num_spec_steps: int | None = None
    num_accepted_draft_tokens: int | None = None
    num_draft_tokens: int | None = None


class _Metrics(msgspec.Struct, gc=False):
    speculative_decoding: _Speculation | None = None


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice]
    request_id: str | None = None
    """Of `/inference/v1/generate`."""
    id: str | None = None
    """Of `/v1/completions`."""
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    metrics: _Metrics | None = None


_DECODER = msgspec.json.Decoder(_Reply)
_ENCODER = msgspec.json.Encoder()


def read_vllm_reply(
    status: int,
    raw: bytes,
    sent: Sent,
    *,
    route: Route,
    max_token_id: int,
    versions: VersionMap,
) -> Completion:
    """Return what an engine answered, validated.

    Args:
        status: of HTTP.
        raw: the whole body.
        sent: the request that it must be the reply to.
        route: where that was sent.
        max_token_id: the highest id of the vocabulary.
        versions: what labels of weights mean.

    Raises:
        EngineFault: by the table in `faults`.
    """
    engine = sent.engine
    reply = decoded(status, raw, _DECODER, engine)
    choice = _choice(reply, sent, ID_PREFIXES[route])
    finish = _finish(choice, engine)
    plain_ids = choice.token_ids or []
    usage = reply.usage or _Usage()
    given = _log_probs(plain_ids, choice.logprobs, usage.completion_tokens, engine)
    check_count(len(plain_ids), sent.max_new_tokens, engine)
    check_cut(len(plain_ids), finish, engine)
    ids = checked_ids(plain_ids, max_token_id, engine)
    log_probs = checked_log_probs(given, engine)
    check_prompt(usage.prompt_tokens, sent.num_prompt, engine)
    for echoed in (reply.prompt_token_ids, choice.prompt_token_ids):
        check_prompt(_length(echoed), sent.num_prompt, engine)
    experts = read_experts_npy(
        choice.routed_experts,
        sent.replay,
        num_fed=sent.num_prompt + len(ids) - 1,
        finish=finish,
        engine=engine,
    )
    ids.flags.writeable = log_probs.flags.writeable = False
    return Completion(
        ids=ids,
        log_probs=log_probs,
        json=_ENCODER.encode(plain_ids)[1:-1],
        finish=finish,
        versions=version_spans(
            choice.weight_versions,
            None,
            len(ids),
            dispatched=sent.version,
            versions=versions,
            engine=engine,
        ),
        engine=engine,
        rid=sent.rid,
        matched=_matched(choice, finish, plain_ids),
        cache=_cache(usage, sent.num_prompt),
        spec=_spec(reply.metrics, len(ids)),
        routed_experts=experts,
    )


def _choice(reply: _Reply, sent: Sent, prefix: str) -> _Choice:
    said = reply.request_id if reply.request_id is not None else reply.id
    check_name(said, prefix + sent.rid, sent.engine)
    choices = reply.choices
    check_choices(len(choices), choices[0].index if choices else None, sent.engine)
    return choices[0]


def check_name(said: str | None, wanted: str, engine: str) -> None:
    """Refuse the reply to another request."""
    if said is not None and said != wanted:
        raise fault(
            Detail.BAD_REPLY, f"{engine} answered request {wanted} with the reply of {said}"
        )


def check_choices(num: int, first: int | None, engine: str) -> None:
    """Refuse a reply of none or several choices, or of another than the first."""
    if num != 1 or first != 0:
        raise fault(
            Detail.BAD_REPLY,
            f"{engine} answered with {num} choices (the first is number {first}) where one was "
            "asked for",
        )


def _finish(choice: _Choice, engine: str) -> Finish:
    try:
        return Finish(choice.finish_reason or "")
    except ValueError:
        raise fault(
            Detail.UNKNOWN_FINISH, f"{engine}: unknown finish reason {choice.finish_reason!r}"
        ) from None


def _log_probs(
    ids: list[int], given: _LogProbs | None, num_said: int | None, engine: str
) -> list[float | None]:
    """Return the log-probs, as many as ids, and of these ids wherever the reply says so."""
    values, named = _entries(given or _LogProbs())
    check_lengths(len(ids), len(values), num_said, engine)
    if named != ids:
        _refuse_ids(ids, named, engine)
    return values


def _entries(given: _LogProbs) -> tuple[list[float | None], list[int | None]]:
    """Return the log-probs, and the ids that they say they are of, in either spelling."""
    if given.content:
        return (
            [entry.logprob for entry in given.content],
            [_id_of(entry.token_id, entry.token) for entry in given.content],
        )
    return given.token_logprobs or [], [_id_of(None, name) for name in given.tokens or ()]


def _refuse_ids(ids: list[int], named: list[int | None], engine: str) -> NoReturn:
    known = [token for token in named if token is not None]
    if len(known) == len(ids):
        check_same_ids(ids, known, engine)
    raise fault(
        Detail.ID_MISMATCH,
        f"{engine}: {len(ids)} ids, but {len(known)} log-probs that say of which id they are "
        f"(token_id, or a token named {_TOKEN_NAME}<id>)",
    )


def _id_of(token_id: int | None, name: str | None) -> int | None:
    if token_id is not None or name is None:
        return token_id
    number = name.removeprefix(_TOKEN_NAME)
    return int(number) if number != name and number.isascii() and number.isdecimal() else None


def _length(given: msgspec.Raw) -> int | None:
    """Return how many entries an array of numbers has, without making them."""
    text = bytes(given).strip()
    if not text or text == b"null":
        return None
    return text.count(b",") + 1 if text[1:-1].strip() else 0


def _matched(choice: _Choice, finish: Finish, ids: list[int]) -> int | str | None:
    """Return what ended a reply; where vLLM says nothing of a stop, it was the model's end id."""
    if choice.stop_reason is None and finish is Finish.STOP and ids:
        return ids[-1]
    return choice.stop_reason


def _cache(usage: _Usage, num_prompt: int) -> PrefixCacheInfo:
    details = usage.prompt_tokens_details
    cached = 0 if details is None else counter(details.cached_tokens)
    return PrefixCacheInfo(min(cached, num_prompt), num_prompt)


def _spec(metrics: _Metrics | None, num_tokens: int) -> SpecInfo:
    said = None if metrics is None else metrics.speculative_decoding
    if said is None:
        return SpecInfo(completion_token_num=num_tokens)
    return SpecInfo(
        counter(said.num_accepted_draft_tokens),
        counter(said.num_draft_tokens),
        counter(said.num_spec_steps),
        num_tokens,
    )
