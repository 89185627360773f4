"""The arguments of `rollstream show`, apart from its code: `--help` answers at once.

Owns what may be asked. Never reads a run.
"""

from __future__ import annotations

import argparse

MAX_LISTED = 4096


def add_show_options(parser: argparse.ArgumentParser) -> None:
    """Add what `show` takes beside GROUP and `--last`."""
    parser.add_argument(
        "--text", action="store_true", help="what was said, turn after turn, in role colours"
    )
    parser.add_argument(
        "--members", metavar="LIST", type=_members, help="only these: 0,3,8-11 (else all)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one file for a browser: turns, times, every token"
    )
    parser.add_argument(
        "--dump", metavar="DIR", help="read a dump of `rollstream dump` in place of a server"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="the model's tokenizer.json, for the text of tokens"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a rollstream.toml: its model.tokenizer is taken"
    )


def _members(text: str) -> frozenset[int]:
    """Return the members of `0,3,8-11`."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdecimal() and len(end) < 6 for end in ends):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of members: 0,3,8-11")
        low, high = int(ends[0]), int(ends[1])
        if not low <= high < MAX_LISTED:
            raise argparse.ArgumentTypeError(f"{part!r}: members are 0 to {MAX_LISTED - 1}")
        found.update(range(low, high + 1))
    return frozenset(found)
