"""Spans of one trajectory: how long each part took, on success, error and cancellation alike.

Owns the recorder that generate functions get. Never measures by itself beyond `timed`, never
exports. Invariant: a span is recorded exactly once, when its part ended, however it ended.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from rollstream.sample import Span

from ..types import SpanRecorder

SPAN_NAMES = (
    "queue_wait",
    "generate",
    "tool",
    "reward",
    "merge",
    "submit",
    "group_wait",
    "ready_wait",
)
"""Every span there is; also the label values of the span histogram."""


class SpanList:
    """Keeps the spans of one trajectory."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Add one span."""
        self._spans.append(Span(name, turn, start_unix_s, duration_s, outcome))

    @property
    def spans(self) -> list[Span]:
        """What was recorded, in order."""
        return self._spans


class NoSpans:
    """Records nothing (evaluation)."""

    __slots__ = ()

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Do nothing."""

    @property
    def spans(self) -> list[Span]:
        """Always empty."""
        return []


class timed:  # noqa: N801 - it reads as a statement: `with timed(spans, "tool"):`
    """Record how long the block took, and whether it ended well, broke or was cancelled."""

    __slots__ = ("_name", "_recorder", "_start", "_turn", "_wall")

    def __init__(self, recorder: SpanRecorder, name: str, turn: int = -1) -> None:
        self._recorder, self._name, self._turn = recorder, name, turn

    def __enter__(self) -> None:
        self._wall, self._start = time.time(), time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcome = "ok"
        if kind is not None:
            cancelled = issubclass(kind, (asyncio.CancelledError, GeneratorExit))
            outcome = "cancelled" if cancelled else "error"
        seconds = time.monotonic() - self._start
        self._recorder.record(self._name, self._turn, self._wall, seconds, outcome)
