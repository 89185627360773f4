"""How answers look: JSON for scripts, aligned lines for people, colour where it helps.

Owns standard output. Never decides what is shown. Invariant: without a terminal, with NO_COLOR
set, or without the extra [cli], what is printed is plain text; whatever Redis, a dump or a user's
code holds, no control character of it reaches the terminal, every terminal can encode what is
printed, and JSON is JSON (it has no NaN: such a number is the text `nan`, `inf` or `-inf`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

MAX_DEPTH = 64
"""Of a value in JSON; what lies deeper is its text."""


def print_json(value: Any) -> None:
    """Print one JSON document; what would write on a terminal, or cannot be encoded, is escaped."""
    text = json.dumps(plain_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    if not (text.replace("\n", "").isprintable() and _encoded(text) == text):
        text = "".join(
            c if c == "\n" or (c.isprintable() and _encoded(c) == c) else json.dumps(c)[1:-1]
            for c in text
        )
    print(text)


def plain_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a value as JSON has it, whatever it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth and isinstance(value, Mapping):
        return {str(name): plain_json(one, depth - 1) for name, one in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain_json(one, depth - 1) for one in value]
    return str(value)


def print_text(text: str, *, flush: bool = False) -> None:
    """Print text for people: lines of it stay lines, all other control characters are spaces."""
    print(cleaned(text), flush=flush)


def print_progress(text: str) -> None:
    """Print a line about work that goes on whether anybody reads it or not."""
    try:
        print_text(text, flush=True)
    except OSError:  # a reader that left, a full disk
        close_stdout()


def close_stdout() -> None:
    """Let nothing more be written to a reader that went away, nor Python complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cleaned(text: str, keep: str = "\n") -> str:
    """Return text that cannot write on a terminal; characters of `keep` stay."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else " " for c in text)
    return _encoded(text)


def _encoded(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_rows(title: str, rows: Mapping[str, Any]) -> None:
    """Print a title and aligned names with their values, a line each."""
    title = cleaned(title, "")
    rows = {cleaned(name, ""): _value(value) for name, value in rows.items()}
    width = max(map(len, rows), default=0)
    if not _print_rich(title, rows, width):
        print(title)
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}")


def _value(value: Any) -> Any:
    return value if isinstance(value, int) else cleaned(str(value), "")


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
