"""One reply with one thing wrong: the frame before it is written in a protocol's words.

Owns what each kind of damage does to a reply. Knows no protocol and no clock, and draws nothing:
what is spoilt, and where, is a function of the reply. Invariant: exactly one thing is wrong with a
spoilt frame, so that a client that believes it has failed at that one check (two pass every check:
`SPANS_WRONG` is for the auditor of the log-probs, `LOGPROBS_WRONG` for whoever scores again).

Axes: P prompt ids, C ids of one reply, L fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .faults import Fault
from .flight import End

NAN_MARK = -123456.5
"""Stands for NaN until the bytes are there: JSON has no word for it, Python's own writer has."""
LOWEST = -9999.0
"""What vLLM says where it has no evidence."""
WRONG_BY = 0.75
"""Nats that each log-prob of a lie is too low: more than decode and prefill ever differ by."""
UNKNOWN_FINISH = "interrupted"
MISPLACED_ID = 17

OVERFLOW_WORDS: tuple[str, ...] = (
    "The input (70 tokens) is longer than the model's context length (64 tokens).",
    "Requested token count exceeds the model's maximum context length of 64 tokens.",
    "The decoder prompt (length 70) is longer than the maximum model length of 64.",
    "This model's maximum context length is 64 tokens. However, your prompt contains more.",
    "This endpoint's maximum context length is 64 tokens",
    "Input length (70) exceeds model's maximum context length (64)",
    "max_tokens must be at least 1",
)
"""How servers and routers say that something does not fit; the fault takes them in turn."""
STATUS_WORDS: Mapping[Fault, str] = {
    Fault.UNAVAILABLE: "the simulated engine is overloaded on purpose",
    Fault.HTTP_400: "Unexpected message role",
    Fault.HTTP_404: "Not Found",
    Fault.HTTP_408: "Request Timeout",
    Fault.HTTP_429: "Too many requests",
    Fault.HTTP_500: "Internal server error",
    Fault.QUEUE_FULL: "The request queue is full.",
}


@dataclass(slots=True)
class Frame:
    """What a reply says, whatever the protocol."""

    rid: str
    ids: list[int]
    log_probs: list[Any] | None
    """[C]; None leaves the list out."""
    log_prob_ids: list[int]
    """[C] which id each log-prob is of."""
    end: End | None
    """None leaves the finish reason out."""
    num_prompt: int | None
    num_said: int | None
    spans: list[dict[str, Any]] | None
    version: str | None
    experts: npt.NDArray[np.int32] | None
    """[rows, layers, top_k]"""


def spoil(frame: Frame, fault: Fault, *, vocabulary_size: int, limit: int) -> None:
    """Make one thing of a frame wrong.

    Args:
        frame: is changed.
        fault: one that is no damage to a frame changes nothing.
        vocabulary_size: ids from here on do not exist.
        limit: how many tokens were permitted.
    """
    if fault is Fault.BAD_TOKEN:
        _set_id(frame, vocabulary_size)
    elif fault is Fault.TOO_MANY:
        extra = limit + 1 - len(frame.ids)
        frame.ids += [MISPLACED_ID] * extra
        frame.log_prob_ids += [MISPLACED_ID] * extra
        frame.log_probs = [*(frame.log_probs or ()), *([-0.5] * extra)]
        frame.num_said = len(frame.ids)
        if frame.spans:
            frame.spans[-1]["end"] = len(frame.ids)
    else:
        damage = _DAMAGE.get(fault)
        if damage is not None:
            damage(frame)


def cut_to(frame: Frame, num: int) -> None:
    """Leave what an event says of a reply whose first so many tokens are there."""
    frame.ids, frame.log_prob_ids = frame.ids[:num], frame.log_prob_ids[:num]
    if frame.log_probs is not None:
        frame.log_probs = frame.log_probs[:num]
    frame.end = frame.spans = frame.experts = None
    frame.num_said = num


def mark_nan(raw: bytes) -> bytes:
    """Return a body with the word NaN where its mark is."""
    return raw.replace(str(NAN_MARK).encode(), b"NaN")


def not_json(raw: bytes) -> bytes:
    """Return a body that no parser takes."""
    return raw[:-1] + b",,"


def _set_id(frame: Frame, token: int) -> None:
    at = len(frame.ids) // 2
    frame.ids[at] = frame.log_prob_ids[at] = token


