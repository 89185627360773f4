"""From samples to the padded arrays that a training step eats.

Owns the layout of those arrays. Never reads Redis, never changes a sample.
Invariant: position i of every `[B, L]` array speaks of token i itself, and every array is freshly
allocated, so the trainer may write into it (the wire's own bytes are read-only).

Axes: B rows (one per sample; the leaves of a trajectory are rows of their own), L the longest row
of the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from rollstream.group import FinishedGroup, reward_number
from rollstream.sample import UNKNOWN_VERSION, LossMask, Sample


class TrainArrays(TypedDict):
    """What `to_arrays` returns: padded per-token arrays and one entry per row for the rest."""

    tokens: npt.NDArray[np.int32]
    """[B, L] token ids, `pad_id` behind the end of a row."""
    attention_mask: npt.NDArray[np.uint8]
    """[B, L] 1 on tokens, 0 on padding."""
    loss_mask: npt.NDArray[np.uint8]
    """[B, L] 1 where a loss may be taken on predicting token i; never on prompt or padding."""
    log_probs: npt.NDArray[np.float32]
    """[B, L] the engine's log-prob of token i; 0.0 where nothing was sampled."""
    reward: npt.NDArray[np.float64]
    """[B] NaN is "no verdict", which is never 0."""
    group_index: npt.NDArray[np.int64]
    """[B] the prompt group: what advantages are normalised over."""
    index: npt.NDArray[np.int64]
    """[B] unique in the run per member; leaves of one trajectory share it."""
    rollout_id: npt.NDArray[np.int64]
    """[B] shared by the leaves of one trajectory only."""
    rollout_mask_sum: npt.NDArray[np.int64]
    """[B] trainable tokens of the row's whole trajectory, over all its leaves in the batch."""
    temperature: npt.NDArray[np.float32]
    """[B] the first call's; NaN where none is recorded."""
    min_version: npt.NDArray[np.int64]
    """[B] oldest weight version of any sampled token; -1 where none is known."""
    max_version: npt.NDArray[np.int64]
    """[B] newest weight version of any sampled token; -1 where none is known."""


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Row(NamedTuple):
    """One sample with what its group and its siblings add to it."""

    sample: Sample
    mask: LossMask
    """[R] effective mask: all zero for a removed sample."""
    reward: float
    rollout_mask_sum: int


def rows_of(groups: Sequence[FinishedGroup]) -> list[Row]:
    """Return one row per sample, in order; mask sums are taken over all of `groups`."""
    flat = [(s, effective_mask(s), _reward(s, g.reward_key)) for g in groups for s in g.flat()]
    sums: dict[int, int] = {}
    trained = [int(mask.sum()) for _, mask, _ in flat]
    for (sample, _, _), count in zip(flat, trained, strict=True):
        key = _rollout_id(sample)
        sums[key] = sums.get(key, 0) + count
    return [Row(s, mask, reward, sums[_rollout_id(s)]) for s, mask, reward in flat]


def effective_mask(sample: Sample) -> LossMask:
    """Return where the trainer may take a loss on this sample.

    Shape: [R] uint8; zeros for `remove_sample`; the sampled positions where there is no mask.
    """
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.uint8)
    if sample.loss_mask is not None:
        return sample.loss_mask
    if sample.calls:
        return sample.sampled_mask()
    return np.ones(sample.response_length, dtype=np.uint8)


def _reward(sample: Sample, reward_key: str | None) -> float:
    number = reward_number(sample.reward, reward_key)
    return math.nan if number is None else number


def _rollout_id(sample: Sample) -> int:
    value = sample.rollout_id if sample.rollout_id is not None else sample.index
    return UNKNOWN_VERSION if value is None else value


def stack(rows: Sequence[Row], pad_id: int) -> TrainArrays:
    """Return the arrays of `rows`, padded to the longest of them.

    Shape: [B, L] and [B]; see `TrainArrays`.
    """
    num_rows = len(rows)
    length = max((len(row.sample.tokens) for row in rows), default=0)
    tokens = np.full((num_rows, length), pad_id, dtype=np.int32)
    attention = np.zeros((num_rows, length), dtype=np.uint8)
    mask = np.zeros((num_rows, length), dtype=np.uint8)
    log_probs = np.zeros((num_rows, length), dtype=np.float32)
    for b, row in enumerate(rows):
        sample, end = row.sample, len(row.sample.tokens)
        start = end - sample.response_length
        tokens[b, :end] = sample.tokens
        attention[b, :end] = 1
        mask[b, start:end] = row.mask
        if sample.rollout_log_probs is not None:
            log_probs[b, start:end] = sample.rollout_log_probs
        else:
            # Trainable, yet the engine gave no log-prob: 0.0 would say "probability 1".
            log_probs[b, start:end][row.mask != 0] = np.nan
    versions = [row.sample.version_range() or (UNKNOWN_VERSION, UNKNOWN_VERSION) for row in rows]
    return TrainArrays(
        tokens=tokens,
        attention_mask=attention,
        loss_mask=mask,
        log_probs=log_probs,
        reward=np.array([row.reward for row in rows], dtype=np.float64),
        group_index=_ints(row.sample.group_index for row in rows),
        index=_ints(row.sample.index for row in rows),
        rollout_id=_ints(_rollout_id(row.sample) for row in rows),
        rollout_mask_sum=_ints(row.rollout_mask_sum for row in rows),
        temperature=np.array([_temperature(row.sample) for row in rows], dtype=np.float32),
        min_version=_ints(low for low, _ in versions),
        max_version=_ints(high for _, high in versions),
    )


def micro_batches(rows: Sequence[Row], pad_id: int, max_tokens: int) -> Iterator[TrainArrays]:
    """Yield the rows, longest first, in pieces of at most `max_tokens` padded tokens.

    Longest first wastes least padding, and memory that does not suffice shows at once.

    Raises:
        ValueError: one row alone is longer than `max_tokens`.
    """
    order = sorted(rows, key=lambda row: -len(row.sample.tokens))
    if order and len(order[0].sample.tokens) > max_tokens:
        longest = order[0].sample
        raise ValueError(
            f"sample {longest.group_index}:{longest.member} has {len(longest.tokens)} tokens, "
            f"more than max_tokens={max_tokens}; raise it, or bound worker.max_seq_len"
        )
    return _pieces(order, pad_id, max_tokens)


def _pieces(order: Sequence[Row], pad_id: int, max_tokens: int) -> Iterator[TrainArrays]:
    start = 0
    while start < len(order):
        width = max(1, len(order[start].sample.tokens))
        end = start + max(1, max_tokens // width)
        yield stack(order[start:end], pad_id)
        start = end


def _ints(values: Iterator[Any] | Any) -> npt.NDArray[np.int64]:
    return np.array([-1 if value is None else value for value in values], dtype=np.int64)


def _temperature(sample: Sample) -> float:
    for sampling in (*(call.sampling for call in sample.calls), sample.sampling):
        value = sampling.get("temperature")
        if isinstance(value, int | float):
            return min(float(value), _LARGEST_FLOAT32)
    return math.nan
