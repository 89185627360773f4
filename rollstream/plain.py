"""Plain values that come off the wire: what they may be, before anything is computed with them.

Owns the checks of types and sizes that the decoders share. Never knows a record: `rollstream.wire`
does. Invariant: whatever passes here can be added, compared, hashed and put into an array, and
reading it costs no more memory than a small multiple of its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgpack

NUMBER = (int, float)
BEYOND_INT64 = 1 << 63
"""MessagePack has unsigned integers too, arrays of the trainer have not."""
_INT_ONLY = frozenset({int})


def check_kinds(record: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Refuse a field of another type than one of `kinds[name]`; True is no number.

    Raises:
        ValueError: with the field and the type that it has.
    """
    for name, value in record.items():
        known = kinds.get(name)
        if known is None or type(value) in known:
            continue
        raise ValueError(f"{name} is a {type(value).__name__}, not {known[0].__name__}")


def check_ints(values: Collection[Any], what: str) -> None:
    """Refuse anything but whole numbers of 64 bits.

    Raises:
        ValueError: with `what` they are.
    """
    if not _INT_ONLY.issuperset(map(type, values)):
        raise ValueError(f"{what}: not all are whole numbers")
    if values and max(values) >= BEYOND_INT64:
        raise ValueError(f"{what}: larger than 64 bits with a sign can hold")


MAX_TEXTS = 1 << 16
"""Leaves of one member that may have a text."""


def read_texts(packed: bytes) -> tuple[Any, Any]:
    """Return the fields `v` and `texts` of a packed map, None for one that is absent or garbage.

    A text is compressed, so a few kilobytes can claim millions of objects: what is neither the
    version nor a text of the list is passed over without being made.

    Raises:
        ValueError: not a packed map.
    """
    reader = msgpack.Unpacker(raw=False, max_buffer_size=max(1, len(packed)))
    reader.feed(packed)
    version, texts = None, None
    try:
        for _ in range(reader.read_map_header()):
            name = _take(reader, packed, _TEXT_HEADS)
            if name == "v":
                version = _take(reader, packed, _INT_HEADS)
            elif name == "texts" and _head(reader, packed) in _LIST_HEADS:
                count = reader.read_array_header()
                if count > MAX_TEXTS:
                    raise ValueError(f"{count} texts, more than {MAX_TEXTS}")
                texts = [_take(reader, packed, _TEXT_HEADS) for _ in range(count)]
            else:
                reader.skip()
    except msgpack.UnpackException as error:
        raise ValueError(f"{type(error).__name__} {error}") from None
    if reader.tell() != len(packed):
        raise ValueError("something stands behind the record")
    return version, texts


_TEXT_HEADS = frozenset([*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB])
_INT_HEADS = frozenset([*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)])
_LIST_HEADS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
"""First bytes of MessagePack's texts, whole numbers and lists."""


def _head(reader: Any, packed: bytes) -> int:
    at = reader.tell()
    return packed[at] if at < len(packed) else -1


def _take(reader: Any, packed: bytes, heads: frozenset[int]) -> Any:
    """Return the next value where it is of the right kind; else pass over it, and return None."""
    if _head(reader, packed) in heads:
        return reader.unpack()
    return reader.skip()
