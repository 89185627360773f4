"""How answers look: JSON for scripts, aligned lines for people, colour where it helps.

Owns standard output. Never decides what is shown. Invariant: without a terminal, with NO_COLOR
set, or without the extra [cli], what is printed is plain text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any


def print_json(value: Any) -> None:
    """Print one JSON document; what would write on a terminal, or cannot be encoded, is escaped."""
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    print(text)


def print_rows(title: str, rows: Mapping[str, Any]) -> None:
    """Print a title and aligned names with their values."""
    width = max(map(len, rows), default=0)
    if not _print_rich(title, rows, width):
        print(title)
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}")


def in_colour() -> bool:
    """Return whether colours help: a terminal, no NO_COLOR, and rich is installed."""
    if os.environ.get("NO_COLOR") or not (sys.stdout and sys.stdout.isatty()):
        return False
    return find_spec("rich") is not None


def _print_rich(title: str, rows: Mapping[str, Any], width: int) -> bool:
    if not in_colour():
        return False
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(title, style="bold"))
    for name, value in rows.items():
        style = "dim" if value in (0, "none yet") else ""
        console.print(Text(f"  {name:<{width}}  {value}", style=style))
    return True
