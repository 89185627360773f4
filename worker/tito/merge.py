"""One sample from per-turn records.

Owns the check that turns are append-only, and the one assembly of arrays. Never decides whether
a broken trajectory is retried, never re-tokenizes, never pads. Invariant: every kept turn's prompt
is the result's tokens up to that turn's first sampled id, id for id; what breaks it is a
`MergeFault` that says where (`divergence` says what else may become of it).

The last turn's prompt holds everything before it, so tokens are copied once and the work is
linear. A prompt that is a view of the same memory as the one before (a session that appends to one
array) is not compared again with what it shares; prompts of separate memory are compared whole,
because nothing else proves them.

Axes: P prompt ids of a turn, C its sampled ids, R everything after the first prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollstream.errors import STATUS_OF, MergeFault, StopReason
from rollstream.sample import Call, PrefixCacheInfo, Sample, SpecInfo, TokenIds

from ..types import Finish
from . import replay
from .fold import Decode, fold_samples, merge_samples
from .ids import as_ids, first_difference
from .replay import Patch
from .turns import PER_TOKEN, REPLAY, Part, TurnRecord, add_metadata, finish_of, join_per_token

__all__ = [
    "Decode", "Kept", "Merged", "TurnRecord", "finish_of", "fold_samples", "merge_samples",
    "merge_turns",
]  # fmt: skip

_OF_TOKENS = ("calls", "weight_versions", *PER_TOKEN, *REPLAY)
_STOP_REASON = {
    Finish.STOP: StopReason.STOP,
    Finish.LENGTH: StopReason.TURN_LENGTH,
    Finish.ABORT: StopReason.ABORT_REQUESTED,
}


@dataclass(slots=True)
class Merged:
    """What a merge gave."""

    sample: Sample | None
    """None where no turn is left; then `empty_reason` says why."""
    empty_reason: str | None = None
    """`no_records`, `all_truncated` or `replay_gap`."""
    num_turns: int = 0
    """Turns in the sample."""
    left_out: int = 0
    """Turns behind it: beyond `max_seq_len`, behind a turn that was not completed, or from a replay
    gap on."""
    trimmed: int = 0
    """Sampled ids at the ends of turns that no later prompt holds."""
    gap: str = ""
    """Which record lacks replay rows, where that is why turns were left out."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A turn of the result: its record and how much of its output is held."""

    turn: TurnRecord
    place: int
    """Its place among all turns, for messages."""
    start: int
    """Index into the result's tokens of its first sampled id."""
    size: int
    """How many of its sampled ids the result holds."""


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
    completed, then everything from a replay gap on. The sample's ending is its last turn's.

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
        MergeFault: `detail` is `prefix`, `cursor`, `log_probs`, `per_token`, `replay` or
            `metadata`.
        EngineFault: an unknown finish word.
        ValueError: a record without prompt ids or with an unknown per-token field, or a template
            that was generated already.
    """
    if not turns:
        return Merged(None, "no_records")
    prompts = prompts_of(turns)
    count = _num_kept(turns, prompts, max_seq_len)
    if count == 0:
        return Merged(None, "all_truncated", left_out=len(turns))
    check_template(template)
    trim = 0 if accumulated is None else max_trim
    sizes = [_size_in_next(turns[k], prompts[k], prompts[k + 1], trim, k) for k in range(count - 1)]
    sizes.append(len(turns[count - 1].output_ids))
    kept = [Kept(turns[k], k, len(prompts[k]), sizes[k]) for k in range(count)]
    fields = replay_fields(turns[:count])
    kept, gap = before_gap(kept, fields, patches_of, strict=True)
    if not kept:
        return Merged(None, "replay_gap", left_out=len(turns), gap=gap)
    last = kept[-1].place
    tokens = np.concatenate([prompts[last], as_ids(turns[last].output_ids)])
    patches = {name: patches_of(kept, name) for name in fields}
    sample = assemble(tokens, len(prompts[0]), kept, template, patches)
    if accumulated is not None:
        whole = len(kept) == len(turns)
        _check_cursor(sample.tokens, accumulated, min(trim, kept[-1].size), whole=whole)
    if decode is not None:
        sample.response = decode(sample.tokens[sample.prompt_length :])
    trimmed = sum(len(one.turn.output_ids) - one.size for one in kept)
    return Merged(
        sample, num_turns=len(kept), left_out=len(turns) - len(kept), trimmed=trimmed, gap=gap
    )


def prompts_of(turns: Sequence[TurnRecord]) -> list[TokenIds]:
    """Return the prompts as arrays.

    Raises:
        ValueError: a record has none.
    """
    prompts = []
    for place, turn in enumerate(turns):
        if turn.prompt_ids is None:
            raise ValueError(f"turn {place} has no prompt ids; record what the engine was sent")
        prompts.append(as_ids(turn.prompt_ids))
    return prompts


def check_template(template: Sample | None) -> None:
    """Refuse what the merge would silently lose, or keep for positions that it is not of.

    Raises:
        ValueError: names the field.
    """
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
    where = first_difference(prompt, following)
    if where < 0:
        where = first_difference(output, following[start:])
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


def _check_cursor(tokens: TokenIds, accumulated: TokenIds, max_trim: int, *, whole: bool) -> None:
    held = as_ids(accumulated)
    where = first_difference(tokens, held)
    at = len(tokens) if where < 0 else where
    # The last reply keeps its end token although the session may have trimmed it.
    arrived = at == len(held) if whole else at <= len(held)
    if not arrived or at < len(tokens) - max_trim:
        raise MergeFault(
            f"the merge's cursor stands at {at} of {len(tokens)} ids, but the session "
            f"accumulated {len(held)}",
            detail="cursor",
        )


# --- replay --------------------------------------------------------------------------------------
PatchesOf = Callable[[Sequence[Kept], str], list[Patch]]
"""(kept turns, replay field of a sample) -> its patches; of other turns too, where they help."""


def replay_fields(turns: Sequence[TurnRecord]) -> list[str]:
    """Return the replay fields (of a sample) that any of the turns has; the others are dormant."""
    return [
        name for name, of_turn in REPLAY.items()
        if any(getattr(turn, of_turn) is not None for turn in turns)
    ]  # fmt: skip


def patches_of(kept: Sequence[Kept], name: str) -> list[Patch]:
    """Return the patches of one replay field (of a sample), in order."""
    return [patch_of_turn(one, name) for one in kept]


def patch_of_turn(one: Kept, name: str) -> Patch:
    """Return one turn's patch of a replay field."""
    return replay.patch_of(
        getattr(one.turn, REPLAY[name]),
        one.place + 1,
        start=one.start,
        count=len(one.turn.output_ids),
        size=one.size,
        aborted=finish_of(one.turn.finish) is Finish.ABORT,
    )


