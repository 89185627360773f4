"""What a sample must be, held against what went over HTTP and what a teacher says.

Owns the comparisons and their sentences. Never reads a file, never runs a model, and takes nothing
that the sample says of itself for granted. Invariant: a difference anywhere is a `Finding`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.sample import Call, Sample, TokenIds
from tests.e2e.fidelity import tools
from tests.e2e.fidelity.wire import WireCall

Decode = Callable[[Sequence[int]], str]
Find = Callable[[str], WireCall | None]

_TRAILING = ("response_length", "context_length", "abort_weights")
"""Endings between an observation and the call that would have read it."""
_OBSERVED = re.compile(
    r"(<\|im_end\|>)?\n<\|im_start\|>user\n"
    r"(<tool_response>\n.*\n</tool_response>)<\|im_end\|>\n<\|im_start\|>assistant\n",
    re.DOTALL,
)
_BETWEEN = "\n</tool_response>\n<tool_response>\n"


class Kind(StrEnum):
    """What kind of promise a finding breaks."""

    PREFIX = "prefix"
    """What the engine was sent is no prefix of the sample."""
    NO_WIRE = "no_wire"
    """A call without its request and reply."""
    SAMPLED = "sampled"
    """Ids of a call that are not those of its reply."""
    LOG_PROB = "log_prob"
    """Log-probs that are not, bit for bit, those of the reply; or not 0.0 where nothing was
    sampled."""
    MASK = "mask"
    CALLS = "calls"
    """Calls out of order, or their parameters or versions are not those of the wire."""
    OBSERVED = "observed"
    """What stands between two calls is not what the tools gave."""
    MERGE = "merge"
    """Assembling the recorded turns gives something else."""
    DISTRIBUTION = "distribution"
    """The teacher says another log-prob."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference."""

    kind: Kind
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.text}"


def check_sample(sample: Sample, find: Find, decode: Decode) -> list[Finding]:
    """Compare a sample with its requests and replies, and its observations with its tools."""
    where = f"sample {sample.group_index}:{sample.member}"
    findings: list[Finding] = []

    def say(kind: Kind, text: str) -> None:
        findings.append(Finding(kind, where, text))

    if not sample.calls:
        say(Kind.CALLS, "no call")
    at = sample.prompt_length
    for number, call in enumerate(sample.calls):
        if call.start < at or call.end < call.start or (number == 0 and call.start != at):
            say(Kind.CALLS, f"call {number} covers {call.start}..{call.end} behind {at}")
        at = call.end
        wire = find(call.rid)
        if wire is None:
            say(Kind.NO_WIRE, f"call {number} ({call.rid}) is not on the wire")
            continue
        for kind, text in _against_wire(sample, number, call, wire):
            say(kind, text)
    for kind, text in (*_marks(sample), *_observations(sample, decode)):
        say(kind, text)
    return findings


def _against_wire(
    sample: Sample, number: int, call: Call, wire: WireCall
) -> list[tuple[Kind, str]]:
    found: list[tuple[Kind, str]] = []
    sent, held = wire.input_ids, sample.tokens[: call.start]
    if not np.array_equal(sent, held):
        text = f"call {number} was sent {len(sent)} ids, the sample has {len(held)} before it; "
        found.append((Kind.PREFIX, text + _first_difference(sent, held)))
    if wire.prompt_tokens is not None and wire.prompt_tokens != len(sent):
        found.append((Kind.PREFIX, f"call {number}: the engine saw {wire.prompt_tokens} ids"))
    ids = sample.tokens[call.start : call.end]
    if not np.array_equal(ids, wire.output_ids):
        found.append((Kind.SAMPLED, f"call {number}: {_first_difference(wire.output_ids, ids)}"))
    first = call.start - sample.prompt_length
    log_probs = sample.rollout_log_probs
    mine = None if log_probs is None else log_probs[first : first + len(wire.log_probs)]
    if mine is None or mine.tobytes() != wire.log_probs.tobytes():
        found.append((Kind.LOG_PROB, f"call {number}: not the bits that the engine sent"))
    if call.finish != wire.finish:
        found.append((Kind.CALLS, f"call {number}: finish {call.finish}, sent {wire.finish}"))
    spans = [(v, call.start + a, call.start + b) for v, a, b in wire.versions]
    if [span for span in call.versions if span[1] < span[2]] != [s for s in spans if s[1] < s[2]]:
        found.append((Kind.CALLS, f"call {number}: versions {call.versions}, sent {spans}"))
    found += [
        (Kind.CALLS, f"call {number}: {t}") for t in _parameters(call.sampling, wire.sampling)
    ]
    return found


_NAMES = {"temperature": "temperature", "max_new_tokens": "max_new_tokens",
          "seed": "sampling_seed", "top_p": "top_p"}  # fmt: skip


def _parameters(recorded: Mapping[str, Any], sent: Mapping[str, Any]) -> list[str]:
    return [
        f"{ours} {recorded.get(ours)} recorded, {theirs} {sent.get(theirs)} sent"
        for ours, theirs in _NAMES.items()
        if recorded.get(ours) != sent.get(theirs, 1.0 if theirs == "top_p" else None)
    ]


