"""What can go wrong at an engine, in one table: how each fault is met, and what it is called.

Owns the closed set of details (metric labels, and `EngineFault.detail`) and the rule of each. Never
talks to an engine. Invariant: every fault of an engine is made by `fault`, so that nothing is ever
retried, ejected or reported other than `RULES` says; docs/engines.md shows the same rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from rollstream.errors import EngineFault


class Detail(StrEnum):
    """What was wrong, as a short label."""

    NO_ENGINE = "no_engine"
    CONNECT = "connect"
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    RESET = "reset"
    ABORT_ERROR = "abort_error"
    NAN = "nan"
    BAD_LOGPROB = "bad_logprob"
    BAD_TOKEN = "bad_token"
    LOGPROB_LENGTH_MISMATCH = "logprob_length_mismatch"
    ID_MISMATCH = "id_mismatch"
    BAD_REPLY = "bad_reply"
    UNKNOWN_FINISH = "unknown_finish"
    PROMPT_MISMATCH = "prompt_mismatch"
    REPLAY_MISMATCH = "replay_mismatch"
    CONTEXT_OVERFLOW = "context_overflow"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of fault is met."""

    when: str
    """What was seen."""
    again: bool
    """The pool tries the same call again, elsewhere where there is another engine."""
    stop_first: bool = False
    """The engine may still be sampling: its rid is aborted before the call is tried again."""
    eject_after: int = 0
    """So many in a row put the engine aside until it answers a probe; 0 is never."""
    retryable: bool = True
    """What the queue is told: another attempt at the whole trajectory may succeed."""


RULES: dict[Detail, Rule] = {
    Detail.NO_ENGINE: Rule("no engine is up", again=True),
    Detail.CONNECT: Rule("refused, unknown host, no connection in time", again=True, eject_after=1),
    Detail.UNAVAILABLE: Rule("HTTP 408, 429, 502, 503, 504", again=True, eject_after=3),
    Detail.SERVER_ERROR: Rule("any other HTTP 5xx", again=True, eject_after=3),
    Detail.TIMEOUT: Rule(
        "no reply within engine.request_timeout_s", again=True, stop_first=True, eject_after=3
    ),
    Detail.RESET: Rule(
        "connection lost, or half a reply", again=True, stop_first=True, eject_after=3
    ),
    Detail.ABORT_ERROR: Rule("abort with a status code", again=True),
    Detail.NAN: Rule("stop with matched 'NaN happened'", again=True),
    Detail.BAD_LOGPROB: Rule("a log-prob is missing, not finite, or above 0", again=True),
    Detail.BAD_TOKEN: Rule("an id outside the vocabulary", again=True),
    Detail.LOGPROB_LENGTH_MISMATCH: Rule(
        "ids, log-probs and completion_tokens are not equally many", again=True
    ),
    Detail.ID_MISMATCH: Rule("a log-prob belongs to another id than output_ids says", again=True),
    Detail.BAD_REPLY: Rule(
        "not JSON, fields missing, version spans with gaps, over 64 MiB, more tokens than were "
        "asked for, or the reply of another request",
        again=True,
    ),
    Detail.UNKNOWN_FINISH: Rule("a finish reason that is not stop, length or abort", again=True),
    Detail.PROMPT_MISMATCH: Rule(
        "prompt_tokens is not the number of ids sent", again=False, retryable=False
    ),
    Detail.REPLAY_MISMATCH: Rule(
        "replay rows are missing where they were asked for, or have other bytes than their shape",
        again=True,
        retryable=False,
    ),
    Detail.CONTEXT_OVERFLOW: Rule(
        "HTTP 4xx that says that prompt or budget exceed the context", again=False, retryable=False
    ),
    Detail.REFUSED: Rule("any other HTTP 3xx or 4xx", again=False, retryable=False),
}

_BUSY = frozenset({408, 429, 502, 503, 504})
_OVERFLOW = re.compile(
    r"context[ _](length|window|size|len)"
    r"|maximum (context|allowed length|input length|sequence length)"
    r"|max_(new_|completion_)?tokens must be (at least|greater|positive)"
    r"|(input|prompt)( length)?( \(?\d+( tokens)?\)?)? is (too long|longer than)",
    re.IGNORECASE,
)
"""Wordings of engines and routers; our own limits are checked before any request is sent."""
MESSAGE_CHARS = 300
"""How much of an engine's error text is kept."""


def fault(detail: Detail, message: str) -> EngineFault:
    """Return the fault of this kind; `retryable` is the table's."""
    return EngineFault(
        message[: 2 * MESSAGE_CHARS], retryable=RULES[detail].retryable, detail=detail.value
    )


def rule_of(error: EngineFault) -> Rule:
    """Return how a fault is met."""
    return RULES[Detail(error.detail)]


def detail_of_status(status: int, message: str) -> Detail:
    """Return what an HTTP status other than 200 means; the text decides only about overflow."""
    if status in _BUSY:
        return Detail.UNAVAILABLE
    if status >= 500:
        return Detail.SERVER_ERROR
    return Detail.CONTEXT_OVERFLOW if _OVERFLOW.search(message) else Detail.REFUSED
