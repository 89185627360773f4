"""What stands between a call of the pool and whoever reads along.

Owns the one fact that decides about another try: whether something was passed on. Never keeps what
it passes on. Invariant: `PoolCall.passed` is set before anybody can have seen a token.
"""

from __future__ import annotations

from rollstream.sample import TokenIds

from ...types import TokenSink
from .entrance import PoolCall


class Relay:
    """A `TokenSink` in front of another one."""

    __slots__ = ("_call", "_sink")

    def __init__(self, sink: TokenSink, call: PoolCall) -> None:
        self._sink, self._call = sink, call

    def begin(self, rid: str) -> bool:
        """Ask whether a try may be made (`TokenSink.begin`)."""
        return self._sink.begin(rid)

    def add(self, ids: TokenIds) -> None:
        """Pass ids on (`TokenSink.add`)."""
        self._call.passed = True
        self._sink.add(ids)
