"""A regular expression that finds any of many strings, at a cost that does not grow with them.

Owns the conversion only. Vocabularies have up to thousands of control strings with common
beginnings; an alternation tries all of them at every `<` of a text, a tree tries one character.
Invariant: of several strings that begin at one place, the longest is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of `strings`; nothing, where there are none."""
    tree: dict[str, Any] = {}
    for string in strings:
        branch = tree
        for letter in string:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return re.compile(_of(tree) or "(?!)")


def _of(tree: dict[str, Any]) -> str:
    text = ""
    while len(tree) == 1:  # a common part
        ((letter, tree),) = tree.items()
        if not letter:
            return text
        text += re.escape(letter)
    if not tree:
        return text
    branches = [re.escape(letter) + _of(below) for letter, below in tree.items() if letter]
    group = f"(?:{'|'.join(branches)})"
    return text + group + ("?" if "" in tree else "")
