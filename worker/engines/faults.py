"""What can go wrong at an engine, in one table: how each fault is met, and what it is called.

Owns the closed set of details (metric labels, and `EngineFault.detail`), the rule of each, and
which reply, of whatever protocol, is which. Never talks to an engine. Invariant: every fault of an
engine is made by `fault`, so that nothing is ever retried, ejected or reported other than `RULES`
says, and every reply has exactly one action; docs/engines.md shows the same rows.
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


class Action(StrEnum):
    """What becomes of a call whose reply is not simply believed."""

    RETRY = "retry"
    """No reply, or one that says itself that it is none: the same call again, elsewhere where there
    is another engine; then the queue may give the whole trajectory to another worker."""
    RESUME = "resume"
    """Stopped by request: its tokens are real and kept, and sampling goes on from them; without
    partial rollout the trajectory begins anew."""
    REFUSE = "refuse"
    """The same request would get the same answer: nobody sends it again."""
    FAULT = "fault"
    """A reply that contradicts itself, its request, or what can be: its tokens are discarded and
    never trained, and another engine is asked."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of fault is met."""

    when: str
    """What was seen."""
    action: Action
    stop_first: bool = False
    """Somebody may still be sampling, maybe behind a router that gave up: the rid is aborted before
    the call is tried again, and when it is not."""
    eject_after: int = 0
    """So many in a row put the engine aside until it answers a probe; 0 is never."""
    retryable: bool = True
    """What the queue is told: another attempt at the whole trajectory may succeed."""

    @property
    def again(self) -> bool:
        """Whether the pool tries the same call again."""
        return self.action is not Action.REFUSE


