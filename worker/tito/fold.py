"""One sample from per-turn samples, each with its whole context.

Owns which fields of two samples are summed, listed, taken from the last or must agree. Never reads
a record of an engine. Invariant: as of `merge`: the prompt of every part is the result's tokens up
to that part, id for id; what breaks it is a `MergeFault` that says where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rollstream.errors import MergeFault, Status
from rollstream.sample import LogProbs, LossMask, PrefixCacheInfo, Sample, SpecInfo, TokenIds

from .ids import first_difference
from .turns import PER_TOKEN, REPLAY, Part, add_metadata, join_per_token

Decode = Callable[[TokenIds], str]

_IDENTITY = ("group_index", "member", "index", "rollout_id", "prompt", "label")
_UNMERGED = ("multimodal_inputs", "multimodal_train_inputs")
_MERGED = frozenset(
    "tokens response response_length loss_mask rollout_log_probs calls weight_versions status "
    "stop_reason metadata non_generation_time spec_info prefix_cache_info spans attempts "
    "remove_sample extra".split()
) | {*PER_TOKEN, *REPLAY, *_UNMERGED}
"""Fields that a fold computes; every other field must agree or be set on one side only."""
_PLAIN = Sample()


def merge_samples(first: Sample, second: Sample, decode: Decode) -> Sample:
    """Return the one sample that two turns, each with its whole context, make.

    Replay data is the second's, which reaches over both.

    Raises:
        MergeFault: `first` was not completed, the second does not continue it or lacks replay data
            that the first has, or a field that both have differs (`detail`: `status`, `prefix`,
            `replay`, `per_token`, `metadata`, `field`, `unsupported`).
    """
    if first.status is not Status.COMPLETED:
        raise MergeFault(f"a sample that is {first.status} cannot be continued", detail="status")
    lacking = _lacks_replay(first, second)
    if lacking is not None:
        raise MergeFault(
            f"the first sample has {lacking}, the second has not: the result would lose it",
            detail="replay",
        )
    return _fold([first, second], decode)


def fold_samples(samples: Sequence[Sample], decode: Decode) -> Sample:
    """Return the one sample that per-turn samples make.

    It ends with the first that was not completed, and before the first that lacks replay data which
    the one before it has. One sample comes back as it is.

    Raises:
        MergeFault: as `merge_samples`.
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to fold")
    kept = [samples[0]]
    for sample in samples[1:]:
        if kept[-1].status is not Status.COMPLETED or _lacks_replay(kept[-1], sample):
            break
        kept.append(sample)
    return kept[0] if len(kept) == 1 else _fold(kept, decode)


def _lacks_replay(before: Sample, after: Sample) -> str | None:
    for name in REPLAY:
        if getattr(before, name) is not None and getattr(after, name) is None:
            return name
    return None


def _fold(samples: list[Sample], decode: Decode) -> Sample:
    first, last = samples[0], samples[-1]
    _refuse_unmerged(samples)
    _check_replay(samples)
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
    _fold_optional(samples, merged)
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
    add_metadata(merged.metadata, [sample.metadata for sample in samples])
    add_metadata(merged.extra, [sample.extra for sample in samples])
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


def _fold_optional(samples: list[Sample], merged: Sample) -> None:
    offset = samples[0].prompt_length
    for name in PER_TOKEN:
        parts = [
            Part(getattr(s, name), s.response_length, s.prompt_length - offset, s.response_length)
            for s in samples
        ]
        setattr(merged, name, join_per_token(name, parts, merged.response_length))
    for name in REPLAY:
        setattr(merged, name, getattr(samples[-1], name))


def _check_replay(samples: list[Sample]) -> None:
    for name in REPLAY:
        shapes = {v.shape[1:] for s in samples if (v := getattr(s, name)) is not None and len(v)}
        if len(shapes) > 1:
            raise MergeFault(
                f"samples differ in the (layers, top_k) of {name}: {sorted(shapes)}",
                detail="replay",
            )


def _check_continues(before: Sample, after: Sample, place: int) -> None:
    where = first_difference(before.tokens, after.tokens[: after.prompt_length])
    if where >= 0:
        got = int(after.tokens[where]) if where < after.prompt_length else "its end"
        raise MergeFault(
            f"sample {place} does not continue sample {place - 1}: at index {where} its prompt "
            f"has {got} instead of {int(before.tokens[where])}",
            detail="prefix",
        )


def _refuse_unmerged(samples: list[Sample]) -> None:
    for name in _UNMERGED:
        if any(getattr(sample, name) is not None for sample in samples):
            raise MergeFault(f"samples with {name} cannot be merged", detail="unsupported")


def _agreed(samples: list[Sample]) -> dict[str, Any]:
    """Return every field that is not computed, where the samples agree on it."""
    agreed: dict[str, Any] = {}
    for name in (f.name for f in fields(Sample)):
        if name in _MERGED:
            continue
        plain = getattr(_PLAIN, name)
        values = [getattr(sample, name) for sample in samples]
        known = values if name in _IDENTITY else [v for v in values if v != plain]
        if any(value != known[0] for value in known):
            raise MergeFault(f"samples differ in {name}: {known[0]!r} and others", detail="field")
        agreed[name] = known[0] if known else plain
    return agreed
