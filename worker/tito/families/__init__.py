"""Every chat format that can be named, in one table.

Owns the table. Never imports a renderer: a family is data until somebody asks for it.
Invariant: names are unique, and each is what `model.renderer` takes.
"""

from __future__ import annotations

from .family import CallForm, Family, Proof
from .qwen import QWEN

FAMILIES: dict[str, Family] = {**QWEN}
"""Names of `model.renderer`."""

__all__ = ["FAMILIES", "CallForm", "Family", "Proof"]
