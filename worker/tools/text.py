"""What a tool returned, as the text that the model reads.

Owns the rules from any Python value to text, and the cap. Never touches tokens. Invariant: the same
value gives the same text, in the message and in the token ids, and every text can be encoded.

Unit: a cap counts characters (Unicode code points), the cut marker included, so no character is
ever split. By default the middle is cut away, because results begin with what they are and end
with what came out.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from ..types import CutSide

_UNENCODABLE = re.compile("[\x00\ud800-\udfff]")
_MAX_DEPTH = 32


def text_of(result: Any) -> str:
    """Return the text of a tool's result.

    str as it is; None is empty; bytes are UTF-8; a list of text parts is their texts joined;
    everything else is JSON (`NaN` for NaN). NUL and lone surrogates become U+FFFD.

    Raises:
        ValueError: it cannot be shown (nested too deep, or in itself).
    """
    if result is None:
        return ""
    if isinstance(result, str):
        return clean(result)
    if isinstance(result, bytes | bytearray | memoryview):
        return clean(bytes(result).decode("utf-8", "replace"))
    if isinstance(result, list) and result and all(map(_is_text_part, result)):
        return clean("".join(part["text"] for part in result))
    return clean(json.dumps(_plain(result, 0), ensure_ascii=False))


def clean(text: str) -> str:
    """Return `text` without what no tokenizer or engine takes: NUL and lone surrogates."""
    return _UNENCODABLE.sub("�", text)


def cut(text: str, limit: int, side: CutSide = "middle") -> str:
    """Return `text` within `limit` characters, with a marker where something was cut away.

    Args:
        text: whatever its length.
        limit: in characters; the marker counts. One that has no room for it keeps text alone.
        side: what is cut away: `middle` keeps a third of the room at the beginning and the rest
            at the end, `left` keeps the end, `right` keeps the beginning.
    """
    if len(text) <= limit:
        return text
    # The marker's own length depends on the number in it, which depends on the marker's length.
    room = max(limit, 0) - len(f"[... {len(text)} characters cut ...]")
    marker = f"[... {len(text) - room} characters cut ...]" if room > 0 else ""
    room = room if room > 0 else max(limit, 0)
    head = {"left": 0, "right": room, "middle": room // 3 if marker else 0}[side]
    return f"{text[:head]}{marker}{text[len(text) - (room - head) :]}"


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _plain(value: Any, depth: int) -> Any:
    """Return `value` as JSON has it, without anything that differs from run to run."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, depth + 1) for item in value), key=json.dumps)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name), depth + 1) for name in names}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist(), depth + 1)
    return f"<{type(value).__name__}>"  # an object's repr would show its address


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(_plain(key, 0))
