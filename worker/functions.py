"""Functions that users write: found by path, checked before the first sample runs.

Owns `resolve` and the rules of a path: `pkg.module:name` or `PATH.py:name`. Never calls what it
found. Invariant: whatever is wrong with a path is one `ConfigError` at start-up that names the
path, what failed and what to do; a function from a message is never looked up.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from rollstream.errors import ConfigError

UserFunction: TypeAlias = Callable[..., Any]
Kind: TypeAlias = Literal["async", "sync", "either"]

_MAX_ERROR_CHARS = 512


def resolve(path: str, what: str, *, kind: Kind = "either", num_args: int | None = None) -> Any:
    """Return what `path` names.

    Args:
        path: `pkg.module:name` or `PATH.py:name`.
        what: for messages: "generate", "reward", "tool", "filter".
        kind: whether it must be `async def`, must not be, or may be either.
        num_args: positional arguments that it will be called with; None does not check.

    Raises:
        ConfigError: with the path, what failed and what to do.
    """
    module, name = _module_of(path, what)
    function = _attribute_of(module, name, path, what)
    if not callable(function):
        raise ConfigError(
            f"{what} {path!r}: {name} is {type(function).__name__}, not a function; name a function"
        )
    if kind == "async" and not is_async(function):
        raise ConfigError(f"{what} {path!r} must be `async def`; it is an ordinary function")
    if kind == "sync" and is_async(function):
        raise ConfigError(f"{what} {path!r} must not be `async def`: it is called on the spot")
    if num_args is not None:
        _check_arguments(function, num_args, path, what)
    return function


def sibling(path: str, what: str, name: str) -> Any:
    """Return what is called `name` and defined in the module that `path` names; None without it.

    What the module merely imports under that name is somebody else's.

    Raises:
        ConfigError: the path names no module.
    """
    module, _ = _module_of(path, what)
    found = vars(module).get(name)
    return found if getattr(found, "__module__", None) == module.__name__ else None


def is_path(name: str) -> bool:
    """Return whether `name` is a path to a function rather than a built-in's name."""
    return ":" in name


def is_async(function: Any) -> bool:
    """Return whether calling `function` gives a coroutine (also for objects and partials)."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - asks what it is, not whether
    )


def describe(error: BaseException, limit: int = _MAX_ERROR_CHARS) -> str:
    """Return `Type: message` of an exception, bounded, also where its own `str` raises."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may raise anything, SystemExit too
        text = "(its message cannot be shown)"
    text = text[:limit] + " …" if len(text) > limit else text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def unknown_name(name: str, what: str, known: list[str]) -> ConfigError:
    """Return the error for a name that is neither built in nor a path."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(
        f"unknown {what} {name!r}{hint} Built in: {', '.join(known)}. "
        "A function of your own is 'pkg.module:name' or 'PATH.py:name'."
    )


def _module_of(path: str, what: str) -> tuple[ModuleType, str]:
    where, separator, name = path.rpartition(":")
    if not separator or not where or not name.isidentifier():
        raise ConfigError(
            f"{what} {path!r} is not a path to a function; write 'pkg.module:name' or "
            "'PATH.py:name'"
        )
    try:
        return (_load_file(Path(where)) if where.endswith(".py") else _load_module(where)), name
    except ConfigError as error:
        raise ConfigError(f"{what} {path!r}: {error}") from error.__cause__


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(f"importing {name} failed: {describe(error)}") from error
        raise ConfigError(
            f"there is no module {name}; it must be importable from {Path.cwd()} or installed "
            "(a file is written as PATH.py:name)"
        ) from None
    except (Exception, SystemExit) as error:  # the import runs the user's code
        raise ConfigError(f"importing {name} failed: {describe(error)}") from error


def _load_file(path: Path) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise ConfigError(f"there is no file {full}")
    digest = hashlib.blake2b(str(full).encode(), digest_size=4).hexdigest()
    name = f"rollstream_user_{full.stem}_{digest}"
    if name in sys.modules:  # two functions of one file share its state
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{full} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"running {full} failed: {describe(error)}") from error
    return module


def _attribute_of(module: ModuleType, name: str, path: str, what: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{what} {path!r}: the module has no {name!r}{hint}") from None


def _check_arguments(function: UserFunction, num_args: int, path: str, what: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in without a signature is taken at its word
        return
    try:
        signature.bind(*(None for _ in range(num_args)))
    except TypeError as error:
        raise ConfigError(
            f"{what} {path!r} is called with {num_args} argument(s), but its signature is "
            f"{signature}: {error}"
        ) from None
