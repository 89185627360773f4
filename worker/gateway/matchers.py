"""Is a message that comes back the one that was stored: the ways to say so, and their names.

Owns `resolve_matcher` and the built-in matchers. Never changes a message, never renders. Invariant:
what `strict` takes for the same, `loose_tool_call` does too, and what that does,
`role_content_only` does; values that no JSON has (a `Decimal`, NaN, a tuple) are the same as
nothing, not even as themselves.

    rendered            (the default) every template renders both alike (`tito.history`), or the
                        reasoning is all that the echo leaves out
    strict              role, content, reasoning, calls, `name`, `tool_call_id`; null, "", [] and
                        an absent key are one; a call's `index` does not count
    loose_tool_call     as `strict`, but arguments are the same as JSON, text or not: key order,
                        spaces and `1` for `1.0` are free, `true` for `1` is not
    role_content_only   role and content, letter for letter
    pkg.module.name     a function of one's own, `(stored, echoed) -> bool`; also
                        `pkg.module:name` and `PATH.py:name`
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from rollstream.errors import ConfigError, ContractError
from rollstream.sample import Message

from ..functions import describe, is_path, resolve
from ..tito.history import difference

Matcher: TypeAlias = Callable[[Message, Message], bool]
"""(stored, echoed) → whether they are the same message."""

RENDERED = "rendered"
"""The default."""
_NOTHING: tuple[Any, ...] = (None, "", [])
_REASONING = ("reasoning_content", "reasoning")
_MISSING = object()


def rendered(stored: Message, echoed: Message) -> bool:
    """Return whether the ids of `stored` may stand for `echoed`.

    A client that does not send reasoning back means the same turn; one that sends another reasoning
    means another turn.
    """
    return not rendered_difference(stored, echoed)


def rendered_difference(stored: Message, echoed: Message) -> str:
    """Return in which part `rendered` sees a difference, empty for none."""
    known = isinstance(stored, Mapping) and isinstance(echoed, Mapping)
    if known and not any(echoed.get(name) for name in _REASONING):
        stored = {key: value for key, value in stored.items() if key not in _REASONING}
    return difference(stored, echoed)


def strict(stored: Message, echoed: Message) -> bool:
    """Return whether both say the same, letter for letter."""
    return _equal(stored, echoed, loose=False)


def loose_tool_call(stored: Message, echoed: Message) -> bool:
    """Return whether both say the same, arguments of calls compared as JSON."""
    return _equal(stored, echoed, loose=True)


def role_content_only(stored: Message, echoed: Message) -> bool:
    """Return whether role and content are the same, whatever else differs."""
    return all(_same_part(stored, echoed, name) for name in ("role", "content"))


BUILT_IN: dict[str, Matcher] = {
    RENDERED: rendered,
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def resolve_matcher(name: str) -> Matcher:
    """Return the matcher of a name.

    Args:
        name: a built-in's, exactly; or a path to an ordinary function of two messages.

    Raises:
        ConfigError: "failed to resolve …", with what is wrong and what to do.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = name
    if not is_path(name):
        module, dot, attribute = name.rpartition(".")
        if not dot or not module:
            raise ConfigError(
                f"failed to resolve matcher {name!r}: it is none of {', '.join(BUILT_IN)}; a "
                "function of your own is 'pkg.module.name', 'pkg.module:name' or 'PATH.py:name'"
            )
        path = f"{module}:{attribute}"
    try:
        function = resolve(path, "matcher", kind="sync", num_args=2)
    except ConfigError as error:
        raise ConfigError(f"failed to resolve matcher {name!r}: {error}") from error
    return _checked(function, name)


def first_difference(
    matcher: Matcher, stored: Sequence[Message], echoed: Sequence[Message]
) -> tuple[int, str] | None:
    """Return at which message, and in which part, a history leaves the stored one.

    Args:
        matcher: decides.
        stored: the conversation so far.
        echoed: what came back, which may go on behind it.

    Returns:
        None where `echoed` begins with all of `stored`. The part is for people: where a matcher
        sees a difference that no template would, it is "the matcher's own judgement".
    """
    for place, message in enumerate(stored):
        if place >= len(echoed):
            return place, "missing"
        if not matcher(message, echoed[place]):
            part = rendered_difference(message, echoed[place])
            return place, part or "the matcher's own judgement"
    return None


