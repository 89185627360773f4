"""A call's arguments held against the tool's JSON schema, and what a model reads of it.

Owns the validator of one tool and the words for what is wrong. Never runs a tool, never fetches a
schema. Invariant: whatever is wrong with a schema is one `ConfigError` when its check is made; a
check returns a short text or None, whatever the arguments are.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from rollstream.errors import ConfigError

from ..functions import describe

Schema: TypeAlias = Mapping[str, Any]

MAX_PROBLEMS = 3
MAX_TEXT_CHARS = 400
_MAX_SHOWN_CHARS = 80
_MAX_LISTED_CHARS = 200
_TOO_DEEP = "nested too deep"
_MAX_SEEN = 16
"""Errors that are looked at for the few which are said."""


class ArgumentCheck:
    """The check of one tool's arguments; made once, used for every call.

    Raises:
        ConfigError: the schema is none, is refused by its own draft, or refers to what is not in
            it.
    """

    def __init__(self, schema: Schema, what: str) -> None:
        """Make the validator.

        Args:
            schema: JSON schema of an object; Draft 2020-12 unless its `$schema` says another.
            what: for messages: "tool 'search'".
        """
        self._validator = _validator_of(schema, what)
        if self.complaint({}) == _TOO_DEEP:
            raise ConfigError(f"{what}: its schema refers to itself without an end")

    def complaint(self, arguments: dict[str, Any]) -> str | None:
        """Return what is wrong, for the model to read; None where all is well."""
        try:
            said: dict[str, None] = {}
            for error in islice(self._validator.iter_errors(arguments), _MAX_SEEN):
                said.update(dict.fromkeys(_words(error)))
                if len(said) >= MAX_PROBLEMS:
                    break
        except RecursionError:
            return _TOO_DEEP
        except Exception as error:  # noqa: BLE001 - a keyword that breaks on a value of a model's
            return f"they cannot be checked: {describe(error, _MAX_SHOWN_CHARS)}"
        text = "; ".join(list(said)[:MAX_PROBLEMS])
        return (text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…") or None


def check_of(parameters: Schema) -> ArgumentCheck:
    """Return the check for a tool that did not bring its own; the same schema is read once.

    Raises:
        ConfigError: as `ArgumentCheck`.
    """
    return _check_of(json.dumps(parameters))


@functools.lru_cache(maxsize=256)
def _check_of(text: str) -> ArgumentCheck:
    return ArgumentCheck(json.loads(text), "the tool's spec")


# --- the validator -------------------------------------------------------------------------------
def _validator_of(schema: Schema, what: str) -> Any:
    import jsonschema  # 0.1 s, for workers with tools alone
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    try:
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "its root"
        raise ConfigError(
            f"{what}: function.parameters of its spec is no JSON schema: at {where}: "
            f"{error.message[:_MAX_LISTED_CHARS]}"
        ) from None
    except Exception as error:  # noqa: BLE001 - a value that even the check chokes on
        raise ConfigError(
            f"{what}: function.parameters of its spec is no JSON schema: {describe(error)}"
        ) from None
    try:
        _check_references(schema, what)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - an old draft's form that the library cannot read
        raise ConfigError(
            f"{what}: the references of its schema cannot be read: {describe(error)}; write it in "
            "Draft 2020-12"
        ) from None
    bounded = kind.TYPE_CHECKER.redefine_many({"number": _is_number, "integer": _is_integer})
    # An empty registry: what is not in the schema itself is not fetched from anywhere.
    return extend(kind, type_checker=bounded)(schema, registry=Registry())


def _is_number(checker: Any, value: Any) -> bool:
    del checker
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < 1 << 1023  # a float can still hold it
    return isinstance(value, float)


def _is_integer(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and float(value).is_integer()


def _check_references(schema: Schema, what: str) -> None:
    """Check that every reference leads into the schema itself, and every pattern can be read.

    Raises:
        ConfigError: naming the one that does not.
    """
    from referencing import Registry, Specification
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    said = str(schema.get("$schema", ""))
    specification: Specification[Any] = specification_with(said, default=DRAFT202012)
    root = specification.create_resource(schema)
    base = root.id() or ""
    resolver = Registry().with_resource(base, root).resolver(base)
    waiting = [(root, resolver)]
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        for keyword in ("$ref", "$dynamicRef"):
            reference = contents.get(keyword) if isinstance(contents, Mapping) else None
            if reference is None:
                continue
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ConfigError(
                    f"{what}: its schema refers to {reference!r}, which is not in it; nothing is "
                    "fetched: write it below $defs"
                ) from None
        if isinstance(contents, Mapping):
            _check_patterns(contents, what)
        waiting.extend((r, resolver.in_subresource(r)) for r in resource.subresources())


def _check_patterns(schema: Schema, what: str) -> None:
    names = schema.get("patternProperties")
    patterns = [*(names if isinstance(names, Mapping) else ()), schema.get("pattern")]
    for pattern in patterns:
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(
                    f"{what}: the pattern {pattern[:_MAX_SHOWN_CHARS]!r} of its schema cannot be "
                    f"read: {error}"
                ) from None


# --- words ---------------------------------------------------------------------------------------
_WORDS: dict[str, Callable[[Any], str]] = {
    "type": lambda wanted: f"must be {_either(wanted)}",
    "enum": lambda wanted: f"must be one of {_json(wanted, _MAX_LISTED_CHARS)}",
    "const": lambda wanted: f"must be {_json(wanted)}",
    "minimum": lambda wanted: f"must be at least {wanted}",
    "maximum": lambda wanted: f"must be at most {wanted}",
    "exclusiveMinimum": lambda wanted: f"must be more than {wanted}",
    "exclusiveMaximum": lambda wanted: f"must be less than {wanted}",
    "multipleOf": lambda wanted: f"must be a multiple of {wanted}",
    "minLength": lambda wanted: f"must have at least {wanted} characters",
    "maxLength": lambda wanted: f"must have at most {wanted} characters",
    "pattern": lambda wanted: f"must match {_json(wanted)}",
    "minItems": lambda wanted: f"must have at least {wanted} items",
    "maxItems": lambda wanted: f"must have at most {wanted} items",
    "uniqueItems": lambda _: "must not have one item twice",
    "minProperties": lambda wanted: f"must have at least {wanted} entries",
    "maxProperties": lambda wanted: f"must have at most {wanted} entries",
    "not": lambda _: "must be something else",
}
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _words(error: Any) -> Iterator[str]:
    """Yield what one error of the validator is, as sentences with the argument's path."""
    where, wanted, given = _path(error.absolute_path), error.validator_value, error.instance
    keyword = error.validator
    if keyword == "required":
        dot = f"{where}." if where else ""
        yield from (f"the argument {dot}{name} is missing" for name in wanted if name not in given)
    elif keyword in ("additionalProperties", "unevaluatedProperties") and wanted is False:
        yield from _unknown_names(error, where)
    elif keyword in ("anyOf", "oneOf"):
        yield f"{where or 'arguments'} {_alternatives(error)}, got {_json(given)}"
    elif keyword in _WORDS:
        got = f"{len(given)}" if keyword in _LENGTHS else _json(given)
        yield f"{where or 'arguments'} {_WORDS[keyword](wanted)}, got {got}"
    elif keyword is None:  # a schema that is `false`; the library leaves its path out
        yield f"{where or 'arguments'}: {_json(given)} is not allowed"
    else:
        yield f"{where or 'arguments'}: {error.message[:_MAX_LISTED_CHARS]}"


