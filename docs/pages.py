"""Pages, or parts of pages, that are written from code: rewritten, or checked.

Owns the two markers around such a part and what `--check` does. Never knows what a page says.
Invariant: what stands outside the markers is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def between(text: str, begin: str, end: str, part: str) -> str:
    """Return `text` with what stands between two markers written anew.

    Raises:
        ValueError: a marker is missing.
    """
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the markers {begin} … {end} are missing")
    return f"{before}{begin}\n{part}\n{end}{after}"


def write_or_check(page: Path, wanted: str, arguments: Sequence[str], command: str) -> None:
    """Write a page; with `--check` among the arguments say whether it is that already.

    Raises:
        SystemExit: `--check`, and it differs; says which command writes it.
    """
    if "--check" not in arguments:
        page.write_text(wanted, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != wanted:
        raise SystemExit(f"{page.name} is out of date; run {command}")
