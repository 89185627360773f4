"""Are the log-probs of finished samples those of the engine's weights? Scored again as a prefill.

Owns the request (SGLang's `/generate` with `logprob_start_len` and nothing to sample), how its
reply is read, and what a difference may be blamed on. Never does I/O: the command line and the
workers send. Invariant: only positions are compared of which both sides speak of the same thing
(same weight version, a temperature at which a prefill has a say); whatever is left out is counted
under its reason, so that a verdict over nothing is seen as one.

What a prefill says (read in SGLang 0.5.23): `input_token_logprobs` holds [log-prob, id, null] of
the inputs from `logprob_start_len` on, the first entry without a value; they are log
softmax(logits), whatever temperature is asked for. Samples of another temperature are comparable
only where the engine records raw log-probs too, and that is how the mode is told.

Axes: L all tokens of a sample, R its response, K its sampled positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.sample import UNKNOWN_VERSION, Call, LogProbs, Sample

SOURCE = "sglang_prefill_recompute"
"""Of log-probs that a prefill gave, in `metadata` of whoever keeps them."""
P99_LIMIT = 0.05
"""Nats: a 99th percentile above it is a problem, a position above it may be the first to differ.
bf16 engines differ by a few hundredths between a prefill and a decode, a wrong token by whole
units."""
_PLAIN_PENALTIES = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}  # fmt: skip
"""Of sampled log-probs they are a part, of a prefill's they are none."""
_PLAIN_CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Part of sampled log-probs only where the mode is `processed`."""
_SAME_MODE = {"processed": "temperature"}
"""Without cuts, and none are compared, the two are one."""
_AT_ONE = (0, 1)
"""Temperatures whose log-probs are those of the logits themselves; 0 is greedy."""

Values = npt.NDArray[np.float64]


# --- the request and its reply -------------------------------------------------------------------
def can_score(sample: Sample) -> bool:
    """Return whether a sample has anything that could be compared."""
    return bool(sample.num_sampled) and sample.rollout_log_probs is not None


def request_of(sample: Sample) -> dict[str, Any]:
    """Return the body that scores a sample's whole response.

    The first entry of the answer has no value, so it begins one token earlier.
    """
    return {
        "input_ids": sample.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": max(0, sample.prompt_length - 1),
        "stream": False,
    }


def scores_of(sample: Sample, reply: Mapping[str, Any]) -> LogProbs:
    """Return the prefill's log-probs of a sample's response.

    Shape: [R] float32; NaN where the engine says nothing (a sample without a prompt begins so).

    Raises:
        ValueError: the answer is of other tokens ("token alignment mismatch"), or is none.
    """
    meta = reply.get("meta_info")
    entries = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f"the engine scored nothing: {str(dict(reply))[:200]}")
    length = sample.response_length
    wanted = sample.tokens[len(sample.tokens) - length :].tolist()
    tail = entries[max(0, len(entries) - length) :] if length else []
    ids = [_id_of(entry) for entry in tail]
    if len(entries) < length or ids != wanted:
        raise ValueError(f"token alignment mismatch: {_alignment(sample, ids, wanted)}")
    values = [np.nan if entry[0] is None else float(entry[0]) for entry in tail]
    return np.array(values, dtype=np.float64).astype(np.float32)


def _id_of(entry: Any) -> int:
    if not isinstance(entry, Sequence) or len(entry) < 2 or not isinstance(entry[1], int):
        raise ValueError(f"the engine's entry {str(entry)[:80]} is not [log-prob, id, text]")
    return entry[1]


def _alignment(sample: Sample, ids: Sequence[int], wanted: Sequence[int]) -> str:
    if len(ids) < len(wanted):
        return f"{len(ids)} tokens were scored, the response has {len(wanted)}"
    at = next(i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b)
    return f"at token {sample.prompt_length + at} the engine scored {ids[at]}, not {wanted[at]}"


def served_version(label: Any, *, current: int = UNKNOWN_VERSION, current_label: str = "") -> int:
    """Return the weight version that an engine's label means; unknown where nobody can tell.

    Args:
        label: `weight_version` of an engine.
        current: the run's weight version.
        current_label: the engines' own name of it, where the trainer gave one.
    """
    if isinstance(label, bool) or not isinstance(label, int | str):
        return UNKNOWN_VERSION
    text = str(label)
    if current_label and text == current_label:
        return current
    if text.isascii() and text.isdigit():
        return int(text)
    return 0 if text == "default" and current in (0, UNKNOWN_VERSION) else UNKNOWN_VERSION


# --- one sample ----------------------------------------------------------------------------------
@dataclass(slots=True)
class Comparison:
    """The sampled positions of one sample beside a prefill of them."""

    name: str
    """`group:member`, with `/leaf` where there are several."""
    served: int
    """Weight version of the engine that scored."""
    positions: npt.NDArray[np.int64]
    """[K] indexes into the sample's tokens."""
    ids: npt.NDArray[np.int32]
    """[K]"""
    sampled: Values
    """[K] as recorded."""
    scored: Values
    """[K] as the prefill has them."""
    versions: npt.NDArray[np.int64]
    """[K] weight version that sampled each."""
    is_comparable: npt.NDArray[np.bool_]
    """[K] at the call's temperature and penalties a prefill says the same thing."""
    is_tempered: npt.NDArray[np.bool_]
    """[K] sampled at a temperature other than 1, without penalties: what tells the mode."""
    recorded_mode: str = "temperature"

    @property
    def differences(self) -> Values:
        """[K] absolute, NaN where the prefill has no value."""
        return np.abs(self.sampled - self.scored)

    @property
    def is_same(self) -> npt.NDArray[np.bool_]:
        """[K] sampled by the version that scored."""
        return np.asarray(self.versions == self.served)

    def counted(self) -> Values:
        """Return the differences that say something: comparable, and of the same version."""
        kept = self.differences[self.is_comparable & self.is_same]
        return kept[~np.isnan(kept)]


