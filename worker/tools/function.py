"""A Python function as a tool, and the loading of tools by name.

Owns `FunctionTool` and `load_tools`. Never decides what a fault means: `run` does. Invariant: what
is wrong with a tool is said at start-up; a sync function never runs on the event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollstream.errors import ConfigError

from ..bounded import THREADS
from ..functions import is_async, is_path, resolve, unknown_name
from ..types import Tool
from .calculator import Calculator
from .schema import check_spec, spec_from_signature

BUILT_IN: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


class FunctionTool:
    """A function that the model may call.

    Attributes:
        name: as the model writes it.
        spec: OpenAI's JSON, from the function's `spec` attribute or its signature and docstring.
    """

    def __init__(self, function: Callable[..., Any], spec: dict[str, Any] | None = None) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        what = f"tool {name!r}"
        given = spec if spec is not None else getattr(function, "spec", None)
        if given is None:
            given = spec_from_signature(function, name, what)
        check_spec(given, what)
        self.name: str = given["function"]["name"]
        self.spec: dict[str, Any] = given
        self._function = function
        self._is_async = is_async(function)

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run it: async on the loop, sync in a thread."""
        if self._is_async:
            return await self._function(**arguments)
        return await THREADS.submit(functools.partial(self._function, **arguments))


def load_tools(names: Iterable[str]) -> dict[str, Tool]:
    """Return the tools of an environment by the name that the model uses, in the given order.

    Args:
        names: built-in names, `pkg.module:name` or `PATH.py:name` of a function or of an object
            with `name`, `spec` and `async __call__(arguments)`.

    Raises:
        ConfigError: one cannot be found or described, or two have one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = _load(name)
        if tool.name in tools:
            raise ConfigError(f"two tools are called {tool.name!r}; rename one of them")
        tools[tool.name] = tool
    return tools


def _load(name: str) -> Tool:
    if not is_path(name):
        if name not in BUILT_IN:
            raise unknown_name(name, "tool", sorted(BUILT_IN))
        return BUILT_IN[name]()
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
