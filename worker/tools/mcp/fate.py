"""What became of one call on its way to a server, told by the HTTP layer to the caller.

Owns `Fate` and the words for trouble. Never sends anything. Invariant: `NOT_RUN` and `REFUSED` are
said only of a call that no tool can have seen, so that only such a call is ever sent again.

The protocol's library turns every failure into an error code that a server may send too, and drops
the HTTP status. A fate goes beside it: the library runs each request in its sender's context.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum


class Trouble(StrEnum):
    """What went wrong between here and the tool."""

    NOT_RUN = "not_run"
    """It was not sent, or not taken: no tool ran."""
    BUSY = "busy"
    """The same, said by a server that lives (429, 503): asked again on the same session."""
    REFUSED = "refused"
    """401 or 403: the token is wrong or old."""
    LOST = "lost"
    """It was sent, and no answer that makes sense came: the tool may have run."""
    TOO_LARGE = "too_large"
    """The answer is larger than one may be."""


class Fate:
    """Of one call, or of the beginning of a session."""

    __slots__ = ("said", "trouble", "was_sent")

    def __init__(self) -> None:
        self.trouble: Trouble | None = None
        self.said = ""
        self.was_sent = False
        """A connection took the first byte of its `tools/call`, whatever came of it."""

    def note(self, trouble: Trouble, said: str) -> None:
        """Keep what was the last trouble."""
        self.trouble, self.said = trouble, said


FATE: ContextVar[Fate | None] = ContextVar("mcp_fate", default=None)
"""Of the call whose requests are sent in this context."""
