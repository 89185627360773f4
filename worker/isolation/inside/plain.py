"""Values between a program and those who judge it: plain data as JSON, nothing that acts.

Owns the format. Never calls anything of a value that comes in: what arrives is of exact built-in
types, whatever class it had, so no `__eq__` of a program takes part in a comparison. Invariant:
`decode(encode(x)) == x` for plain data.

    None, bool, str, float, int (of 10,000 bits)    as they are
    list                                            an array
    anything else                                   {"t": its type, "v": ...}
    what is not plain                               {"t": "object", "v": a number}, if kept
"""

from __future__ import annotations

import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: the import costs milliseconds in every program
    from collections.abc import Callable
    from typing import Any

MAX_BITS = 10_000


class NotPlain(TypeError):
    """A value that is no plain data."""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return a value for JSON; `keep(value)` numbers what is not plain, or raises NotPlain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        if number.bit_length() > MAX_BITS:
            return {"t": "int", "v": hex(number)}
        return number
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [encode(item, keep) for item in list.__iter__(value)]
    for kind, items in _CONTAINERS:
        if isinstance(value, kind):
            return {"t": kind.__name__, "v": [encode(item, keep) for item in items(value)]}
    if isinstance(value, dict):
        pairs = [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]
        return {"t": "dict", "v": pairs}
    return _encode_rare(value, keep)


_CONTAINERS: tuple[tuple[Any, Any], ...] = (
    (tuple, tuple.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
)


_EXACT = ("Fraction", "Decimal")
_FRACTION = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")


def _encode_rare(value: Any, keep: Callable[[Any], int]) -> Any:
    if isinstance(value, bytes | bytearray):
        kind = "bytes" if isinstance(value, bytes) else "bytearray"
        return {"t": kind, "v": bytes(value).hex()}
    if isinstance(value, complex):
        return {"t": "complex", "v": [value.real, value.imag]}
    if isinstance(value, range):
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    if type(value).__name__ in _EXACT and type(value).__module__ in ("fractions", "decimal"):
        return {"t": type(value).__name__, "v": str(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return {"t": "object", "v": keep(value)}


def decode(data: Any, found: Callable[[Any], Any]) -> Any:
    """Return the value; `found(number)` is what was kept under it.

    Raises:
        ValueError: no such data (also KeyError, TypeError, RecursionError, OverflowError).
    """
    if isinstance(data, list):
        return [decode(item, found) for item in data]
    if not isinstance(data, dict):
        return data
    kind, value = data["t"], data["v"]
    if kind == "object":
        return found(value)
    if kind == "dict":
        return {decode(key, found): decode(item, found) for key, item in value}
    if kind in ("tuple", "set", "frozenset"):
        items = [decode(item, found) for item in value]
        return (
            tuple(items) if kind == "tuple" else set(items) if kind == "set" else frozenset(items)
        )
    if kind == "int":
        return int(value, 16)
    if kind in ("bytes", "bytearray"):
        return bytes.fromhex(value) if kind == "bytes" else bytearray.fromhex(value)
    if kind == "complex":
        return complex(*value)
    if kind == "range":
        return range(*value)
    return _decode_exact(kind, value)


def _decode_exact(kind: Any, value: Any) -> Any:
    if kind not in _EXACT:
        raise ValueError("not a value")
    from decimal import Decimal, DecimalException  # milliseconds that hardly anybody needs
    from fractions import Fraction

    if kind == "Fraction" and not _FRACTION.fullmatch(value):
        raise ValueError("not a fraction")  # an exponent would be worked out
    try:
        return Decimal(value) if kind == "Decimal" else Fraction(value)
    except (DecimalException, ZeroDivisionError):
        raise ValueError("not a number") from None


def num_parts(data: Any) -> int:
    """Return how many values there are in plain data, those in containers included."""
    num, waiting = 0, [data]
    while waiting:
        value = waiting.pop()
        num += 1
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return num


def same(expected: Any, given: Any) -> bool:
    """Return whether a value is what JSON's `expected` says.

    Tuples are arrays, keys of dictionaries are compared as JSON writes them, a set is an array in
    any order, and floats may differ by a billionth.
    """
    if isinstance(given, set | frozenset) and isinstance(expected, list):
        return _same_in_any_order(expected, list(given))
    if isinstance(given, range):
        given = list(given) if isinstance(expected, list) and len(given) == len(expected) else None
    if isinstance(expected, list):
        return (
            isinstance(given, list | tuple)
            and len(expected) == len(given)
            and all(map(same, expected, given))
        )
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(expected) != len(given):
            return False
        by_key = {_key(key): value for key, value in given.items()}
        return expected.keys() == by_key.keys() and all(
            same(value, by_key[key]) for key, value in expected.items()
        )
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    is_number = isinstance(given, int | float) or type(given).__name__ in _EXACT
    if isinstance(expected, int | float) and is_number:
        if isinstance(expected, float) or not isinstance(given, int):
            return _close(expected, given)
        return bool(expected == given)
    return type(expected) is type(given) and bool(expected == given)


def _close(expected: Any, given: Any) -> bool:
    try:
        one, other = float(expected), float(given)
    except OverflowError:
        return bool(expected == given)
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return "null" if key is None else str(key)


def _same_in_any_order(expected: list[Any], given: list[Any]) -> bool:
    if len(expected) != len(given):
        return False
    # Equal ones first, which takes no time: what is left differs by a billionth, or for good.
    keys = [(_exactly(item), item) for item in given]
    exact = {key: item for key, item in keys if key is not None}
    left = []
    for item in expected:
        key = _exactly(item)
        if key in exact:
            del exact[key]
        else:
            left.append(item)
    others = [*exact.values(), *(item for key, item in keys if key is None)]
    for item in left:
        at = next((at for at, other in enumerate(others) if same(item, other)), None)
        if at is None:
            return False
        del others[at]
    return True


def _exactly(value: Any) -> Any:
    """Return what is equal for values that are the same to the last bit; None where none is."""
    if value is None or isinstance(value, bool | str):
        return type(value).__name__, value
    if isinstance(value, int | float):
        return "number", value
    if isinstance(value, list | tuple):
        items = tuple(map(_exactly, value))
        return None if None in items else ("list", items)
    return None