def _checked(function: Callable[..., Any], name: str) -> Matcher:
    """Return a user's function, held to what a matcher promises."""

    def matcher(stored: Message, echoed: Message) -> bool:
        try:
            found = function(stored, echoed)
        except Exception as error:  # a user's code may raise anything
            raise ContractError(f"matcher {name!r} raised {describe(error)}") from error
        if not isinstance(found, bool):
            if inspect.iscoroutine(found):
                found.close()
            raise ContractError(f"matcher {name!r} must return bool, got {type(found).__name__}")
        return found

    return matcher


def _equal(stored: Message, echoed: Message, *, loose: bool) -> bool:
    for name in ("role", "content", "name", "tool_call_id"):
        if not _same_part(stored, echoed, name):
            return False
    if not _same(_reasoning(stored), _reasoning(echoed)):
        return False
    calls, others = _part(stored, "tool_calls"), _part(echoed, "tool_calls")
    if not isinstance(calls, list) or not isinstance(others, list):
        return _same(calls, others)
    return len(calls) == len(others) and all(
        _same_call(call, other, loose=loose) for call, other in zip(calls, others, strict=True)
    )


def _same_call(call: Any, other: Any, *, loose: bool) -> bool:
    if not isinstance(call, dict) or not isinstance(other, dict):
        return _same(call, other)
    call, function = _taken(call, "index", "function")
    other, other_function = _taken(other, "index", "function")
    if not _same(call, other):
        return False
    if not loose or not isinstance(function, dict) or not isinstance(other_function, dict):
        return function is other_function is _MISSING or _same(function, other_function)
    function, arguments = _taken(function, "arguments")
    other_function, other_arguments = _taken(other_function, "arguments")
    if not _same(function, other_function):
        return False
    if arguments is _MISSING or other_arguments is _MISSING:
        return arguments is other_arguments
    if isinstance(arguments, str) and arguments == other_arguments:
        return True
    return _same(_as_json(arguments), _as_json(other_arguments), loose=True)


def _taken(of: dict[Any, Any], *names: str) -> tuple[dict[Any, Any], Any]:
    """Return a copy without `names`, and the value of the last of them."""
    rest = {key: value for key, value in of.items() if key not in names}
    return rest, of.get(names[-1], _MISSING)


def _same_part(stored: Message, echoed: Message, name: str) -> bool:
    return _same(_part(stored, name), _part(echoed, name))


def _part(message: Message, name: str) -> Any:
    """Return a part of a message, None where there is nothing in it."""
    value = message.get(name) if isinstance(message, Mapping) else None
    return None if any(value is none or value == none for none in _NOTHING) else value


def _reasoning(message: Message) -> Any:
    found = _part(message, _REASONING[0])
    return _part(message, _REASONING[1]) if found is None else found


def _as_json(arguments: Any) -> Any:
    """Return what a text of an object or of a list says; anything else as it is.

    Other texts stay text, so that null is not "null" and `5` not "5".
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        said = _LOOSE.decode(arguments)
    except (ValueError, RecursionError, InvalidOperation):
        return arguments
    return said if isinstance(said, dict | list) else arguments


class _Number:
    """A number of a JSON text, with all its digits."""

    __slots__ = ("value",)

    def __init__(self, digits: str) -> None:
        self.value = Decimal(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object says nothing certain")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_LOOSE = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_Number, parse_int=_Number
)


def _same(one: Any, other: Any, *, loose: bool = False) -> bool:
    """Return whether two JSON values are the same.

    However deep they are: there is no recursion. Types count, so `true` is not `1`; between
    numbers they count where it is not `loose`.
    """
    waiting = [(one, other)]
    while waiting:
        one, other = waiting.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys() or not all(isinstance(key, str) for key in one):
                return False
            waiting += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            waiting += zip(one, other, strict=True)
        elif isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
            if one is not other:
                return False
        elif isinstance(one, str) and isinstance(other, str):
            if one != other:
                return False
        elif not _same_number(one, other, loose=loose):
            return False
    return True


def _same_number(one: Any, other: Any, *, loose: bool) -> bool:
    if not loose:
        return type(one) is type(other) and _is_number(one) and bool(one == other)
    return _is_number(one) and _is_number(other) and _digits(one) == _digits(other)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int | _Number)


def _digits(value: Any) -> Decimal:
    if isinstance(value, _Number):
        return value.value
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))
