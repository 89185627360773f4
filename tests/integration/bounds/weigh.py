"""Counts what an object of ours holds: items of every container that can be reached from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

OURS = ("rollstream", "worker", "producer", "tests")
_CONTAINERS = (list, tuple, set, frozenset, deque)


def num_items(root: object) -> int:
    """Return how many items the containers hold that can be reached from `root`.

    Objects of other packages (connections, metrics) are left out.
    """
    seen: set[int] = set()
    waiting: list[object] = [root]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            total += len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, _CONTAINERS):
            total += len(one)
            waiting += one
        elif type(one).__module__.partition(".")[0] in OURS:
            waiting += _attributes(one)
    return total


def _attributes(one: object) -> Iterable[Any]:
    names = list(getattr(one, "__dict__", ()))
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [getattr(one, name) for name in names if hasattr(one, name)]
