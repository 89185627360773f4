"""A tool with what bounds it: the check of its arguments, its settings, its slots.

Owns what is made once per tool and used by every call. Never runs a call by itself. Invariant: one
tool of a process has one `BoundTool`, whichever environments have it, so its limit of calls at once
is the process's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from rollstream.settings import ToolTable

from ..types import Tool
from .arguments import ArgumentCheck
from .rules import NO_RULES, Slots

Within: TypeAlias = Callable[[dict[str, Any], float], Awaitable[Any]]


class SelfBounded(Protocol):
    """A tool that keeps its own time.

    What runs elsewhere (a verifier, a server) tells a program that ran too long, which is the
    policy's doing, from a queue that nobody serves, which is not: only it knows which.
    """

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Run it, and end within a bound of its own.

        Raises:
            ToolTrouble: what the model may read of why there is no result.
            ToolFault: infrastructure broke; the sample ends.
        """
        ...


class BoundTool:
    """A tool as the worker runs it."""

    def __init__(self, tool: Tool, rules: ToolTable = NO_RULES, *, concurrency: int) -> None:
        """Read its schema.

        Args:
            tool: of a user's, built in, or of a server.
            rules: its own settings.
            concurrency: calls at once, where its settings say none.

        Raises:
            ConfigError: its schema is none.
        """
        self.tool, self.rules = tool, rules
        self.name, self.spec = tool.name, tool.spec
        parameters = tool.spec["function"].get("parameters") or {}
        self.check = ArgumentCheck(parameters, f"tool {tool.name!r}")
        self.slots = Slots(rules.concurrency or concurrency)
        self.within = within_of(tool)

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run it as it is, for a generate function that runs its calls by itself."""
        return await self.tool(arguments)


def within_of(tool: Tool) -> Within | None:
    """Return what runs a tool that keeps its own time (`SelfBounded`); None where we keep it."""
    within: Within | None = getattr(tool, "call_within", None)
    return within
