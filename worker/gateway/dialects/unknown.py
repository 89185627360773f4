"""Which fields nobody knows were told of already.

Owns one dialect's names. Never refuses anything. Invariant: each name is logged once, and so many
names at most: what clients send cannot fill a log.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

log = structlog.get_logger("gateway")

MAX_NAMES = 256
"""Of one dialect; an agent with more makes them up."""


class UnknownFields:
    """Logs the unknown fields of one dialect's requests."""

    def __init__(self, dialect: str) -> None:
        """Begin with none.

        Args:
            dialect: its name.
        """
        self._dialect = dialect
        self._told: set[str] = set()

    def tell(self, names: Sequence[str]) -> None:
        """Log those names that are new."""
        new = [name for name in names if name not in self._told]
        new = new[: MAX_NAMES - len(self._told)]
        if new:
            self._told.update(new)
            log.warning("request_fields_ignored", dialect=self._dialect, fields=new)
