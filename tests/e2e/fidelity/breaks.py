"""What `--break` damages: each is a mistake that real systems make, and must make the proof fail.

Owns the damages. Never used by a run that is to be believed. Invariant: a damaged sample still
holds the record's own invariant (`Sample.validate`), so only the proof can see it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollstream.sample import Call, Sample, TokenIds

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

OF_ENGINE = ("raw",)
"""The engine reports log softmax(logits) whatever T, as vLLM does by default."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokenizer, for damages that go through text."""

    encode: Encode
    decode: Decode


@dataclass(slots=True)
class _Piece:
    """Ids that a call sampled, or that were observed (`call` None)."""

    ids: TokenIds
    log_probs: np.ndarray
    call: Call | None


def retokenize(sample: Sample, text: Text) -> Sample:
    """Keep text instead of ids, and encode it for training."""
    pieces = _pieces(sample)
    for piece in pieces:
        ids = np.array(text.encode(text.decode(piece.ids.tolist())), dtype=np.int32)
        held = np.zeros(len(ids), dtype=np.float32)
        common = min(len(ids), len(piece.ids))
        held[:common] = piece.log_probs[:common]
        piece.ids, piece.log_probs = ids, held
    return _joined(sample, pieces)


def shift(sample: Sample, text: Text) -> Sample:
    """Give every sampled token the log-prob of the one before it."""
    pieces = _pieces(sample)
    for piece in pieces:
        piece.log_probs = np.roll(piece.log_probs, 1)
    return _joined(sample, pieces)


def temperature(sample: Sample, text: Text) -> Sample:
    """Record another temperature than the engine was asked for."""
    changed = copy.copy(sample)
    changed.calls = [
        replace(c, sampling={**c.sampling, "temperature": c.sampling["temperature"] * 0.97})
        for c in sample.calls
    ]
    return changed


def drop(sample: Sample, text: Text) -> Sample:
    """Lose a token in the middle of the first reply."""
    pieces = _pieces(sample)
    for piece in pieces:
        if piece.call is not None and len(piece.ids) > 1:
            middle = len(piece.ids) // 2
            piece.ids = np.delete(piece.ids, middle)
            piece.log_probs = np.delete(piece.log_probs, middle)
            break
    return _joined(sample, pieces)


def versions(sample: Sample, text: Text) -> Sample:
    """Name the weights before or after those that sampled."""
    changed = copy.copy(sample)
    changed.calls = [
        replace(c, versions=[(v + 1 if v % 2 == 0 else v - 1, a, b) for v, a, b in c.versions])
        for c in sample.calls
    ]
    changed.derive_weight_versions()
    return changed


def observed(sample: Sample, text: Text) -> Sample:
    """Change an id that a tool wrote."""
    pieces = _pieces(sample)
    for piece in pieces:
        if piece.call is None:
            piece.ids = piece.ids.copy()
            piece.ids[len(piece.ids) // 2] = 9
    return _joined(sample, pieces)


def mask(sample: Sample, text: Text) -> Sample:
    """Leave the end token of every reply out of the loss."""
    changed = copy.copy(sample)
    assert sample.loss_mask is not None
    changed.loss_mask = sample.loss_mask.copy()
    for call in sample.calls:
        if call.end > call.start:
            changed.loss_mask[call.end - 1 - sample.prompt_length] = 0
    return changed


def rounded(sample: Sample, text: Text) -> Sample:
    """Let the log-probs pass through half precision."""
    changed = copy.copy(sample)
    assert sample.rollout_log_probs is not None
    changed.rollout_log_probs = sample.rollout_log_probs.astype(np.float16).astype(np.float32)
    return changed


Damage = Callable[[Sample, Text], Sample]
BREAKS: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (retokenize, shift, temperature, drop, versions, observed, mask, rounded)
}


def _pieces(sample: Sample) -> list[_Piece]:
    """Cut the response where calls begin and end."""
    assert sample.rollout_log_probs is not None
    offset = sample.prompt_length
    pieces: list[_Piece] = []

    def add(start: int, end: int, call: Call | None) -> None:
        if end > start or call is not None:
            log_probs = np.array(sample.rollout_log_probs[start - offset : end - offset])  # type: ignore[index]
            pieces.append(_Piece(np.array(sample.tokens[start:end]), log_probs, call))

    at = offset
    for call in sample.calls:
        add(at, call.start, None)
        add(call.start, call.end, call)
        at = call.end
    add(at, len(sample.tokens), None)
    return pieces


def _joined(sample: Sample, pieces: Sequence[_Piece]) -> Sample:
    """Put pieces together again; calls cover what their pieces have now."""
    changed = copy.copy(sample)
    at = sample.prompt_length
    calls: list[Call] = []
    marks: list[np.ndarray] = []
    for piece in pieces:
        end = at + len(piece.ids)
        if piece.call is not None:
            moved = at - piece.call.start
            spans = [
                (v, min(a + moved, end), min(b + moved, end)) for v, a, b in piece.call.versions
            ]
            if spans and spans[-1][2] < end:
                spans[-1] = (spans[-1][0], spans[-1][1], end)
            calls.append(replace(piece.call, start=at, end=end, versions=spans))
        marks.append(np.full(len(piece.ids), piece.call is not None, dtype=np.uint8))
        at = end
    prompt = sample.tokens[: sample.prompt_length]
    changed.tokens = np.concatenate([prompt, *(piece.ids for piece in pieces)]).astype(np.int32)
    changed.response_length = at - sample.prompt_length
    changed.loss_mask = np.concatenate(marks)
    changed.rollout_log_probs = np.concatenate([p.log_probs for p in pieces]).astype(np.float32)
    changed.rollout_log_probs[changed.loss_mask == 0] = 0.0
    changed.calls = calls
    changed.derive_weight_versions()
    return changed
