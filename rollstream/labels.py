"""The name that engines have while an update that calls go on through is under way.

Owns its form, for the trainer that gives it and the workers that read it. Never names weights.
Invariant: it is no number, no trainer can give it to weights of its own, and it means no version:
what is sampled under it is of the old weights or of the new ones.
"""

from __future__ import annotations

import re

_BETWEEN = re.compile(r"[0-9]+~[0-9]+")


def between(old: int, new: int) -> str:
    """Return what engines are called from before the push until the new weights have a name."""
    return f"{old}~{new}"


def is_between(label: object) -> bool:
    """Return whether an engine's label is such a name."""
    return isinstance(label, str) and _BETWEEN.fullmatch(label) is not None
