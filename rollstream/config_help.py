"""What `--help` and docs/configuration.md say: every table and key, from the settings themselves.

Owns the two texts. Never keeps a second list of keys: names, types and defaults are read from the
models, the one-line explanations from the docstrings under the fields. Invariant: a key that
exists is documented in both, so the page and the help cannot drift from the code.

`python -m rollstream.config_help` writes docs/configuration.md; `--check` only compares.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from rollstream import settings as tables
from rollstream.config_keys import NAMED, KeyPath, all_keys
from rollstream.masking import mask

EXIT_CODES = {
    0: "it did what it was asked to do, or was told to stop",
    1: "something else; the message says what",
    2: "the configuration or the input is wrong; nothing was done",
    3: "Redis or an engine cannot be reached",
    4: "a run of this name exists with other data, or has ended",
    5: "this process cannot go on, another in its place can (worker: the event loop stood still, "
    "or user functions used up threads or memory)",
}
PAGE = Path("docs/configuration.md")


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key as a person reads it."""

    key: KeyPath
    type: str
    default: str
    doc: str
    """In one line; empty where the name says it all."""


def describe() -> dict[str, tuple[str, list[KeyDoc]]]:
    """Return {table: (what it is about, its keys)} in the order of `Settings`."""
    docs = _docstrings()
    found: dict[str, tuple[str, list[KeyDoc]]] = {}
    for key in all_keys():
        owner, info = _field(key)
        about = docs.get((_owner(key[:1]).__name__, ""), "")
        keys = found.setdefault(key[0], (about, []))[1]
        doc = docs.get((owner.__name__, key[-1]), "")
        keys.append(KeyDoc(key, _type_text(info.annotation), _default_text(info), doc))
    return found


OWN_OPTIONS = {
    "producer": (
        "",
        "  --fresh          end and remove the run of this name first, where nobody works on it",
        "  --fresh=force    also where somebody does",
    )
}
"""What one app takes beside the keys, on its command line only."""


def help_text(prog: str) -> str:
    """Return the answer to `--help`."""
    lines = [
        f"usage: {prog} [--config PATH] [--table.key value | --table.key=value]...",
        "",
        "Each key can stand in rollstream.toml ([table] key = value), in the environment",
        "(ROLLSTREAM_TABLE__KEY) and on the command line (--table.key value); the later wins.",
        "Lists are written with commas or as JSON, and `none` unsets an optional key.",
        *OWN_OPTIONS.get(prog.rpartition(" ")[2], ()),
    ]
    for table, (about, keys) in describe().items():
        lines += ["", f"[{_title(table)}] {about}"]
        for doc in keys:
            name = ".".join(doc.key)
            lines.append(f"  --{name:<36} {doc.default:<16} {doc.doc}".rstrip())
    lines += ["", "exit codes:"]
    lines += [f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join(lines)


def page(intro: str) -> str:
    """Return docs/configuration.md: the hand-written part, then one table per table of keys."""
    parts = [intro.rstrip(), "", MARK, ""]
    for table, (about, keys) in describe().items():
        parts += [f"### `[{_title(table)}]`", "", about, ""]
        parts += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for doc in keys:
            name = ".".join(doc.key[2:] if table in NAMED else doc.key[1:])
            cells = (f"`{name}`", doc.type, f"`{doc.default}`", doc.doc)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    parts += ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(parts) + "\n"


MARK = "<!-- From here on: made by `python -m rollstream.config_help`; do not edit. -->"


def main(argv: list[str]) -> int:
    """Write the page, or with `--check` say whether it is what it should be."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.config_help")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(argv)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old.partition(MARK)[0])
    if not options.check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        sys.stderr.write(f"{PAGE} is not up to date: run python -m rollstream.config_help\n")
        return 1
    return 0


def _title(table: str) -> str:
    return f"{table}.NAME" if table in NAMED else table


def _owner(key: KeyPath) -> type[BaseModel]:
    """Return the model that a table's name stands for."""
    here: Any = tables.Settings
    for part in key:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[part].annotation
        if get_origin(here) is dict:
            here = get_args(here)[1]
    assert isinstance(here, type)
    assert issubclass(here, BaseModel)
    return here


def _field(key: KeyPath) -> tuple[type[BaseModel], FieldInfo]:
    plain = tuple(part for i, part in enumerate(key) if not (key[0] in NAMED and i == 1))
    owner = _owner(plain[:-1])
    return owner, owner.model_fields[plain[-1]]


def _docstrings() -> dict[tuple[str, str], str]:
    """Return {(class, field): the first sentence under it}, read from the source: the models do
    not carry it, and asking them to would parse the file once per class at every start."""  # noqa: D205, D209 - it begins with the mapping
    found: dict[tuple[str, str], str] = {}
    files = sorted(Path(tables.__file__).parent.glob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    for node in (node for tree in trees for node in tree.body):
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name, ""] = _one_line(ast.get_docstring(node) or "")
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[node.name, field.target.id] = _one_line(text.value.value)
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _default_text(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "(empty)"
    if isinstance(value, SecretStr):
        return str(mask(value))
    if isinstance(value, dict | bool):
        return json.dumps(value)
    return str(value) if value != "" else "(empty)"


def _type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type_text(a) for a in args)
    if origin is Literal:
        return " \\| ".join(f"`{a}`" for a in args).replace("\\|", "or")
    if origin is tuple:
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return "table of names and values"
    names: dict[Any, str] = {
        str: "text", int: "whole number", float: "number", bool: "true or false",
        Path: "path", SecretStr: "text, secret",
    }  # fmt: skip
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
