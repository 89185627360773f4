"""Environments by name.

Owns what `worker.environment` and `env.NAME.environment` may be. Never makes an environment.
Invariant: whatever is wrong with a name is one `ConfigError` before anything is leased.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from rollstream.errors import ConfigError

from ..functions import is_path, resolve, unknown_name
from .gym import GymFactory
from .life import METHODS
from .openenv import OpenEnvFactory
from .types import Factory

GYM, OPENENV = "reasoning_gym", "openenv:"


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment as the configuration names it."""

    name: str
    make: Factory
    resumable: bool = False
    """A sample that was stopped goes on from the `state` of its environment."""
    start: Callable[[], Any] | None = None
    """Begins what takes time; async or not."""


def load_environment(name: str, *, timeout_s: float) -> LoadedEnvironment:
    """Return what makes the environments of this name.

    Args:
        name: `reasoning_gym`, `openenv:URL`, `pkg.module:name` or `PATH.py:name`.
        timeout_s: of one call of an environment.

    Raises:
        ConfigError: with the name, what is wrong and what to do.
    """
    if name.startswith(OPENENV):
        openenv = OpenEnvFactory(name.removeprefix(OPENENV), timeout_s=timeout_s)
        return LoadedEnvironment(name, openenv, start=openenv.start)
    if name.partition("?")[0] == GYM:
        gym = GymFactory(_tries_of(name))
        return LoadedEnvironment(name, gym, resumable=gym.resumable, start=gym.start)
    if not is_path(name):
        raise unknown_name(name, "environment", [GYM, "openenv:URL"])
    make = resolve(name, "environment", num_args=1)
    missing = [one for one in METHODS if not callable(getattr(make, one, None))]
    if inspect.isclass(make) and missing:
        raise ConfigError(
            f"environment {name!r}: the class {make.__name__} has no {missing[0]}; an environment "
            "has reset, step and close (docs/environments.md)"
        )
    is_resumable = getattr(make, "resumable", False) is True
    if inspect.isclass(make) and is_resumable and not callable(getattr(make, "state", None)):
        raise ConfigError(
            f"environment {name!r} says resumable = True and has no `state` method to go on from"
        )
    return LoadedEnvironment(name, make, is_resumable)


def _tries_of(name: str) -> int:
    given = parse_qs(name.partition("?")[2], keep_blank_values=True)
    text = given.pop("tries", ["1"])[-1]
    if given or not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ConfigError(
            f"environment {name!r}: write reasoning_gym, or reasoning_gym?tries=N with N from 1"
        )
    return int(text)