def _set_log_prob(frame: Frame, value: float | None) -> None:
    if frame.log_probs:
        frame.log_probs[len(frame.log_probs) // 2] = value


def _wrong_log_probs(frame: Frame) -> None:
    """Say what these weights never said: a prefill of the same ids has other log-probs."""
    frame.log_probs = [value - WRONG_BY for value in frame.log_probs or ()]


def _no_log_probs(frame: Frame) -> None:
    frame.log_probs = None


def _short_log_probs(frame: Frame) -> None:
    frame.log_probs = (frame.log_probs or [])[:-1]
    del frame.log_prob_ids[-1:]


def _long_log_probs(frame: Frame) -> None:
    frame.log_probs = [*(frame.log_probs or ()), -0.5]
    frame.log_prob_ids.append(MISPLACED_ID)


def _other_ids(frame: Frame) -> None:
    at = len(frame.ids) // 2
    frame.log_prob_ids[at] = MISPLACED_ID if frame.ids[at] != MISPLACED_ID else MISPLACED_ID + 1


def _no_finish(frame: Frame) -> None:
    frame.end = None


def _unknown_finish(frame: Frame) -> None:
    frame.end = End(UNKNOWN_FINISH)


def _empty_abort(frame: Frame) -> None:
    """Leave the id and the finish reason, as of a request that was aborted before it began."""
    frame.end = End("abort", message="Abort in waiting queue", queued=True)
    frame.ids, frame.log_prob_ids, frame.log_probs = [], [], None
    frame.num_prompt = frame.num_said = frame.spans = frame.experts = None


def _wrong_count(frame: Frame) -> None:
    frame.num_said = (frame.num_said or 0) + 8


def _cut_prompt(frame: Frame) -> None:
    frame.num_prompt = max(0, (frame.num_prompt or 0) - 8)


def _other_rid(frame: Frame) -> None:
    frame.rid = "f" * 32 if frame.rid != "f" * 32 else "e" * 32


def _split_spans(frame: Frame, first_end: int, second_start: int) -> None:
    num, version = len(frame.ids), frame.version or "default"
    frame.spans = [
        {"version": version, "start": 0, "end": first_end},
        {"version": version, "start": second_start, "end": num},
    ]


def _gap(frame: Frame) -> None:
    half = len(frame.ids) // 2
    _split_spans(frame, half, half + 1)


def _overlap(frame: Frame) -> None:
    half = len(frame.ids) // 2
    _split_spans(frame, half + 1, half)


def _short_spans(frame: Frame) -> None:
    version = frame.version or "default"
    frame.spans = [{"version": version, "start": 0, "end": len(frame.ids) - 1}]


def _wrong_spans(frame: Frame) -> None:
    """Name other weights than those that sampled: no client can tell, an auditor must."""

    def other(label: str) -> str:
        return str(int(label) + 1) if label.isdigit() else "0"

    frame.spans = [span | {"version": other(span["version"])} for span in frame.spans or ()]
    frame.version = other(frame.version or "")


def _no_version(frame: Frame) -> None:
    frame.spans = frame.version = None


def _no_experts(frame: Frame) -> None:
    frame.experts = None


def _short_experts(frame: Frame) -> None:
    if frame.experts is not None:
        frame.experts = frame.experts[:-1]


def _garbage_experts(frame: Frame) -> None:
    """Leave rows of another shape: one layer too few."""
    if frame.experts is not None:
        frame.experts = np.ascontiguousarray(frame.experts[:, :-1])


_DAMAGE: Mapping[Fault, Callable[[Frame], None]] = {
    Fault.ABORT_EMPTY: _empty_abort,
    Fault.NO_FINISH: _no_finish,
    Fault.UNKNOWN_FINISH: _unknown_finish,
    Fault.LOGPROBS_MISSING: _no_log_probs,
    Fault.LOGPROBS_SHORT: _short_log_probs,
    Fault.LOGPROBS_LONG: _long_log_probs,
    Fault.LOGPROB_NULL: lambda frame: _set_log_prob(frame, None),
    Fault.LOGPROB_POSITIVE: lambda frame: _set_log_prob(frame, 0.5),
    Fault.LOGPROB_NAN: lambda frame: _set_log_prob(frame, NAN_MARK),
    Fault.LOGPROB_LOWEST: lambda frame: _set_log_prob(frame, LOWEST),
    Fault.LOGPROBS_WRONG: _wrong_log_probs,
    Fault.OTHER_IDS: _other_ids,
    Fault.NEGATIVE_TOKEN: lambda frame: _set_id(frame, -1),
    Fault.COMPLETION_TOKENS: _wrong_count,
    Fault.PROMPT_CUT: _cut_prompt,
    Fault.OTHER_RID: _other_rid,
    Fault.SPANS_GAP: _gap,
    Fault.SPANS_OVERLAP: _overlap,
    Fault.SPANS_SHORT: _short_spans,
    Fault.SPANS_WRONG: _wrong_spans,
    Fault.NO_VERSION: _no_version,
    Fault.EXPERTS_MISSING: _no_experts,
    Fault.EXPERTS_SHORT: _short_experts,
    Fault.EXPERTS_GARBAGE: _garbage_experts,
}
