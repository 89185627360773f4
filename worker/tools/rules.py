"""What bounds one tool: its own settings over the worker's, and how many of its calls run at once.

Owns `[tool.NAME]` as found by a tool's names, and the slots. Never runs a call. Invariants: a table
that no tool asked for is refused; a slot is free once its call has ended for the caller, however it
ended and whatever the tool still does.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping

from rollstream.errors import ConfigError
from rollstream.settings import ToolTable

NO_RULES = ToolTable()


class RuleBook:
    """The `[tool.NAME]` tables, and which names tools were asked by."""

    def __init__(self, tables: Mapping[str, ToolTable]) -> None:
        self._tables = tables
        self._asked: set[str] = set()

    def of(self, *names: str) -> ToolTable:
        """Return the settings of a tool by its names, field by field; earlier names win."""
        self._asked.update(names)
        found: dict[str, float | int | None] = {}
        for name in reversed(names):
            table = self._tables.get(name, NO_RULES)
            found.update(table.model_dump(exclude_none=True))
        return ToolTable(**found) if found else NO_RULES

    def check(self) -> None:
        """Refuse a table of a tool that no environment has.

        Raises:
            ConfigError: naming it, and the nearest name.
        """
        known = sorted(self._asked)
        for name in self._tables:
            if name not in self._asked:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(
                    f"[tool.{name}] is of no tool that an environment has{hint} "
                    f"Tools: {', '.join(known) or 'none'}"
                )


class Slots:
    """Room for so many calls of one tool at once, in one process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0
        self._free = asyncio.Semaphore(limit)

    async def take(self, timeout_s: float) -> None:
        """Wait for a slot.

        Raises:
            TimeoutError: there was none in time.
        """
        if self._free.locked():
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        else:
            await self._free.acquire()
        self.num_taken += 1

    def give(self) -> None:
        """Give one back."""
        self.num_taken -= 1
        self._free.release()