def before_gap(
    kept: list[Kept], fields: Sequence[str], patches_of: PatchesOf, *, strict: bool = False
) -> tuple[list[Kept], str]:
    """Return the turns before the first that lacks replay rows, and what it lacks in words.

    Args:
        kept: in order.
        fields: that any turn has.
        patches_of: gives the patches of a field.
        strict: every patch must begin where the ones before it end, and the turn that comes to be
            the last has its whole output.

    Raises:
        MergeFault: `replay`: patches that do not join, or of differing shapes.
    """
    text = ""
    while kept:
        end, lacking = _first_gap(kept, fields, patches_of, strict=strict)
        if end is None:
            break
        kept, text = kept[:end], lacking
        if strict and kept:
            kept[-1] = replace(kept[-1], size=len(kept[-1].turn.output_ids))
    return kept, text


def _first_gap(
    kept: Sequence[Kept], fields: Sequence[str], patches_of: PatchesOf, *, strict: bool
) -> tuple[int | None, str]:
    for name in fields:
        patches, of_turn = patches_of(kept, name), REPLAY[name]
        try:
            replay.check_shapes(patches, of_turn)
            if strict:
                replay.check_starts(patches, of_turn)
        except ValueError as error:
            raise MergeFault(str(error), detail="replay") from None
        place = replay.first_gap(patches)
        if place is not None:
            record = patches[place].record
            end = next(k for k, one in enumerate(kept) if one.place + 1 == record)
            return end, replay.gap_text(place, patches, of_turn)
    return None, ""


