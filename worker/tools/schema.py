"""What a tool takes: its spec, from a signature or given.

Owns the mapping of Python types to JSON schema and the form of a spec. Never runs a tool, never
looks at a call (`arguments` does). Invariant: what the model is shown is JSON of OpenAI's form, or
the tool is refused at start-up.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from rollstream.errors import ConfigError

from ..functions import describe

Schema = dict[str, Any]

_PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def spec_from_signature(function: Callable[..., Any], name: str, what: str) -> Schema:
    """Return OpenAI's JSON for a Python function: types from its signature, texts from its docs.

    Raises:
        ConfigError: a parameter without a type that JSON has, or that has no name.
    """
    try:
        hints = typing.get_type_hints(function)
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{what}: its signature cannot be read: {describe(error)}") from None
    summary, texts = _docs_of(function)
    properties: Schema = {}
    required, is_open = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{what}: the parameter {parameter.name!r} has no name that a call could give; "
                "make it an ordinary parameter"
            )
        schema = schema_of(hints.get(parameter.name), f"{what}: parameter {parameter.name!r}")
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties, "required": required}
    if not is_open:
        parameters["additionalProperties"] = False
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def schema_of(hint: Any, what: str) -> Schema:
    """Return the JSON schema of one type: str, int, float, bool, list, dict, Optional, Literal.

    Raises:
        ConfigError: none of these.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is Any:
        return {}
    if origin is list and len(inner) == 1:
        return {"type": "array", "items": schema_of(inner[0], what)}
    if origin is dict:
        return {"type": "object"}
    if origin is Literal:
        kinds = sorted({_PLAIN.get(type(value), "string") for value in inner})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _any_of([schema_of(option, what) for option in inner])
    said = "no annotation" if hint is None else f"the type {hint!r}"
    raise ConfigError(
        f"{what} has {said}; use str, int, float, bool, list, dict, Optional or Literal, or give "
        "the function a `spec` (OpenAI's JSON)"
    )


def _any_of(options: list[Schema]) -> Schema:
    if all(set(option) == {"type"} for option in options):
        return {"type": [option["type"] for option in options]}
    return {"anyOf": options}


def _docs_of(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its sections, and what `Args:` says of each parameter."""
    lines = (inspect.getdoc(function) or "").splitlines()
    summary: list[str] = []
    texts: dict[str, str] = {}
    section = current = ""
    for line in lines:
        title = line.strip()
        if line and not line[0].isspace() and title.endswith(":") and " " not in title:
            section, current = title, ""
        elif not section:
            summary.append(line)
        elif section in ("Args:", "Arguments:", "Parameters:") and title:
            name, colon, text = title.partition(":")
            deep = len(line) - len(line.lstrip()) > 4
            if colon and not deep and name.split("(")[0].strip().isidentifier():
                current = name.split("(")[0].strip()
                texts[current] = text.strip()
            elif current:
                texts[current] += " " + title
    return "\n".join(summary).strip(), texts


def check_spec(spec: Any, what: str) -> None:
    """Check a given spec (OpenAI's JSON, with or without the outer `function`).

    Raises:
        ConfigError: naming what is missing.
    """
    if not isinstance(spec, dict):
        raise ConfigError(f"{what}: a spec is a dictionary, not {type(spec).__name__}")
    inner = spec.get("function")
    if spec.get("type") != "function" or not isinstance(inner, dict):
        raise ConfigError(f'{what}: a spec is {{"type": "function", "function": {{...}}}}')
    if not isinstance(inner.get("name"), str) or not inner["name"]:
        raise ConfigError(f"{what}: its spec has no function.name")
    parameters = inner.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        kind = parameters.get("type") if isinstance(parameters, dict) else type(parameters).__name__
        raise ConfigError(
            f"{what}: function.parameters of its spec must be a JSON schema whose type is "
            f"'object', not {kind!r}"
        )
    try:
        json.dumps(spec)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: its spec is not JSON: {describe(error)}") from None
