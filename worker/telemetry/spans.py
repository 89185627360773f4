"""Spans of one trajectory: how long each part took, on success, error and cancellation alike.

Owns the recorder that generate functions get. Never measures by itself beyond `timed` and `ended`,
never exports. Invariant: a span is recorded exactly once, when its part ended, however it ended.

One clock times them, the monotonic one. When a part began by the calendar is that plus the offset
that the wall clock had when the recorder was made: a wall clock that is set meanwhile moves no span
of that attempt against another, and the next attempt's spans follow it.
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from types import TracebackType

import msgspec

from rollstream.sample import Span

from ..types import SpanRecorder

STEP_S = 0.001
"""A wall clock that moved by less was not set: reading two clocks is not exact."""
_LOOKS = 5
_bare = object.__new__


class _Wall:
    """How far the wall clock is ahead of the monotonic one."""

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = float("-inf")

    def offset_s(self) -> float:
        """Return it as it is now, exact to a few microseconds."""
        seen = time() - monotonic()
        if abs(seen - self._offset_s) > STEP_S:
            # Set, or this thread lost its core between the two clocks: only a closer look tells.
            self._offset_s = min(_look() for _ in range(_LOOKS))[1]
        return self._offset_s


def _look() -> tuple[float, float]:
    """Return (within how many seconds it was read, the offset)."""
    before = monotonic()
    wall = time()
    after = monotonic()
    return after - before, wall - after


_WALL = _Wall()


class SpanList:
    """Keeps the spans of one trajectory."""

    __slots__ = ("_offset_s", "spans")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """What was recorded, in order."""
        self._offset_s = _WALL.offset_s()

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Add one span."""
        self.spans.append(Span(name, turn, start_unix_s, duration_s, outcome))

    def ended(
        self, name: str, turn: int, start_mono_s: float, error: BaseException | None = None
    ) -> float:
        """Add the span of a part that ended just now, and return its seconds.

        What `timed` does, at two thirds of its price, for what is timed every turn.
        """
        seconds = monotonic() - start_mono_s
        span = _bare(Span)  # its own `__init__` takes as long as all the rest
        span.name = name
        span.turn = turn
        span.start_unix_s = start_mono_s + self._offset_s
        span.duration_s = seconds
        span.outcome = "ok" if error is None else outcome_of(error)
        self.spans.append(span)
        return seconds

    def unix_s(self, mono_s: float) -> float:
        """Return a monotonic time by the wall clock that its spans go by."""
        return mono_s + self._offset_s


class NoSpans:
    """Records nothing (evaluation)."""

    __slots__ = ()

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Do nothing."""

    def ended(
        self, name: str, turn: int, start_mono_s: float, error: BaseException | None = None
    ) -> float:
        """Return the seconds."""
        return monotonic() - start_mono_s

    def unix_s(self, mono_s: float) -> float:
        """Return a monotonic time by the wall clock."""
        return mono_s + _WALL.offset_s()

    @property
    def spans(self) -> list[Span]:
        """Always empty."""
        return []


class timed(msgspec.Struct, gc=False):  # noqa: N801 - it reads: `with timed(spans, "tool"):`
    """Record how long the block took, and whether it ended well, broke or was cancelled.

    A Struct, because a class of Python's own takes twice as long to make.
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
        self.recorder.ended(self.name, self.turn, self.start_mono_s, error)


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a part that this ended."""
    cancelled = isinstance(error, (asyncio.CancelledError, GeneratorExit))
    return "cancelled" if cancelled else "error"
