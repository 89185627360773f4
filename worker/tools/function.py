"""A Python function as a tool.

Owns how a call's arguments reach the function. Never decides what a fault means: `run` does.
Invariant: what is wrong with a function is said when the tool is made; a sync function never runs
on the event loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rollstream.errors import ConfigError

from ..bounded import THREADS
from ..functions import is_async
from .schema import check_spec, spec_from_signature


class FunctionTool:
    """A function that the model may call.

    Attributes:
        name: as the model writes it.
        spec: OpenAI's JSON, from the function's `spec` attribute or its signature and docstring.
    """

    def __init__(self, function: Callable[..., Any], spec: dict[str, Any] | None = None) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        what = f"tool {name!r}"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{what} yields; a tool returns its whole result")
        given = spec if spec is not None else getattr(function, "spec", None)
        if given is None:
            given = spec_from_signature(function, name, what)
        check_spec(given, what)
        self.name: str = given["function"]["name"]
        self.spec: dict[str, Any] = given
        self._function = function
        self._is_async = is_async(function)
        properties = given["function"].get("parameters", {}).get("properties", {})
        self._whole = frozenset(name for name, schema in properties.items() if _is_whole(schema))

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run it: async on the loop, sync in a thread."""
        for name in self._whole & arguments.keys():
            if type(arguments[name]) is float:  # 3.0 is a whole number in JSON, and no index
                arguments = arguments | {name: int(arguments[name])}
        if self._is_async:
            return await self._function(**arguments)
        return await THREADS.submit(functools.partial(self._function, **arguments))


def _is_whole(schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    allowed = {kinds} if isinstance(kinds, str) else set(kinds or ())
    return "integer" in allowed and "number" not in allowed
