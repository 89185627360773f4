"""What a tool returned, as the text that the model reads.

Owns the rules from any Python value to text, and the cap. Never touches tokens. Invariant: the same
value gives the same text, in the message and in the token ids, and every text can be encoded.

Unit: a cap counts characters (Unicode code points), the cut marker included; both ends are kept,
because results begin with what they are and end with what came out.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

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


def cut(text: str, limit: int) -> str:
    """Return `text` within `limit` characters: its beginning and its end around a marker.

    Unit: characters; the marker counts. Two thirds of the room go to the end.
    """
    if len(text) <= limit:
        return text
    # The marker's own length depends on the number in it, which depends on the marker's length.
    room = limit - len(f"[... {len(text)} characters cut ...]")
    if room <= 0:
        return text[-limit:] if limit > 0 else ""
    head = room // 3
    tail = room - head
    return f"{text[:head]}[... {len(text) - room} characters cut ...]{text[len(text) - tail :]}"


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
