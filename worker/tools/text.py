"""What a tool returned, as the text that the model reads.

Owns the rules from any Python value to text. Never cuts (`caps` does), never touches tokens.
Invariant: the same value gives the same text, in the message and in the token ids, and every text
can be encoded.
"""

from __future__ import annotations

import binascii
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import re
import uuid
from typing import Any

_UNENCODABLE = re.compile("[\x00\ud800-\udfff]")
_JSON = json.JSONEncoder(ensure_ascii=False)
_MAX_DEPTH = 32
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*,", re.ASCII)
_PARTS = ("text", "image", "image_url", "input_image", "input_text", "output_text")
_SPEAKS_FOR_ITSELF = (
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction,
    uuid.UUID, pathlib.PurePath,
)  # fmt: skip
_SCALARS = frozenset((type(None), bool, int, float, str))
_MAX_SMALL_CHARS = 65536
_MAX_SMALL_VALUES = 512


def text_of(result: Any) -> str:
    """Return the text of a tool's result.

    str as it is; None is empty; bytes are UTF-8; a list of content parts is their texts joined,
    with a line for each image; everything else is JSON (`NaN` for NaN). NUL and lone surrogates
    become U+FFFD.

    Raises:
        ValueError: it cannot be shown (nested too deep, or in itself).
    """
    if result is None:
        return ""
    if isinstance(result, str):
        return clean(str.__str__(_value_of(result)))
    if isinstance(result, bytes | bytearray | memoryview):
        return clean(bytes(result).decode("utf-8", "replace"))
    if isinstance(result, list) and result and all(map(_is_part, result)):
        return clean("".join(map(_part_text, result)))
    if isinstance(result, _SPEAKS_FOR_ITSELF):
        return clean(str(result))
    # In pieces: in one go it would hold the interpreter, and so the event loop, for all of it.
    return clean("".join(_JSON.iterencode(_plain(result, 0))))


def blob_text(mime_type: str, num_bytes: int) -> str:
    """Return what the model reads in place of what is no text: `[image/png, 120 bytes]`."""
    return f"[{mime_type or 'data'}, {num_bytes} bytes]"


def clean(text: str) -> str:
    """Return `text` without what no tokenizer or engine takes: NUL and lone surrogates."""
    return text if text.isascii() and "\x00" not in text else _UNENCODABLE.sub("�", text)


def is_small(result: Any) -> bool:
    """Return whether `text_of(result)` takes no time worth a thread, and calls nobody's code."""
    waiting, left = [result], _MAX_SMALL_VALUES
    while waiting:
        value = waiting.pop()
        left -= 1
        kind = type(value)
        if left < 0:
            return False
        if kind is dict:
            if len(value) > left or not all(type(key) is str for key in value):
                return False
            waiting.extend(value.values())
        elif kind is list or kind is tuple:
            if len(value) > left:
                return False
            waiting.extend(value)
        elif kind is str or kind is bytes:
            if len(value) > _MAX_SMALL_CHARS:
                return False
            left -= len(value) // 1024
        elif kind not in _SCALARS:
            return False
    return True


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        return False
    if "text" in part["type"]:
        return isinstance(part.get("text"), str)
    return isinstance(_image_of(part)[1], str)


def _part_text(part: dict[str, Any]) -> str:
    if "text" in part["type"]:
        return str(part["text"])
    mime_type, data = _image_of(part)
    found = _DATA_URL.match(data)
    if found is not None:
        mime_type, data = found[1] or "image", data[found.end() :]
    elif "://" in data[:16]:
        return f"[image at {data[:256]}]"
    return blob_text(mime_type, _num_bytes(data))


def _image_of(part: dict[str, Any]) -> tuple[str, Any]:
    """Return (media type, base64 or URL) of an image, as OpenAI, Anthropic or MCP write one."""
    url = part.get("image_url")
    source = part.get("source")
    if isinstance(source, dict):
        return str(source.get("media_type", "image")), source.get("data", source.get("url"))
    if url is not None:
        return "image", url.get("url") if isinstance(url, dict) else url
    return str(part.get("mimeType", "image")), part.get("data")


def _num_bytes(base64_text: str) -> int:
    try:
        return len(binascii.a2b_base64(base64_text))
    except ValueError:
        return len(base64_text)


def _value_of(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _plain(value: Any, depth: int) -> Any:
    """Return `value` as JSON has it, without anything that differs from run to run."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth + 1)
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
    if isinstance(value, _SPEAKS_FOR_ITSELF):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name), depth + 1) for name in names}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _plain(value.tolist(), depth + 1)
    return f"<{type(value).__name__}>"  # an object's repr would show its address


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(_plain(key, 0))
