"""Tools by name: built in, a user's function or object, or a server's.

Owns which name means which tool, and that one tool of a process is loaded once. Never runs a call.
Invariant: whatever is wrong with a tool, its schema or its settings is one `ConfigError` before
anything is leased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollstream.errors import ConfigError
from rollstream.settings import ToolTable, WorkerTable

from ..functions import is_path, resolve, unknown_name
from ..types import Tool
from .bound import BoundTool
from .calculator import Calculator
from .function import FunctionTool
from .mcp import MCP
from .python import Jobs, PythonTool
from .rules import RuleBook
from .schema import check_spec

CALCULATOR, PYTHON = BUILT_IN = ("calculator", "python")
_CONCURRENCY: int = WorkerTable.model_fields["tool_concurrency"].default


class ToolLoader:
    """Loads the tools of all environments of one process."""

    def __init__(
        self,
        tables: Mapping[str, ToolTable] | None = None,
        *,
        concurrency: int = _CONCURRENCY,
        jobs: Jobs | None = None,
        servers: Callable[[str], Sequence[Tool]] | None = None,
    ) -> None:
        """Begin with none.

        Args:
            tables: the `[tool.NAME]` tables; a name is one in `tools`, or the model's.
            concurrency: calls of one tool at once.
            jobs: what `python` runs in.
            servers: `mcp:NAME` or `mcp:NAME/TOOL` to tools.
        """
        self._book = RuleBook(tables or {})
        self._concurrency, self._jobs, self._servers = concurrency, jobs, servers
        self._loaded: dict[str, list[BoundTool]] = {}

    def load(self, names: Iterable[str]) -> dict[str, Tool]:
        """Return the tools of an environment by the name that the model uses, in the given order.

        Args:
            names: built-in names, `mcp:NAME`, `mcp:NAME/TOOL`, `pkg.module:name` or `PATH.py:name`
                of a function or of an object with `name`, `spec` and `async __call__(arguments)`.

        Raises:
            ConfigError: one cannot be found or described, or two have one name.
        """
        tools: dict[str, Tool] = {}
        for name in names:
            if name not in self._loaded:
                self._loaded[name] = [self._bound(name, tool) for tool in self._tools(name)]
            for tool in self._loaded[name]:
                if tool.name in tools:
                    raise ConfigError(
                        f"two tools are called {tool.name!r}; rename one of them, or leave one out"
                    )
                tools[tool.name] = tool
        return tools

    def check(self) -> None:
        """Refuse settings of a tool that was never loaded; call it behind the last environment.

        Raises:
            ConfigError: naming the table, and the nearest tool.
        """
        self._book.check()

    def _bound(self, name: str, tool: Tool) -> BoundTool:
        names = [tool.name, name]
        if name.startswith(MCP) and "/" not in name:
            names.insert(1, f"{name}/{getattr(tool, 'served_name', tool.name)}")
        rules = self._book.of(*names)
        return BoundTool(tool, rules, concurrency=self._concurrency)

    def _tools(self, name: str) -> Sequence[Tool]:
        if name.startswith(MCP):
            if self._servers is None:
                raise ConfigError(f"tool {name!r}: no MCP server is configured; add [mcp.NAME]")
            return self._servers(name)
        if is_path(name):
            return [_of_path(name)]
        if name == CALCULATOR:
            return [Calculator()]
        if name == PYTHON:
            if self._jobs is None:
                raise ConfigError(
                    "the tool 'python' runs in a verifier, and this process asks none for jobs"
                )
            return [PythonTool(self._jobs)]
        raise unknown_name(name, "tool", list(BUILT_IN))


def load_tools(names: Iterable[str]) -> dict[str, Tool]:
    """Return tools without settings of their own, verifier or servers, as `ToolLoader.load`.

    Raises:
        ConfigError: as there.
    """
    return ToolLoader().load(names)


def _of_path(name: str) -> Tool:
    found = resolve(name, "tool")
    if isinstance(getattr(found, "name", None), str) and hasattr(found, "spec"):
        check_spec(found.spec, f"tool {name!r}")
        tool: Tool = found
        return tool
    return FunctionTool(found)


def tool_specs(tools: Mapping[str, Tool]) -> list[dict[str, Any]] | None:
    """Return what the chat template gets, or None without tools."""
    return [tool.spec for tool in tools.values()] or None


def tool_label(name: str, tools: Mapping[str, Tool]) -> str:
    """Return the metric label of a tool: its name where it is registered, else `other`.

    A model invents names without end, and every label value is a time series for ever.
    """
    return name if name in tools else "other"
