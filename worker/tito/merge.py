"""One sample from per-turn records, or from per-turn samples.

Owns the check that turns are append-only, and the one assembly of arrays. Never decides whether
a broken trajectory is retried, never re-tokenizes, never pads. Invariant: every kept turn's prompt
is the result's tokens up to that turn's first sampled id, id for id; what breaks it is a
`MergeFault` that says where.

The last turn's prompt holds everything before it, so tokens are copied once and the work is
linear. A prompt that is a view of the same memory as the one before (a session that appends to one
array) is not compared again with what it shares; prompts of separate memory are compared whole,
because nothing else proves them.

Axes: P prompt ids of a turn, C its sampled ids, R everything after the first prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rollstream.errors import STATUS_OF, EngineFault, MergeFault, Status, StopReason
from rollstream.sample import (
    UNKNOWN_VERSION,
    Call,
    LogProbs,
    LossMask,
    PrefixCacheInfo,
    Sample,
    SpecInfo,
    TokenIds,
)

from ..types import Finish
from .ids import as_ids

Decode = Callable[[TokenIds], str]

_FINISH = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORT,
}
_OF_TOKENS = (
    "calls", "weight_versions", "teacher_log_probs", "opd_reverse_kl", "rollout_routed_experts",
    "rollout_indexer_topk",
)  # fmt: skip
_STOP_REASON = {
    Finish.STOP: StopReason.STOP,
    Finish.LENGTH: StopReason.TURN_LENGTH,
    Finish.ABORT: StopReason.ABORT_REQUESTED,
}


@dataclass(slots=True)
class TurnRecord:
    """One engine call as it was recorded."""

    prompt_ids: TokenIds | None
    """[P] all that the engine saw; None where the record lacks them, which no merge accepts."""
    output_ids: TokenIds
    """[C] what it sampled, end token included."""
    log_probs: LogProbs | None
    """[C] of the same ids."""
    finish: Finish | str = Finish.STOP
    """`tool_calls` counts as `stop`; any other unknown word is an engine fault."""
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    """[(weight version, start, end)] over 0..C."""
    metadata: dict[str, Any] = field(default_factory=dict)
    rid: str = ""
    engine: str = ""
    dispatched_version: int = UNKNOWN_VERSION
    logprob_mode: str = "temperature"
    sampling: dict[str, Any] = field(default_factory=dict)
    cache: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    spec: SpecInfo = field(default_factory=SpecInfo)


@dataclass(slots=True)
class Merged:
    """What a merge gave."""

    sample: Sample | None
    """None where no turn is left; then `empty_reason` says why."""
    empty_reason: str | None = None
    """`no_records` or `all_truncated`."""
    num_turns: int = 0
    """Turns in the sample."""
    left_out: int = 0
    """Turns behind it: beyond `max_seq_len`, or behind a turn that was not completed."""
    trimmed: int = 0
    """Sampled ids at the ends of turns that no later prompt holds."""


def finish_of(word: Finish | str) -> Finish:
    """Return how an engine's finish word counts.

    Raises:
        EngineFault: an unknown word; never taken for pending or completed.
    """
    known = _FINISH.get(word)
    if known is None:
        raise EngineFault(
            f"unknown finish reason {word!r}; known: {', '.join(_FINISH)}", detail="unknown_finish"
        )
    return known


def merge_turns(
    turns: Sequence[TurnRecord],
    *,
    template: Sample | None = None,
    decode: Decode | None = None,
    accumulated: TokenIds | None = None,
    max_trim: int = 0,
    max_seq_len: int | None = None,
) -> Merged:
    """Return the one sample that append-only turns make.

    Turns that end beyond `max_seq_len` are cut first, then everything behind a turn that was not
    completed. The sample's ending is its last turn's.

    Args:
        turns: in order; each prompt holds the prompt and the output of the turn before.
        template: gives every field that turns do not; never changed, and without anything that
            speaks of tokens itself.
        decode: gives the response text from the response's ids.
        accumulated: what the session holds at its end; the merge must arrive there.
        max_trim: how many ids at the end of a reply the session may have left out of later
            prompts (a stop token, say); they are dropped. Needs `accumulated`.
        max_seq_len: longest prompt and output together, in tokens.

    Raises:
        MergeFault: `detail` is `prefix`, `cursor`, `log_probs` or `metadata`.
        EngineFault: an unknown finish word.
        ValueError: a record without prompt ids, or a template that was generated already.
    """
    if not turns:
        return Merged(None, "no_records")
    prompts = [_prompt_of(turn, place) for place, turn in enumerate(turns)]
    kept = _num_kept(turns, prompts, max_seq_len)
    if kept == 0:
        return Merged(None, "all_truncated", left_out=len(turns))
    _check_template(template)
    trim = 0 if accumulated is None else max_trim
    sizes = [_size_in_next(turns[k], prompts[k], prompts[k + 1], trim, k) for k in range(kept - 1)]
    sizes.append(len(turns[kept - 1].output_ids))
    sample = _assemble(turns[:kept], prompts, sizes, template)
    if accumulated is not None:
        _check_cursor(sample.tokens, accumulated, min(trim, sizes[-1]), whole=kept == len(turns))
    if decode is not None:
        sample.response = decode(sample.tokens[sample.prompt_length :])
    sample.validate()
    trimmed = sum(len(turn.output_ids) for turn in turns[:kept]) - sum(sizes)
    return Merged(sample, num_turns=kept, left_out=len(turns) - kept, trimmed=trimmed)


def merge_samples(first: Sample, second: Sample, decode: Decode) -> Sample:
    """Return the one sample that two turns, each with its whole context, make.

    Raises:
        MergeFault: `first` was not completed, the second does not continue it, or a field that
            both have differs (`detail`: `status`, `prefix`, `metadata`, `field`, `unsupported`).
    """
    if first.status is not Status.COMPLETED:
        raise MergeFault(f"a sample that is {first.status} cannot be continued", detail="status")
    return _fold([first, second], decode)


def fold_samples(samples: Sequence[Sample], decode: Decode) -> Sample:
    """Return the one sample that per-turn samples make, up to the first that was not completed.

    One sample comes back as it is.

    Raises:
        MergeFault: as `merge_samples`.
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to fold")
    end = next((k for k, s in enumerate(samples, 1) if s.status is not Status.COMPLETED), None)
    kept = list(samples[:end])
    return kept[0] if len(kept) == 1 else _fold(kept, decode)


