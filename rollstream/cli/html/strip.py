"""The token strip: what every token of a sample is, as data for the page's script and as a drawing.

Owns the compact form. Never puts one element per token on the page: the script makes those in
view. Invariant: ids and log-probs are exact (int32 and float32, base64); everything else comes in
runs, which cover all tokens in order.

Axes: L all tokens, R response.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rollstream.cli.html.escape import attribute, visible
from rollstream.cli.turns import Turn
from rollstream.sample import Sample

CONTEXT, SAMPLED, MASKED = 0, 1, 2
NAMES = ("context", "sampled", "masked")
WIDTH = 1000
MAX_RECTS = 4000


def kinds_of(sample: Sample) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what every token is: context, sampled and trained on, or sampled and masked.

    Shape: [L] uint8.
    """
    kinds = np.zeros(len(sample.tokens), np.uint8)
    response = kinds[sample.prompt_length :]
    trains = sample.loss_mask
    if sample.calls:
        sampled = sample.sampled_mask()
    elif trains is not None:  # of another program, which keeps no provenance
        sampled = trains
    else:
        sampled = np.ones(sample.response_length, np.uint8)
    response[sampled > 0] = SAMPLED
    if sample.remove_sample:
        response[sampled > 0] = MASKED
    elif trains is not None:
        response[(sampled > 0) & (trains == 0)] = MASKED
    return kinds


def runs_of(kinds: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """Return [(start, end, kind)] over all tokens."""
    if not len(kinds):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return [(a, b, int(kinds[a])) for a, b in pairwise(cuts)]


def counted(runs: Sequence[tuple[int, int, int]], sample: Sample) -> str:
    """Return how many tokens are of which kind, for people."""
    totals = [sum(b - a for a, b, kind in runs if kind == k) for k in range(len(NAMES))]
    prompt = sample.prompt_length
    return (
        f"{len(sample.tokens):,} tokens: {totals[SAMPLED]:,} sampled, {totals[MASKED]:,} sampled "
        f"and masked, {totals[CONTEXT]:,} context ({prompt:,} of them the prompt)"
    )


def drawing(runs: Sequence[tuple[int, int, int]], total: int) -> str:
    """Return all tokens as one bar, each run with what it is."""
    if not total:
        return ""
    size = f'viewBox="0 0 {WIDTH} 16" preserveAspectRatio="none"'
    parts = [f'<svg class="bar" {size} role="img" aria-label="tokens by kind">']
    for start, end, kind in runs[:MAX_RECTS]:
        x, width = start / total * WIDTH, max(0.3, (end - start) / total * WIDTH)
        told = f"tokens {start}..{end}: {NAMES[kind]}, {end - start:,}"
        parts.append(f'<rect class="k{kind}" x="{x:.2f}" y="0" width="{width:.2f}" height="16">'
                     f"<title>{attribute(told)}</title></rect>")  # fmt: skip
    parts.append("</svg>")
    return "".join(parts)


def strip_data(
    sample: Sample, runs: Sequence[tuple[int, int, int]], turns: Sequence[Turn]
) -> dict[str, Any]:
    """Return what the page's script draws a strip from."""
    turn_of = {id(call): turn.number for turn in turns for call in turn.calls}
    engines: dict[str, int] = {}
    calls = []
    versions: list[list[int]] = []
    for number, call in enumerate(sample.calls):
        place = engines.setdefault(call.engine, len(engines))
        calls.append([call.start, call.end, place, visible(call.rid), visible(call.finish),
                      turn_of.get(id(call), number)])  # fmt: skip
        versions += [[start, end, version] for version, start, end in call.versions]
    log_probs = sample.rollout_log_probs
    return {
        "ids": _packed(sample.tokens, "<i4"),
        "lp": None if log_probs is None else _packed(log_probs, "<f4"),
        "prompt": sample.prompt_length,
        "runs": [list(run) for run in runs],
        "calls": calls,
        "versions": versions,
        "engines": [visible(engine) for engine in engines],
    }


def pieces_data(pieces: Mapping[int, str]) -> dict[str, str]:
    """Return the text of every id of the page."""
    return {str(number): visible(text) for number, text in pieces.items()}


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode("ascii")