def _marks(sample: Sample) -> list[tuple[Kind, str]]:
    """Compare mask and log-probs with what the calls cover."""
    covered = np.zeros(sample.response_length, dtype=np.uint8)
    for call in sample.calls:
        covered[call.start - sample.prompt_length : call.end - sample.prompt_length] = 1
    found = []
    if sample.loss_mask is None or not np.array_equal(sample.loss_mask, covered):
        found.append((Kind.MASK, "the loss mask is not 1 exactly where a call covers"))
    log_probs = sample.rollout_log_probs
    if log_probs is None or len(log_probs) != len(covered):
        found.append((Kind.LOG_PROB, "not a log-prob for every response token"))
    elif (log_probs[covered == 0] != 0.0).any():
        found.append((Kind.LOG_PROB, "a log-prob where nothing was sampled"))
    return found


def _observations(sample: Sample, decode: Decode) -> list[tuple[Kind, str]]:
    """Compare what stands between calls with what the tools give for the calls before it."""
    found = []
    told: dict[int, list[Mapping[str, Any]]] = {}
    for call in sample.metadata.get("tool_calls", ()):
        told.setdefault(call["turn"], []).append(call)
    turn = -1
    ends = [call.start for call in sample.calls[1:]] + [len(sample.tokens)]
    for call, following in zip(sample.calls, ends, strict=True):
        if call.finish != "abort":
            turn += 1
        is_last = following == len(sample.tokens)
        if following == call.end:
            if call.finish != "abort" and not is_last:
                found.append((Kind.OBSERVED, f"nothing between turn {turn} and the next"))
            continue
        if is_last and sample.stop_reason not in _TRAILING:
            found.append(
                (Kind.OBSERVED, f"ids behind the last call, ended by {sample.stop_reason}")
            )
        text = decode(sample.tokens[call.end : following].tolist())
        problem = _observed(text, told.get(turn, []))
        if problem:
            found.append((Kind.OBSERVED, f"behind turn {turn}: {problem}"))
    return found


def _observed(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    whole = _OBSERVED.fullmatch(text)
    if whole is None:
        return f"no tool results in {text!r}"
    inner = whole[2].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    results = inner.split(_BETWEEN)
    if len(results) != len(calls):
        return f"{len(results)} results of {len(calls)} calls"
    for call, result in zip(calls, results, strict=True):
        expected = expected_result(call)
        if expected is None and re.fullmatch(r"-?\d+", result):
            return f"{call['name']}({call['arguments']}) cannot be called, but gave {result}"
        if expected is not None and expected != result:
            return f"{call['name']}({call['arguments']}) gave {result!r}, expected {expected!r}"
    return ""


def expected_result(call: Mapping[str, Any]) -> str | None:
    """Return what a recorded call gives, None where it cannot be called."""
    if call["name"] not in ("add", "sub") or not call["executed"]:
        return None
    try:
        given = json.loads(call["arguments"])
    except ValueError:
        return None  # recorded cut: too long
    if set(given) not in ({"a"}, {"a", "b"}) or any(type(v) is not int for v in given.values()):
        return None
    second = given.get("b", 0)
    return str(tools.add(given["a"], second if call["name"] == "add" else -second))


@dataclass(frozen=True, slots=True)
class Distance:
    """How far recorded log-probs are from the teacher's."""

    checked: int
    largest: float
    findings: list[Finding]


def check_log_probs(
    sample: Sample,
    positions: npt.NDArray[np.int64],
    expected: npt.NDArray[np.float64],
    tolerance: float,
) -> Distance:
    """Compare the log-prob of every sampled token with the teacher's.

    Args:
        sample: as the trainer got it.
        positions: [K] of its sampled tokens.
        expected: [K]; NaN where the token's version is of no model.
        tolerance: what float32 may make of two ways to the same number.
    """
    where = f"sample {sample.group_index}:{sample.member}"
    assert sample.rollout_log_probs is not None
    recorded = sample.rollout_log_probs[positions - sample.prompt_length].astype(np.float64)
    distance = np.abs(recorded - expected)
    bad = np.flatnonzero(~(distance <= tolerance))  # NaN is bad
    findings = []
    if len(bad):
        at = int(bad[0])
        findings.append(
            Finding(
                Kind.DISTRIBUTION,
                where,
                f"{len(bad)} of {len(positions)} sampled tokens, first at {positions[at]} "
                f"(id {sample.tokens[positions[at]]}): the trainer gets {recorded[at]:.6f}, "
                f"the model says {expected[at]:.6f}",
            )
        )
    known = distance[~np.isnan(distance)]
    return Distance(len(positions), float(known.max()) if len(known) else 0.0, findings)


def _first_difference(sent: TokenIds, held: TokenIds) -> str:
    count = min(len(sent), len(held))
    differs = np.flatnonzero(sent[:count] != held[:count])
    if not len(differs):
        return f"one ends at {count}"
    at = int(differs[0])
    return f"first at {at}: {sent[at]} on the wire, {held[at]} in the sample"