# --- assembly ------------------------------------------------------------------------------------
def assemble(
    tokens: TokenIds,
    offset: int,
    kept: Sequence[Kept],
    template: Sample | None,
    patches: Mapping[str, Sequence[Patch]],
) -> Sample:
    """Return the sample of `tokens` with the provenance of the kept turns, validated.

    Args:
        tokens: all of them; the sample's own from here on.
        offset: length of the first prompt.
        kept: at least one turn, in order of their starts, none overlapping another.
        template: as for `merge_turns`.
        patches: of the replay fields that are not dormant.

    Raises:
        MergeFault: log-probs or per-token values that do not fit, or metadata that differs.
        ContractError: log-probs that are no numbers.
    """
    length, last = len(tokens) - offset, kept[-1].turn
    mask, log_probs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    spec, cache = SpecInfo(), PrefixCacheInfo()
    for one in kept:
        turn = one.turn
        if turn.log_probs is None or len(turn.log_probs) != len(turn.output_ids):
            count = "no" if turn.log_probs is None else len(turn.log_probs)
            raise MergeFault(
                f"turn {one.place} has {len(turn.output_ids)} sampled ids and {count} log-probs",
                detail="log_probs",
            )
        span = slice(one.start - offset, one.start - offset + one.size)
        mask[span] = 1
        log_probs[span] = turn.log_probs[: one.size]
        spec.add(turn.spec)
        cache.add(turn.cache)
    # The template's containers are shared by nobody: each sample has dictionaries of its own.
    sample = replace(Sample() if template is None else template)
    sample.extra, sample.spans = dict(sample.extra), list(sample.spans)
    sample.tokens, sample.response_length = tokens, length
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.calls = [_call_of(one) for one in kept]
    sample.derive_weight_versions()
    sample.spec_info, sample.prefix_cache_info = spec, cache
    sample.logprob_mode = last.logprob_mode
    _add_optional(sample, offset, kept)
    for name, of_field in patches.items():
        setattr(sample, name, replay.joined(of_field, max(0, len(tokens) - 1)))
    sample.metadata = dict(sample.metadata)
    add_metadata(sample.metadata, [one.turn.metadata for one in kept])
    reason = _STOP_REASON[finish_of(last.finish)]
    sample.finish(reason, STATUS_OF[reason])
    sample.validate()
    return sample


def _add_optional(sample: Sample, offset: int, kept: Sequence[Kept]) -> None:
    named = {name for one in kept for name in one.turn.per_token}
    if unknown := sorted(named - PER_TOKEN.keys()):
        raise ValueError(f"unknown per-token field {unknown[0]!r}; known: {', '.join(PER_TOKEN)}")
    for name in named:
        parts = [
            Part(
                one.turn.per_token.get(name),
                len(one.turn.output_ids),
                one.start - offset,
                one.size,
            )
            for one in kept
        ]
        setattr(sample, name, join_per_token(name, parts, sample.response_length))


def _call_of(one: Kept) -> Call:
    turn, start, size = one.turn, one.start, one.size
    end = start + size
    # An empty span names weights that came in at nobody knows which token: it outlasts a cut.
    versions = [
        (version, min(start + a, end), min(start + b, end))
        for version, a, b in turn.versions
        if a <= size or a == b
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