def compare(
    sample: Sample, scored: LogProbs, *, served: int, leaf: int | None = None
) -> Comparison:
    """Return a sample's sampled positions beside their scores.

    Args:
        sample: one that `can_score` says has something to compare.
        scored: [R] of `scores_of`.
        served: weight version of the engine, by `served_version`.
        leaf: its place among the leaves of its trajectory.
    """
    assert sample.rollout_log_probs is not None
    size, offset = sample.num_sampled, sample.prompt_length
    positions = np.concatenate(
        [np.arange(call.start, call.end, dtype=np.int64) for call in sample.calls]
    )
    versions = np.full(size, UNKNOWN_VERSION, dtype=np.int64)
    comparable, tempered = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    at = 0
    for call in sample.calls:
        end = at + call.end - call.start
        for version, first, last in call.versions:
            versions[at + first - call.start : at + last - call.start] = version
        comparable[at:end], tempered[at:end] = _kind_of(call)
        at = end
    name = f"{sample.group_index}:{sample.member}" + ("" if leaf is None else f"/{leaf}")
    return Comparison(
        name=name,
        served=served,
        positions=positions,
        ids=sample.tokens[positions],
        sampled=sample.rollout_log_probs[positions - offset].astype(np.float64),
        scored=scored[positions - offset].astype(np.float64),
        versions=versions,
        is_comparable=comparable,
        is_tempered=tempered,
        recorded_mode=sample.logprob_mode,
    )


def _kind_of(call: Call) -> tuple[bool, bool]:
    """Return whether a call's log-probs are comparable, and whether its temperature was not 1."""
    if any(call.sampling.get(name, plain) != plain for name, plain in _PLAIN_PENALTIES.items()):
        return False, False
    is_tempered = call.sampling.get("temperature", 1) not in _AT_ONE
    if call.logprob_mode == "raw":
        return True, is_tempered
    is_cut = any(call.sampling.get(name, plain) != plain for name, plain in _PLAIN_CUTS.items())
    if call.logprob_mode == "processed" and is_cut:
        return False, False
    return not is_tempered, is_tempered