# --- turns ---------------------------------------------------------------------------------------
def _prompt_of(turn: TurnRecord, place: int) -> TokenIds:
    if turn.prompt_ids is None:
        raise ValueError(f"turn {place} has no prompt ids; record what the engine was sent")
    return as_ids(turn.prompt_ids)


def _check_template(template: Sample | None) -> None:
    """Refuse what the merge would silently lose, or keep for positions that it is not of."""
    for name in _OF_TOKENS:
        value = getattr(template, name, None)
        if value is not None and len(value):
            raise ValueError(
                f"the template has {name} already; merge into a sample that was not generated"
            )


def _num_kept(
    turns: Sequence[TurnRecord], prompts: Sequence[TokenIds], max_seq_len: int | None
) -> int:
    for place, turn in enumerate(turns):
        if max_seq_len is not None and len(prompts[place]) + len(turn.output_ids) > max_seq_len:
            return place
        if finish_of(turn.finish) is not Finish.STOP:
            return place + 1
    return len(turns)


def _size_in_next(
    turn: TurnRecord, prompt: TokenIds, following: TokenIds, max_trim: int, place: int
) -> int:
    """Return how many ids of the turn's output the next prompt holds: all, but for the trim."""
    start, output = len(prompt), as_ids(turn.output_ids)
    where = _first_difference(prompt, following)
    if where < 0:
        where = _first_difference(output, following[start:])
        if where < 0:
            return len(output)
        if len(output) - where <= max_trim:
            return where
        where += start
    held = int(prompt[where]) if where < start else int(output[where - start])
    got = f"has {int(following[where])}" if where < len(following) else "ends"
    raise MergeFault(
        f"turn {place + 1} does not continue turn {place}: at index {where} its prompt {got}, "
        f"where turn {place} {'was sent' if where < start else 'sampled'} {held} "
        f"(of {start} + {len(output)} ids)",
        detail="prefix",
    )


