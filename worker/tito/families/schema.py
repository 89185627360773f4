"""Tool specs as TypeScript, the way gpt-oss was shown them.

Owns the text only. Invariant: parameters keep the order in which the spec has them.

The layout is that of OpenAI's reference encoder, oddities included (the closing brace of an object
stands as far in as its members; a description of two lines has its second line bare): the model
saw these characters, so an improvement would be a mistake.
"""

from __future__ import annotations

import json
from typing import Any

_INDENT = "    "
_NAMES = {"integer": "number"}


def tools_text(tools: list[Any]) -> str:
    """Return the section that declares tools, given in OpenAI's form."""
    declared = [_declaration(tool["function"]) for tool in tools]
    return "\n\n".join(
        ["# Tools", "## functions", "namespace functions {", *declared, "} // namespace functions"]
    )


def _declaration(function: dict[str, Any]) -> str:
    description = function.get("description") or ""
    comment = "".join(f"// {line}\n" for line in _lines(description))
    kind = _type(function.get("parameters") or {}, "")
    return f"{comment}type {function['name']} = (_: {kind}) => any;"


def _type(schema: Any, indent: str) -> str:
    """Return the TypeScript of one JSON schema."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("oneOf"), list):
        told = bool(schema.get("description"))
        return "".join(f"\n{indent} | {_variant(one, indent, told)}" for one in schema["oneOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_NAMES.get(str(one), str(one)) for one in kind)
    text = "any"
    if kind == "object":
        text = _object(schema, indent)
    elif kind == "array":
        items = schema.get("items")
        text = "Array<any>" if items is None else f"{_type(items, indent)}[]"
    elif kind == "string":
        choices = [one for one in _list(schema.get("enum")) if isinstance(one, str)]
        text = " | ".join(f'"{one}"' for one in choices) or "string"
    elif kind in ("number", "integer"):
        text = "number"
    elif kind == "boolean":
        text = "boolean"
    return f"{text} | null" if schema.get("nullable") is True else text


def _variant(schema: Any, indent: str, told: bool) -> str:
    text = _type(schema, indent + "   ")
    if isinstance(schema, dict):
        remarks = [schema["description"]] if schema.get("description") and not told else []
        if "default" in schema:
            remarks.append(f"default: {_default(schema)}")
        if remarks:
            text += f" // {' '.join(remarks)}"
    return text


def _object(schema: dict[str, Any], indent: str) -> str:
    text = f"{indent}// {schema['description']}\n" if schema.get("description") else ""
    required = _list(schema.get("required"))
    properties = schema.get("properties")
    members = [
        _member(name, member, indent, optional=name not in required)
        for name, member in (properties.items() if isinstance(properties, dict) else ())
    ]
    return f"{text}{{\n{''.join(members)}{indent}}}"


def _member(name: str, schema: Any, indent: str, *, optional: bool) -> str:
    mark = "?" if optional else ""
    if not isinstance(schema, dict):
        return f"{indent}{name}{mark}: any,\n"
    remarks = _remarks(schema)
    if isinstance(schema.get("oneOf"), list):
        if "default" in schema:
            remarks.append(f"// default: {_default(schema)}")
        declared = f"{name}{mark}:{_type(schema, indent)}\n{indent},"
    else:
        default = f" // default: {_default(schema)}" if "default" in schema else ""
        declared = f"{name}{mark}: {_type(schema, indent + _INDENT)},{default}"
    return "".join(f"{indent}{line}\n" for line in [*remarks, declared])


def _remarks(schema: dict[str, Any]) -> list[str]:
    remarks = [f"// {schema['title']}", "//"] if isinstance(schema.get("title"), str) else []
    if isinstance(schema.get("description"), str):
        remarks.append(f"// {schema['description']}")
    examples = [one for one in _list(schema.get("examples")) if isinstance(one, str)]
    if examples:
        remarks.append("// Examples:")
        remarks += [f'// - "{one}"' for one in examples]
    return remarks


def _default(schema: dict[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str):
        return value if "enum" in schema else f'"{value}"'
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines
