"""The clock of spans: one that never jumps, whatever becomes of the wall clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollstream.sample import Span
from worker.generate.agent_time import record_gaps
from worker.telemetry import spans as module
from worker.telemetry.spans import NoSpans, SpanList, timed


class Clocks:
    """Both clocks of the module, moved by hand."""

    def __init__(self) -> None:
        self.mono_s, self.ahead_s = 100.0, 1e9
        self.lost_s = 0.0
        """Of the next look at the wall clock: how long the thread waits for its core behind it."""

    def monotonic(self) -> float:
        return self.mono_s

    def time(self) -> float:
        now = self.mono_s + self.ahead_s
        self.mono_s += self.lost_s
        self.lost_s = 0.0
        return now


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(module, "monotonic", clocks.monotonic)
    monkeypatch.setattr(module, "time", clocks.time)
    monkeypatch.setattr(module, "_WALL", module._Wall())
    return clocks


def spent(spans: SpanList, clocks: Clocks, name: str, seconds: float) -> None:
    start_mono_s = clocks.mono_s
    clocks.mono_s += seconds
    assert spans.ended(name, 0, start_mono_s) == pytest.approx(seconds)


def test_a_span_begins_by_the_wall_clock(clocks: Clocks) -> None:
    spans = SpanList()
    spent(spans, clocks, "generate", 2.5)
    assert spans.spans == [Span("generate", 0, 1e9 + 100.0, 2.5)]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_wall_clock_that_is_set_moves_no_span_of_the_attempt_and_all_of_the_next(
    clocks: Clocks, step_s: float
) -> None:
    spans = SpanList()
    spent(spans, clocks, "generate", 2.0)
    clocks.ahead_s += step_s
    spent(spans, clocks, "tool", 1.0)
    first, second = spans.spans
    assert second.start_unix_s == first.start_unix_s + first.duration_s
    assert second.duration_s == 1.0

    following = SpanList()
    spent(following, clocks, "generate", 1.0)
    assert following.spans[0].start_unix_s == 1e9 + step_s + 103.0


def test_a_thread_that_lost_its_core_between_the_clocks_takes_no_wrong_offset(
    clocks: Clocks,
) -> None:
    clocks.lost_s = 0.5
    spent(first := SpanList(), clocks, "generate", 1.0)
    assert first.spans[0].start_unix_s == 1e9 + 100.5
    clocks.lost_s = 0.5
    spent(second := SpanList(), clocks, "generate", 1.0)
    assert second.spans[0].start_unix_s == 1e9 + 102.0


@pytest.mark.parametrize("step_s", [0.0, 7200.0, -7200.0])
def test_gaps_between_calls_are_found_though_the_wall_clock_was_set(
    clocks: Clocks, step_s: float
) -> None:
    spans, start_mono_s = SpanList(), clocks.mono_s
    start_unix_s = spans.unix_s(start_mono_s)
    spent(spans, clocks, "generate", 1.0)
    clocks.ahead_s += step_s
    clocks.mono_s += 4.0
    spent(spans, clocks, "generate", 1.0)
    outside_s = record_gaps(spans, start_unix_s, clocks.mono_s - start_mono_s)
    assert outside_s == pytest.approx(4.0)
    assert [span.name for span in spans.spans] == ["generate", "generate", "tool"]


def test_what_ended_a_part_is_the_outcome_of_its_span() -> None:
    spans, start_mono_s = SpanList(), time.monotonic()
    for error in (None, KeyError("x"), asyncio.CancelledError(), GeneratorExit()):
        spans.ended("tool", 3, start_mono_s, error)
    assert [span.outcome for span in spans.spans] == ["ok", "error", "cancelled", "cancelled"]


def test_a_span_that_was_timed_is_like_one_that_was_made() -> None:
    spans = SpanList()
    with timed(spans, "merge"):
        pass
    (span,) = spans.spans
    made = Span("merge", -1, span.start_unix_s, span.duration_s, "ok")
    assert type(span) is Span
    assert (span, repr(span)) == (made, repr(made))


def test_an_evaluation_is_told_its_seconds_and_keeps_no_span(clocks: Clocks) -> None:
    spans, start_mono_s = NoSpans(), clocks.mono_s
    clocks.mono_s += 3.0
    assert spans.ended("tool", 0, start_mono_s) == 3.0
    assert spans.unix_s(start_mono_s) == 1e9 + 100.0
    assert spans.spans == []