def _first_difference(expected: TokenIds, got: TokenIds) -> int:
    """Return the first index at which `got` does not have `expected`, -1 where it begins with it.

    The end of `got` is a difference.
    """
    count = min(len(expected), len(got))
    if not _same_memory(expected, got):
        equal = expected[:count] == got[:count]
        if not equal.all():
            return int(np.argmin(equal))
    return -1 if count == len(expected) else count


def _same_memory(a: TokenIds, b: TokenIds) -> bool:
    # Contiguous arrays of one type that begin at one address agree as far as both reach.
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def _assemble(
    turns: Sequence[TurnRecord],
    prompts: Sequence[TokenIds],
    sizes: Sequence[int],
    template: Sample | None,
) -> Sample:
    last = len(turns) - 1
    offset = len(prompts[0])
    tokens = np.concatenate([prompts[last], as_ids(turns[last].output_ids)])
    length = len(tokens) - offset
    mask, log_probs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    spec, cache = SpecInfo(), PrefixCacheInfo()
    calls: list[Call] = []
    for place, turn in enumerate(turns):
        start, size = len(prompts[place]), sizes[place]
        if turn.log_probs is None or len(turn.log_probs) != len(turn.output_ids):
            count = "no" if turn.log_probs is None else len(turn.log_probs)
            raise MergeFault(
                f"turn {place} has {len(turn.output_ids)} sampled ids and {count} log-probs",
                detail="log_probs",
            )
        span = slice(start - offset, start - offset + size)
        mask[span] = 1
        log_probs[span] = turn.log_probs[:size]
        calls.append(_call_of(turn, start, size))
        spec.add(turn.spec)
        cache.add(turn.cache)
    # The template's containers are shared by nobody: each sample has dictionaries of its own.
    sample = replace(Sample() if template is None else template)
    sample.extra, sample.spans = dict(sample.extra), list(sample.spans)
    sample.tokens, sample.response_length = tokens, length
    sample.loss_mask, sample.rollout_log_probs, sample.calls = mask, log_probs, calls
    sample.derive_weight_versions()
    sample.spec_info, sample.prefix_cache_info = spec, cache
    sample.logprob_mode = turns[last].logprob_mode
    sample.metadata = dict(sample.metadata)
    _add_metadata(sample.metadata, [turn.metadata for turn in turns])
    reason = _STOP_REASON[finish_of(turns[last].finish)]
    sample.finish(reason, STATUS_OF[reason])
    return sample


def _call_of(turn: TurnRecord, start: int, size: int) -> Call:
    end = start + size
    versions = [
        (version, start + a, min(start + b, end)) for version, a, b in turn.versions if a <= size
    ]
    return Call(
        rid=turn.rid,
        engine=turn.engine,
        start=start,
        end=end,
        finish=finish_of(turn.finish).value,
        versions=versions or [(turn.dispatched_version, start, end)],
        dispatched_version=turn.dispatched_version,
        logprob_mode=turn.logprob_mode,
        sampling=turn.sampling,
    )


def _check_cursor(tokens: TokenIds, accumulated: TokenIds, max_trim: int, *, whole: bool) -> None:
    held = as_ids(accumulated)
    where = _first_difference(tokens, held)
    at = len(tokens) if where < 0 else where
    # The last reply keeps its end token although the session may have trimmed it.
    arrived = at == len(held) if whole else at <= len(held)
    if not arrived or at < len(tokens) - max_trim:
        raise MergeFault(
            f"the merge's cursor stands at {at} of {len(tokens)} ids, but the session "
            f"accumulated {len(held)}",
            detail="cursor",
        )


# --- samples -------------------------------------------------------------------------------------
_IDENTITY = ("group_index", "member", "index", "rollout_id", "prompt", "label")
_REPLAY = (
    "rollout_routed_experts", "rollout_indexer_topk", "teacher_log_probs", "opd_reverse_kl",
    "multimodal_inputs", "multimodal_train_inputs",
)  # fmt: skip
_MERGED = frozenset(
    "tokens response response_length loss_mask rollout_log_probs calls weight_versions status "
    "stop_reason metadata non_generation_time spec_info prefix_cache_info spans attempts "
    "remove_sample extra".split()
)
"""Fields that a fold computes; every other field must agree or be set on one side only."""
_PLAIN = Sample()