def _unknown_names(error: Any, where: str) -> Iterator[str]:
    known: Mapping[str, Any] = error.schema.get("properties") or {}
    patterns = error.schema.get("patternProperties") or {}
    dot = f"{where}." if where else ""
    listed = _short(", ".join(known) or "none", _MAX_LISTED_CHARS)
    for name in error.instance:
        if name not in known and not any(re.search(pattern, name) for pattern in patterns):
            yield f"there is no argument {_json(dot + name)} (arguments: {listed})"


def _alternatives(error: Any) -> str:
    """Return what would have been right, where that can be said in a few words."""
    options: Sequence[Any] = error.validator_value
    if error.validator == "oneOf" and not error.context:
        return "fits more than one of the allowed forms"
    kinds = [option.get("type") if isinstance(option, Mapping) else None for option in options]
    deepest = [child for child in error.context if child.relative_path]
    if all(kinds) and not deepest and all(c.validator == "type" for c in error.context):
        flat = [k for kind in kinds for k in ([kind] if isinstance(kind, str) else kind or [])]
        return f"must be {_either(list(dict.fromkeys(flat)))}"
    if not deepest:
        return "must be one of the allowed forms"
    # The option that got furthest is the one that was meant.
    nearest = max(deepest, key=lambda child: len(child.absolute_path))
    return f"must be one of the allowed forms ({next(_words(nearest))})"


def _path(parts: Sequence[str | int]) -> str:
    text = ""
    for part in parts:
        name = _short(str(part), _MAX_SHOWN_CHARS)
        text += f"[{part}]" if isinstance(part, int) else f".{name}" if text else name
    return _short(text, _MAX_LISTED_CHARS)


def _either(kinds: str | Sequence[str]) -> str:
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _json(value: Any, limit: int = _MAX_SHOWN_CHARS) -> str:
    return _short(json.dumps(value, default=repr), limit)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
