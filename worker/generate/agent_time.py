"""Where the time of an agent went: in calls of the model, or in the agent itself.

Owns the spans between calls. Never measures: sessions record their calls, and what lies between
them was the agent's own. Invariant: spans of calls and gaps together cover the agent's time once,
however many calls ran side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..types import SpanRecorder


def record_gaps(
    spans: SpanRecorder, start_unix_s: float, spent_s: float, outcome: str = "ok"
) -> float:
    """Record a `tool` span for each stretch in which no call ran, and return their sum.

    Args:
        spans: of the trajectory; what was recorded before `start_unix_s` does not count.
        start_unix_s: when the agent began.
        spent_s: until it ended.
        outcome: of the last stretch, where the agent ended itself.

    Unit: seconds.
    """
    gaps = list(_gaps(spans, start_unix_s, start_unix_s + spent_s))
    end = start_unix_s + spent_s
    for turn, start, seconds in gaps:
        is_last = start + seconds >= end
        spans.record("tool", turn, start, seconds, outcome if is_last else "ok")
    return sum(seconds for _, _, seconds in gaps)


def _gaps(spans: SpanRecorder, start: float, end: float) -> Iterator[tuple[int, float, float]]:
    """Yield (the turn before it or -1, start, seconds)."""
    calls = sorted(
        (span.start_unix_s, span.start_unix_s + span.duration_s, span.turn)
        for span in spans.spans
        if span.name == "generate" and span.start_unix_s >= start
    )
    behind, turn = start, -1
    for begun, ended, of_turn in [*calls, (end, end, -1)]:
        if begun > behind:
            yield turn, behind, begun - behind
        if ended >= behind:
            behind, turn = ended, of_turn