def _fold(samples: list[Sample], decode: Decode) -> Sample:
    first, last = samples[0], samples[-1]
    _refuse_replay(samples)
    response = [first.response]
    for place in range(1, len(samples)):
        before, after = samples[place - 1], samples[place]
        _check_continues(before, after, place)
        seen = after.tokens[len(before.tokens) : after.prompt_length]
        response += [decode(seen) if len(seen) else "", after.response]
    merged = replace(first, **_agreed(samples))
    merged.tokens, merged.response = last.tokens, "".join(response)
    merged.response_length = len(last.tokens) - first.prompt_length
    merged.loss_mask, merged.rollout_log_probs = _fold_arrays(samples, merged.response_length)
    merged.calls = [call for sample in samples for call in sample.calls]
    merged.weight_versions = [v for sample in samples for v in sample.weight_versions]
    merged.spans = [span for sample in samples for span in sample.spans]
    merged.non_generation_time = sum(sample.non_generation_time for sample in samples)
    merged.spec_info, merged.prefix_cache_info = SpecInfo(), PrefixCacheInfo()
    for sample in samples:
        merged.spec_info.add(sample.spec_info)
        merged.prefix_cache_info.add(sample.prefix_cache_info)
    merged.attempts = max(sample.attempts for sample in samples)
    merged.remove_sample = any(sample.remove_sample for sample in samples)
    merged.status, merged.stop_reason = last.status, last.stop_reason
    merged.metadata, merged.extra = {}, {}
    _add_metadata(merged.metadata, [sample.metadata for sample in samples])
    _add_metadata(merged.extra, [sample.extra for sample in samples])
    merged.validate()
    return merged


def _fold_arrays(samples: list[Sample], length: int) -> tuple[LossMask, LogProbs]:
    mask, log_probs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    offset = samples[0].prompt_length
    for sample in samples:
        span = slice(sample.prompt_length - offset, len(sample.tokens) - offset)
        if sample.loss_mask is not None:
            mask[span] = sample.loss_mask
        else:
            mask[span] = sample.sampled_mask() if sample.calls else 1
        if sample.rollout_log_probs is not None:
            log_probs[span] = sample.rollout_log_probs
    return mask, log_probs


def _check_continues(before: Sample, after: Sample, place: int) -> None:
    where = _first_difference(before.tokens, after.tokens[: after.prompt_length])
    if where >= 0:
        got = int(after.tokens[where]) if where < after.prompt_length else "its end"
        raise MergeFault(
            f"sample {place} does not continue sample {place - 1}: at index {where} its prompt "
            f"has {got} instead of {int(before.tokens[where])}",
            detail="prefix",
        )


def _refuse_replay(samples: list[Sample]) -> None:
    for name in _REPLAY:
        if any(getattr(sample, name) is not None for sample in samples):
            raise MergeFault(f"samples with {name} cannot be merged", detail="unsupported")


def _agreed(samples: list[Sample]) -> dict[str, Any]:
    """Return every field that is not computed, where the samples agree on it."""
    agreed: dict[str, Any] = {}
    for name in (f.name for f in fields(Sample)):
        if name in _MERGED or name in _REPLAY:
            continue
        plain = getattr(_PLAIN, name)
        values = [getattr(sample, name) for sample in samples]
        known = values if name in _IDENTITY else [v for v in values if v != plain]
        if any(value != known[0] for value in known):
            raise MergeFault(f"samples differ in {name}: {known[0]!r} and others", detail="field")
        agreed[name] = known[0] if known else plain
    return agreed


def _add_metadata(into: dict[str, Any], turns: Sequence[dict[str, Any]]) -> None:
    """Add the metadata of turns: `lifecycle` as a list, the last `messages`, the rest agreed.

    Raises:
        MergeFault: a key on which two turns differ.
    """
    lifecycle: list[Any] = []
    for metadata in turns:
        for key, value in metadata.items():
            if key == "lifecycle":
                lifecycle += value if isinstance(value, list) else [value]
            elif key != "messages" and key in into and into[key] != value:
                raise MergeFault(
                    f"turns differ in metadata {key!r}: {into[key]!r} and {value!r}",
                    detail="metadata",
                )
            else:
                into[key] = value
    if lifecycle:
        into["lifecycle"] = lifecycle if len(turns) > 1 else turns[0]["lifecycle"]
