"""What may be a reward: plain numbers, dictionaries of plain values, and None.

Owns the checks of what judges return. Never computes one. Invariant: what passes can be stored on
the wire; NaN passes too (whoever judges the group says `invalid`), text does not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from rollstream.sample import Reward

from .details import Detail, no_verdict


def checked(reward: Any, name: str) -> Reward:
    """Return a verdict as plain numbers.

    Raises:
        RewardFault: not a number, a dictionary of plain values, or None.
    """
    if reward is None or type(reward) is float:
        return reward
    if isinstance(reward, dict):
        return {str(key): _plain(value, name) for key, value in reward.items()}
    value = _plain(reward, name)
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise no_verdict(
        Detail.INVALID,
        f"the reward {name} returned {type(reward).__name__}; it must return a number, a "
        "dictionary or None",
    )


def one_of(values: Mapping[str, Any], key: str | None, names: tuple[str, ...]) -> Any:
    """Return a dictionary as it is where `reward.key` picks from it, else its one number.

    Args:
        values: what a reward says.
        key: `reward.key`.
        names: under which the number may stand, the first that is there.

    Raises:
        KeyError: none of the names is there.
    """
    if key is not None and key in values:
        return dict(values)
    for name in names:
        if name in values:
            return values[name]
    raise KeyError(names[0])


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any, name: str) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's scalars
        value = value.item()
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, name) for key, item in value.items()}
    raise no_verdict(
        Detail.INVALID,
        f"the reward {name} returned a value of type {type(value).__name__}, which cannot be "
        "stored; use numbers and text",
    )
