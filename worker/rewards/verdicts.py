"""What may be a reward: plain numbers, dictionaries of plain values, and None.

Owns the checks of what judges return. Never computes one. Invariant: what passes can be stored on
the wire; NaN passes too (whoever judges the group says `invalid`), text does not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import msgpack

from rollstream.errors import RewardFault
from rollstream.group import reward_number
from rollstream.sample import Reward

from ..functions import describe
from .details import Detail, no_verdict

MAX_REWARD_BYTES = 64 << 10
"""Of a dictionary, as it is stored."""
MAX_DEPTH = 16
"""Lists and dictionaries in one another, in a reward."""
_NAMED_ENTRIES = 8


def checked(reward: Any, name: str) -> Reward:
    """Return a verdict as plain numbers.

    Raises:
        RewardFault: not a number, a dictionary of plain values, or None; or a dictionary that is
            too large or too deep to be stored.
    """
    if reward is None or type(reward) is float:
        return reward
    try:
        if isinstance(reward, dict):
            return _small(_Plain(name).of(reward, MAX_DEPTH), name)
        value = None if isinstance(reward, list | tuple) else _Plain(name).of(reward, 0)
    except RewardFault:
        raise
    except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything
        raise no_verdict(
            Detail.INVALID,
            f"the reward {name} returned a value that cannot be stored: {describe(error)}",
        ) from None
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise no_verdict(
        Detail.INVALID,
        f"the reward {name} returned {type(reward).__name__}; it must return a number, a "
        "dictionary or None",
    )


def with_its_key(reward: Reward, key: str | None, name: str) -> Reward:
    """Return a checked verdict, of which `reward.key` picks a number where it is a dictionary.

    Raises:
        RewardFault: it picks none.
    """
    if not isinstance(reward, dict) or reward_number(reward, key) is not None:
        return reward
    entries = ", ".join(list(reward)[:_NAMED_ENTRIES])[:200]
    why = f"{key!r} is no number of it" if key else "reward.key does not say which counts"
    raise no_verdict(
        Detail.INVALID,
        f"the reward {name} returned a dictionary of {entries or 'nothing'}, and {why}; "
        "set reward.key to the entry that is the reward",
    )


def _small(reward: dict[str, Any], name: str) -> dict[str, Any]:
    # It lies in the header of its member, which every filter and view reads.
    if len(msgpack.packb(reward)) > MAX_REWARD_BYTES:
        raise _too_large(name)
    return reward


def _too_large(name: str) -> RewardFault:
    return no_verdict(
        Detail.TOO_LARGE,
        f"the reward {name} returned a dictionary of more than {MAX_REWARD_BYTES} bytes",
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
    """Return whether a value is a finite number that a float holds, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    with contextlib.suppress(OverflowError):
        return math.isfinite(value)
    return False


class _Plain:
    """Makes one reward plain, as far as it can be small enough: the loop waits for this."""

    def __init__(self, name: str) -> None:
        self._name, self._left = name, MAX_REWARD_BYTES

    def of(self, value: Any, depth: int) -> Any:
        """Return a value of it as plain numbers, text, lists and dictionaries.

        Raises:
            RewardFault: it cannot be stored; each value takes a byte at least.
        """
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise _too_large(self._name)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's scalars
            value = value.item()
        if value is None or isinstance(value, str | bool | float):
            return value
        if isinstance(value, int) and abs(value) < 1 << 63:
            return value
        if depth > 0 and isinstance(value, list | tuple):
            return [self.of(item, depth - 1) for item in value]
        if depth > 0 and isinstance(value, dict):
            return {str(key): self.of(item, depth - 1) for key, item in value.items()}
        raise no_verdict(
            Detail.INVALID,
            f"the reward {self._name} returned a value of type {type(value).__name__}, which "
            f"cannot be stored; use numbers and text, at most {MAX_DEPTH} deep",
        )