RULES: dict[Detail, Rule] = {
    Detail.NO_ENGINE: Rule("no engine is up", Action.RETRY),
    Detail.CONNECT: Rule(
        "refused, unknown host, no connection in time", Action.RETRY, eject_after=1
    ),
    Detail.UNAVAILABLE: Rule(
        "HTTP 408, 429, 502, 503, 504", Action.RETRY, stop_first=True, eject_after=3
    ),
    Detail.SERVER_ERROR: Rule("any other HTTP 5xx", Action.RETRY, stop_first=True, eject_after=3),
    Detail.TIMEOUT: Rule(
        "no reply within engine.request_timeout_s", Action.RETRY, stop_first=True, eject_after=3
    ),
    Detail.RESET: Rule(
        "connection lost, or half a reply", Action.RETRY, stop_first=True, eject_after=3
    ),
    Detail.ABORT_ERROR: Rule("abort with a status code that is none of 4xx", Action.RETRY),
    Detail.NAN: Rule("stop with matched 'NaN happened'", Action.FAULT),
    Detail.BAD_LOGPROB: Rule("a log-prob is missing, not finite, or above 0", Action.FAULT),
    Detail.BAD_TOKEN: Rule("an id outside the vocabulary", Action.FAULT),
    Detail.LOGPROB_LENGTH_MISMATCH: Rule(
        "ids, log-probs and completion_tokens are not equally many", Action.FAULT
    ),
    Detail.ID_MISMATCH: Rule("a log-prob belongs to another id than output_ids says", Action.FAULT),
    Detail.BAD_REPLY: Rule(
        "not JSON, fields missing, version spans with gaps, over 64 MiB, more tokens than were "
        "asked for, or the reply of another request",
        Action.FAULT,
        stop_first=True,
    ),
    Detail.UNKNOWN_FINISH: Rule("a finish reason that is not stop, length or abort", Action.FAULT),
    Detail.PROMPT_MISMATCH: Rule(
        "prompt_tokens is not the number of ids sent", Action.REFUSE, retryable=False
    ),
    Detail.REPLAY_MISMATCH: Rule(
        "replay rows are missing where they were asked for, or have other bytes than their shape",
        Action.FAULT,
        retryable=False,
    ),
    Detail.CONTEXT_OVERFLOW: Rule(
        "HTTP 4xx that says that prompt or budget exceed the context",
        Action.REFUSE,
        retryable=False,
    ),
    Detail.REFUSED: Rule("any other HTTP 3xx or 4xx", Action.REFUSE, retryable=False),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that may come back from an engine in place of a reply to believe."""

    reply: str
    detail: Detail | None
    """None: it is believed as far as it goes, and resumed."""

    @property
    def action(self) -> Action:
        """The one action of this reply."""
        return Action.RESUME if self.detail is None else RULES[self.detail].action


REPLIES: dict[str, Seen] = {
    # malformed
    "not_json": Seen(
        "no JSON, or JSON of another shape; in a stream, a line that is none of an event",
        Detail.BAD_REPLY,
    ),
    "error_200": Seen(
        "HTTP 200 with an error in place of a reply; in a stream, an error without a status code",
        Detail.BAD_REPLY,
    ),
    "too_large": Seen("a body beyond the largest reply that there can be", Detail.BAD_REPLY),
    "logprob_nan": Seen("NaN or Infinity, which are no JSON", Detail.BAD_REPLY),
    # partial
    "half_body": Seen("the body ends before its announced length", Detail.RESET),
    "stream_cut": Seen("a stream that ends before its `[DONE]`", Detail.RESET),
    "reset": Seen("the connection is closed in place of a reply", Detail.RESET),
    "hang": Seen("nothing within the call's time", Detail.TIMEOUT),
    "abort_late": Seen("an abort that this client asked for, its time being up", Detail.TIMEOUT),
    "abort": Seen("an abort without a status code, with tokens", None),
    "abort_empty": Seen("an abort without a status code, without any other field", None),
    "logprobs_missing": Seen("ids without log-probs", Detail.LOGPROB_LENGTH_MISMATCH),
    "logprobs_short": Seen("fewer log-probs than ids", Detail.LOGPROB_LENGTH_MISMATCH),
    "logprob_null": Seen("a log-prob that is null", Detail.BAD_LOGPROB),
    "experts_missing": Seen("no replay rows, though asked for", Detail.REPLAY_MISMATCH),
    # contradictory
    "logprobs_long": Seen("more log-probs than ids", Detail.LOGPROB_LENGTH_MISMATCH),
    "completion_tokens": Seen(
        "a count of sampled tokens that is another than the ids'", Detail.LOGPROB_LENGTH_MISMATCH
    ),
    "other_ids": Seen("log-probs of other ids", Detail.ID_MISMATCH),
    "unnamed_ids": Seen("log-probs that do not say of which ids they are", Detail.ID_MISMATCH),
    "other_rid": Seen("the reply to another request", Detail.BAD_REPLY),
    "prompt_cut": Seen("another number of prompt tokens than was sent", Detail.PROMPT_MISMATCH),
    "stream_changes": Seen(
        "a stream whose ids shrink or change from one event to the next", Detail.BAD_REPLY
    ),
    "stream_goes_on": Seen("an event behind the last one of a reply", Detail.BAD_REPLY),
    "choices": Seen("no choice, or several, where one was asked for", Detail.BAD_REPLY),
    "spans_gap": Seen("version spans with a gap", Detail.BAD_REPLY),
    "spans_overlap": Seen("version spans that overlap", Detail.BAD_REPLY),
    "spans_short": Seen("version spans that end before or behind the ids", Detail.BAD_REPLY),
    "experts_short": Seen("replay rows of another number or shape", Detail.REPLAY_MISMATCH),
    "experts_garbage": Seen("replay rows that are no array of numbers", Detail.REPLAY_MISMATCH),
    # impossible
    "no_finish": Seen("no finish reason", Detail.UNKNOWN_FINISH),
    "unknown_finish": Seen("a finish reason of another name", Detail.UNKNOWN_FINISH),
    "nan": Seen("a stop because sampling met NaN", Detail.NAN),
    "abort_code": Seen("an abort with any other status code", Detail.ABORT_ERROR),
    "abort_429": Seen("an abort with the status code 408 or 429", Detail.UNAVAILABLE),
    "abort_400": Seen(
        "an abort with another status code of 4xx, without a word of the context", Detail.REFUSED
    ),
    "logprob_positive": Seen("a log-prob above 0", Detail.BAD_LOGPROB),
    "logprob_lowest": Seen(
        "a log-prob of -9999 (vLLM's word for none) or below", Detail.BAD_LOGPROB
    ),
    "bad_token": Seen("an id beyond the vocabulary", Detail.BAD_TOKEN),
    "negative_token": Seen("an id below 0", Detail.BAD_TOKEN),
    "too_many": Seen("more tokens than were permitted", Detail.BAD_REPLY),
    "empty_length": Seen("a finish reason of `length` without a token", Detail.BAD_REPLY),
    # an HTTP status
    "400": Seen("HTTP 3xx or 4xx without a word of the context", Detail.REFUSED),
    "overflow": Seen(
        "HTTP 4xx, or an abort with such a code, that speaks of the context's length",
        Detail.CONTEXT_OVERFLOW,
    ),
    "503": Seen("HTTP 408, 429, 502, 503, 504", Detail.UNAVAILABLE),
    "500": Seen("any other HTTP 5xx", Detail.SERVER_ERROR),
    # no connection
    "connect": Seen("no connection", Detail.CONNECT),
    "no_engine": Seen("no engine that takes calls", Detail.NO_ENGINE),
}
"""Every malformed, partial, contradictory or impossible reply, in either protocol. The names are
those of the simulated engine's faults where it has one."""

_BUSY = frozenset({408, 429, 502, 503, 504})
_OVERFLOW = re.compile(
    r"context[ _](length|window|size|len)|max_(model_len|total_tokens)"
    r"|maximum (context|model length|allowed length|input length|sequence length)"
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
    return Detail.CONTEXT_OVERFLOW if says_overflow(message) else Detail.REFUSED


def says_overflow(message: str) -> bool:
    """Return whether an error speaks of the context's length."""
    return _OVERFLOW.search(message) is not None
