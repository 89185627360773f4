"""Text from outside, made fit to be seen: on the page, in its attributes and in its data.

Owns what of a text a person sees as a mark (`⟨U+202E⟩`) because it would be invisible, turn lines
around, or be no character at all. Never lets a `<`, a quote or an `&` of anybody else through.
Invariant: `html(text)` holds no tag but our own, whatever `text` is; `data(value)` ends no script.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

MAX_CHARS = 1 << 18
"""Of one text on the page; its middle is left out beyond."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202f\u205f-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def visible(text: str) -> str:
    """Return text whose control characters, overrides of direction and surrogates are marks."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def html(text: str) -> str:
    """Return text as HTML, long ones without their middle, hidden characters as `<i>` marks."""
    parts, at = [], 0
    text = shortened(text)
    for found in _HIDDEN.finditer(text):
        parts.append(escape(text[at : found.start()]))
        parts.append(f'<i class="u">U+{ord(found[0]):04X}</i>')
        at = found.end()
    parts.append(escape(text[at:]))
    return "".join(parts)


def attribute(text: str) -> str:
    """Return text for between the quotes of an attribute."""
    return escape(visible(shortened(text, 1000)))


def shortened(text: str, most: int = MAX_CHARS) -> str:
    """Return text without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out …\n{text[-half:]}"


def data(value: Any) -> str:
    """Return JSON that can stand in a script element of the page."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
