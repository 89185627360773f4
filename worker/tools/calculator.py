"""The built-in `calculator`: arithmetic on numbers, and nothing else.

Owns the grammar and its bounds. Never evaluates code: an expression is parsed to a tree of which
only numbers, operators and a few functions are allowed. Invariant: every expression is answered in
microseconds and with a short text, however large a number it asks for.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, TypeAlias

Number: TypeAlias = int | float

MAX_CHARS = 512
MAX_BITS = 2048
"""No integer on the way may be longer."""
MAX_DIGITS = 100
_ALLOWED = re.compile(r"[0-9a-z_+\-*/%().,\s]*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LETTER = re.compile(r"[a-df-z]")  # all but the exponent's
_SIGNS = {0xD7: "*", 0xF7: "/", 0x2212: "-"}
"""The multiplication, division and minus signs of typeset text."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(number: Number, digits: int = 0) -> Number:
    if abs(digits) > MAX_DIGITS:
        raise OverflowError
    return round(number, digits) if digits else round(number)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text: `7*(1+2)` is `21`, `7/2` is `3.5`.

    Raises:
        ValueError: not arithmetic, or too large; the message is for the model.
    """
    text = expression.strip().lower().translate(_SIGNS).replace("^", "**")
    if not _LETTER.search(text):  # in max(1,234) the comma separates two numbers
        text = _THOUSANDS.sub("", text)
    if len(text) > MAX_CHARS:
        raise ValueError(f"the expression has {len(text)} characters; at most {MAX_CHARS}")
    if not text or not _ALLOWED.fullmatch(text):
        raise ValueError("only numbers, + - * / // % ^ ( ) and " + ", ".join(_FUNCTIONS))
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError("this is not an arithmetic expression") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    return _shown(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if (
            name in _FUNCTIONS
        ):
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
    raise ValueError("this is not an arithmetic expression")


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_BITS or (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * max(exponent, 1) > MAX_BITS
    ):
        raise OverflowError
    return _bounded(base**exponent)


def _bounded(number: Any) -> Number:
    if isinstance(number, int) and number.bit_length() <= MAX_BITS:
        return number
    if isinstance(number, float) and math.isfinite(number):
        return number
    if isinstance(number, complex):  # a broken power of a negative number
        raise ValueError("the result is not a real number")
    raise OverflowError


def _shown(number: Number) -> str:
    if isinstance(number, float):
        number = float(f"{number:.12g}")  # 0.1 + 0.2 is 0.3 to anyone who asks a calculator
        if number.is_integer() and abs(number) < 1e15:
            return str(int(number))
    return str(number)


class Calculator:
    """The tool; answers on the loop, since no expression takes longer than a thread would."""

    name = "calculator"
    spec: dict[str, Any] = {  # noqa: RUF012 - one spec, never changed
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression and return its value.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers with + - * / // % ^ and parentheses, "
                        "for example 3*(4+5)/2.",
                    }
                },
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """Return the value of `arguments["expression"]`."""
        return calculate(arguments["expression"])
