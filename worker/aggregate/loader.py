"""From names in the configuration to filters that can be called.

Owns the syntax `name`, `name(0.1, key=value)`, `pkg.module:function`, `PATH.py:function`. Never
judges a group. Invariant: an unknown name, a wrong argument or a function that cannot be imported
is a `ConfigError` at start-up; arguments are literals, nothing in the configuration is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rollstream.errors import ConfigError
from rollstream.group import GroupView

from ..functions import is_path, resolve, unknown_name
from .filters import BUILT_IN, FilterFunction

NO_ABORTED = "no_aborted"
_STD = "reward_nonzero_std"
WHAT = "filter"


@dataclass(frozen=True, slots=True)
class LoadedFilter:
    """One filter of an environment, ready to be called."""

    name: str
    """As the configuration says it."""
    function: Callable[[GroupView], Any]
    built_in: bool
    """Built-in filters are pure and quick: called on the spot, their reasons are the enum's."""
    needs: Literal["headers", "bodies"] = "headers"

    @property
    def judges_aborted(self) -> bool:
        """Whether this is `no_aborted`, which is asked first, wherever it stands."""
        return self.built_in and self.name.partition("(")[0].strip() == NO_ABORTED


def load_filters(
    names: Sequence[str],
    *,
    std_threshold: float | None = None,
    keep_when_insufficient: bool = False,
) -> list[LoadedFilter]:
    """Return the filters that `names` say, in order.

    Args:
        names: as in `aggregator.filters`.
        std_threshold: of a `reward_nonzero_std` that is written without one.
        keep_when_insufficient: the same.

    Raises:
        ConfigError: which filter is wrong, how, and what to do.
    """
    settings: dict[str, Any] = {"keep_when_insufficient": keep_when_insufficient}
    if std_threshold is not None:
        settings["threshold"] = std_threshold
    return [_load(name.strip(), settings) for name in names]


def _load(text: str, of_std: Mapping[str, Any]) -> LoadedFilter:
    if is_path(text):
        return _load_path(text)
    name, args, kwargs = _parse(text)
    factory = BUILT_IN.get(name)
    if factory is None:
        raise unknown_name(name, WHAT, sorted(BUILT_IN))
    if name == _STD:
        # What is written with the name wins; its first argument is the threshold.
        kwargs = {k: v for k, v in of_std.items() if not (args and k == "threshold")} | kwargs
    try:
        function: FilterFunction = factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{WHAT} {text!r}: {error}") from None
    return LoadedFilter(text, function, built_in=True)


def _load_path(path: str) -> LoadedFilter:
    function = resolve(path, WHAT, num_args=1)
    needs = getattr(function, "needs", "headers")
    if needs not in ("headers", "bodies"):
        raise ConfigError(f'{WHAT} {path!r}: needs = {needs!r}; it is "headers" or "bodies"')
    return LoadedFilter(path, function, built_in=False, needs=cast(Any, needs))


def _parse(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `name(1, key=2)` into its parts; only literals are arguments."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            args = [ast.literal_eval(arg) for arg in node.args]
            kwargs = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
            if len(kwargs) == len(node.keywords):
                return node.func.id, args, kwargs
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(
        f"{WHAT} {text!r} cannot be read; write name, name(0.1), 'pkg.module:name' "
        "or 'PATH.py:name'"
    )
