"""From logits to sampled tokens and their log-probs: one function over a batch, row by row alike.

Owns the distributions. Never keeps a state between calls. Invariant: a row's token and log-prob
depend on that row alone: its logits, its parameters, its earlier output, its seed and its position.

The draw is an inverse transform over the vocabulary in id order with one uniform number, which is
a hash of (seed, absolute position): the same seed and prompt give the same tokens in any batch, and
a request that continues an aborted one (prompt and partial) continues its draws.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from .params import ALL, Params


class LogprobMode(StrEnum):
    """Of which distribution the reported log-probs are."""

    TEMPERATURE = "temperature"
    """log softmax(logits / T), after penalties, biases and masks, before truncation: as SGLang."""
    PROCESSED = "processed"
    """Of the distribution drawn from: after truncation, renormalized."""
    RAW = "raw"
    """log softmax(logits) of the model itself."""


BLOCK = 1024
"""Ids whose probabilities are summed at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one request asks of the sampler now."""

    params: Params
    seed: int
    position: int
    """Index of the token to come, prompt included."""
    counts: Counter[int]
    """How often each id was sampled so far; read only where the parameters penalize."""
    forbidden: frozenset[int]
    """Ids that may not come yet (`min_new_tokens`)."""


class Draw(NamedTuple):
    """One sampled token; None where the logits held NaN."""

    token: int | None
    log_prob: float


def uniform(seed: int, position: int) -> float:
    """Return the number in (0, 1) that decides which token comes at a position."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / (1 << 52)


def draw(logits: torch.Tensor, rows: Sequence[Row], mode: LogprobMode) -> list[Draw]:
    """Sample one token for each row.

    Args:
        logits: [B, V] of any float type; the softmax is in float32 and the draw in float64.
        rows: [B].
        mode: of the reported log-probs.
    """
    logits = logits.float()
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    log_probs = torch.log_softmax(_cooled(_change_logits(logits, rows), rows), dim=-1)
    broken = log_probs.sum(dim=-1).isnan()  # NaN or infinite anywhere in the row
    probs = log_probs.exp()
    lost = _lost(probs)
    cut = [i for i, row in enumerate(rows) if row.params.truncates and not row.params.greedy]
    if cut:
        probs[cut] = _truncate(probs[cut], [rows[i].params for i in cut])
    tokens = _invert(probs, rows)
    greedy = torch.tensor([row.params.greedy for row in rows], device=logits.device)
    if any(row.params.greedy for row in rows):
        tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    if mode is LogprobMode.RAW:
        log_probs = torch.log_softmax(logits, dim=-1)
        lost = _lost(log_probs.exp())
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    if mode is LogprobMode.PROCESSED:
        chosen = chosen - _lost(probs)
        chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
    else:
        chosen = chosen - lost
    return [
        Draw(None if bad else token, log_prob)
        for token, log_prob, bad in zip(
            tokens.tolist(), chosen.tolist(), broken.tolist(), strict=True
        )
    ]


def _cooled(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return logits / T."""
    temperatures = [[row.params.temperature] for row in rows]
    if all(one == [1.0] for one in temperatures):
        return logits
    return logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)


def _change_logits(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return logits with penalties, forbidden ids and biases, in SGLang's order.

    Penalties look at what was sampled, never at the prompt (as SGLang, unlike transformers).
    """
    changing = [
        (i, row)
        for i, row in enumerate(rows)
        if row.forbidden or row.params.logit_bias or (row.params.penalizes and row.counts)
    ]
    if not changing:
        return logits
    logits = logits.clone()
    for i, row in changing:
        params = row.params
        if params.penalizes and row.counts:
            ids = torch.tensor(list(row.counts), device=logits.device)
            times = torch.tensor(list(row.counts.values()), device=logits.device).float()
            values = logits[i, ids] - params.frequency_penalty * times - params.presence_penalty
            scale = params.repetition_penalty
            logits[i, ids] = torch.where(values < 0, values * scale, values / scale)
        if row.forbidden:
            logits[i, torch.tensor(sorted(row.forbidden), device=logits.device)] = -torch.inf
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[i, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    return logits


def _truncate(probs: torch.Tensor, params: Sequence[Params]) -> torch.Tensor:
    """Return [B, V] with 0 where top-k, top-p or min-p cut (jointly, over the same ranking)."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=probs.device)[:, None]

    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.double()
    ranks = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    drop = ranks >= column([min(p.top_k, ALL) for p in params])
    drop |= ranked.cumsum(dim=-1) - ranked > column([p.top_p for p in params])
    drop |= ranked < ranked[:, :1] * column([p.min_p for p in params])
    drop[:, 0] = False  # the likeliest stays, whatever rounding says
    return probs.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), 0.0)


def _invert(probs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return [B] ids: where each row's cumulative probability passes its uniform number.

    In two steps, over blocks and within one: summing a vocabulary's prefixes in float64 would cost
    more than a small model's forward pass. Every row is summed in the same order in any batch.
    """
    size = probs.shape[-1]
    sums = _block_sums(probs)
    numbers = [[uniform(row.seed, row.position)] for row in rows]
    ends = sums.cumsum(dim=-1)
    wanted = torch.tensor(numbers, dtype=torch.float64, device=probs.device) * ends[:, -1:]
    block = _first_above(ends, wanted)
    wanted = (wanted - (ends - sums).gather(1, block)).clamp(min=0.0)
    ids = block * BLOCK + torch.arange(BLOCK, device=probs.device)[None, :]
    inside = probs.gather(1, ids.clamp(max=size - 1)).double().masked_fill(ids >= size, 0.0)
    within = _first_above(inside.cumsum(dim=-1), wanted)
    return (block * BLOCK + within)[:, 0].clamp(max=size - 1)


def _block_sums(probs: torch.Tensor) -> torch.Tensor:
    """Return [B, blocks] sums in float64; each is exact to 1e-7 of its block."""
    size = probs.shape[-1]
    whole = size // BLOCK
    sums = probs[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).sum(dim=-1)
    if size > whole * BLOCK:
        sums = torch.cat([sums, probs[:, whole * BLOCK :].sum(dim=-1, keepdim=True)], dim=1)
    return sums.double()


def _lost(probs: torch.Tensor) -> torch.Tensor:
    """Return [B]: the log of what probabilities really sum to.

    `torch.log_softmax` sums a row in a few float32 lanes on a CPU; the lane that has a likely token
    loses what the rare ones add to it. Of 152k ids that was 2e-4 of a log-prob.
    """
    return _block_sums(probs).sum(dim=-1).log().float()


def _first_above(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return [B, 1] indices: the first end above what is wanted, at most the last that rises."""
    total = ends[:, -1:].contiguous()
    found = torch.searchsorted(ends, wanted, right=True)
    return torch.minimum(found, torch.searchsorted(ends, total)).clamp(max=ends.shape[-1] - 1)


def scores(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    """Return log softmax(logits)[i, targets[i]] in float32: what scoring a prompt reports.

    No temperature: SGLang's prefill log-probs have none either.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    ids = torch.tensor(list(targets), device=log_probs.device)
    chosen = log_probs.gather(1, ids[:, None])[:, 0]
    if log_probs.device.type != "mps":  # it has no float64, and sums otherwise
        chosen = chosen - _lost(log_probs.exp())
    values: list[float] = chosen.tolist()
    return values