# --- many samples --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Row:
    """What the samples of one weight version show."""

    version: int
    relation: str
    """`same` as the engine's; `older`, `newer`, `unknown`: then a difference says nothing."""
    positions: int
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One position where both sides should agree and do not."""

    sample: str
    position: int
    id: int
    version: int
    sampled: float
    scored: float


@dataclass(slots=True)
class Summary:
    """What was found over all samples."""

    samples: int
    """Scored."""
    compared: int
    """Positions that say something."""
    rows: list[Row]
    mode: str
    """`raw` or `temperature`, as the values show; `unknown` where they cannot."""
    mode_why: str
    recorded_modes: list[str]
    not_comparable: dict[str, int]
    """Positions by why they were left out."""
    first: Difference | None
    """The first one above `P99_LIMIT`, in the order of the samples."""
    failed: dict[str, int] = field(default_factory=dict)
    """Samples that could not be scored, by what the engine said."""
    problems: list[str] = field(default_factory=list)


def summarise(
    comparisons: Sequence[Comparison], failed: Mapping[str, int] | None = None
) -> Summary:
    """Return what many comparisons show together, and what of it is a problem."""
    mode, why = _mode(comparisons)
    recorded = sorted({c.recorded_mode for c in comparisons})
    summary = Summary(
        samples=len(comparisons),
        compared=sum(len(c.counted()) for c in comparisons),
        rows=_rows(comparisons),
        mode=mode,
        mode_why=why,
        recorded_modes=recorded,
        not_comparable=_left_out(comparisons),
        first=_first(comparisons),
        failed=dict(failed or {}),
    )
    for row in summary.rows:
        if row.relation == "same" and row.p99 > P99_LIMIT:
            summary.problems.append(
                f"log-probs of version {row.version} differ from the engine's own prefill by "
                f"{row.p99:.4f} at the 99th percentile (limit {P99_LIMIT})"
            )
    if mode != "unknown" and any(_SAME_MODE.get(name, name) != mode for name in recorded):
        summary.problems.append(
            f"samples say that their log-probs are {', '.join(recorded)}, and they are {mode}"
        )
    summary.problems += [f"{count} samples: {text}" for text, count in summary.failed.items()]
    return summary


def _rows(comparisons: Sequence[Comparison]) -> list[Row]:
    found: dict[tuple[int, str], list[Values]] = {}
    for one in comparisons:
        differences = one.differences
        usable = one.is_comparable & ~np.isnan(differences)
        for version in np.unique(one.versions[usable]).tolist():
            key = (version, _relation(version, one.served))
            found.setdefault(key, []).append(differences[usable & (one.versions == version)])
    rows = []
    for (version, relation), parts in sorted(found.items()):
        values = np.concatenate(parts)
        p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
        rows.append(Row(version, relation, len(values), p50, p99, float(values.max())))
    return rows


def _relation(version: int, served: int) -> str:
    if version == UNKNOWN_VERSION or served == UNKNOWN_VERSION:
        return "same" if version == served else "unknown"
    return "same" if version == served else "older" if version < served else "newer"


def _left_out(comparisons: Sequence[Comparison]) -> dict[str, int]:
    left: Counter[str] = Counter()
    for one in comparisons:
        tempered = one.is_tempered & ~one.is_comparable
        left["temperature"] += int(tempered.sum())
        left["penalties or cuts"] += int((~one.is_comparable & ~tempered).sum())
        left["another version"] += int((one.is_comparable & ~one.is_same).sum())
        left["no value"] += int((one.is_comparable & one.is_same & np.isnan(one.scored)).sum())
    return {why: count for why, count in left.items() if count}


def _first(comparisons: Sequence[Comparison]) -> Difference | None:
    for one in comparisons:
        differs = one.is_comparable & one.is_same & (one.differences > P99_LIMIT)
        if differs.any():
            at = int(np.argmax(differs))
            return Difference(
                one.name, int(one.positions[at]), int(one.ids[at]), int(one.versions[at]),
                float(one.sampled[at]), float(one.scored[at]),
            )  # fmt: skip
    return None


def _mode(comparisons: Sequence[Comparison]) -> tuple[str, str]:
    """Return which log-probs the engine gave, told from the values alone, and by what."""
    tempered = _p99(comparisons, is_tempered=True)
    plain = _p99(comparisons, is_tempered=False)
    if tempered is None:
        return "unknown", "at temperature 1 both modes give the same values"
    if tempered <= P99_LIMIT:
        return "raw", "at another temperature they still equal log softmax(logits)"
    if plain is not None and plain <= P99_LIMIT:
        return "temperature", "they equal log softmax(logits) at temperature 1 and at no other"
    return "unknown", "no sample of temperature 1 agrees, so nothing says why the others differ"


def _p99(comparisons: Sequence[Comparison], *, is_tempered: bool) -> float | None:
    parts = []
    for one in comparisons:
        kind = one.is_tempered if is_tempered else (one.is_comparable & ~one.is_tempered)
        values = one.differences[kind & one.is_same]
        parts.append(values[~np.isnan(values)])
    values = np.concatenate(parts) if parts else np.empty(0)
    return float(np.quantile(values, 0.99)) if len(values) else None
