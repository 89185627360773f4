"""Spans of one trajectory: how long each part took, on success, error and cancellation alike.

Owns the recorder that generate functions get. Never measures by itself beyond `timed`, never
exports. Invariant: a span is recorded exactly once, when its part ended, however it ended.
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from types import TracebackType

import msgspec

from rollstream.sample import Span

from ..types import SpanRecorder


class SpanList:
    """Keeps the spans of one trajectory."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """What was recorded, in order."""

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Add one span."""
        self.spans.append(Span(name, turn, start_unix_s, duration_s, outcome))


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


class timed(msgspec.Struct, gc=False):  # noqa: N801 - it reads: `with timed(spans, "tool"):`
    """Record how long the block took, and whether it ended well, broke or was cancelled.

    A Struct, because a turn makes two of them: a class of Python's own takes twice as long to make.
    """

    recorder: SpanRecorder
    name: str
    turn: int = -1
    start_mono_s: float = msgspec.field(default_factory=monotonic)
    """When it was made, which is where its block begins."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = monotonic() - self.start_mono_s
        outcome = "ok" if kind is None else _outcome_of(kind)
        # As `record` does, which is a fifth of the time.
        self.recorder.spans.append(Span(self.name, self.turn, time() - seconds, seconds, outcome))


def _outcome_of(kind: type[BaseException]) -> str:
    cancelled = issubclass(kind, (asyncio.CancelledError, GeneratorExit))
    return "cancelled" if cancelled else "error"
