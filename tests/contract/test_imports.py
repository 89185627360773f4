"""What each part of `rollstream` may import: the client library is a trainer's dependency."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import rollstream

PACKAGE = Path(rollstream.__file__).parent
CLIENT = {"redis", "msgpack", "numpy", "rollstream"}
"""Beside the standard library: everything that the client library may import."""
OF_THE_APPS = {
    "settings": {"pydantic"},
    "config.py": {"pydantic"},
    "config_help.py": {"pydantic"},
    "config_keys.py": {"pydantic"},
    "masking.py": {"pydantic"},
    "logs.py": {"structlog"},
    # A page of tokens shows their texts where a tokenizer is named and installed.
    "cli": {"rich", "tokenizers", "huggingface_hub"},
}
"""The modules that only the apps and the command line load, and what these may import more."""


def imports_of(path: Path) -> set[str]:
    """Return the top-level names that a module imports anywhere, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if room_of(path) != "apps"]


def test_every_module_of_the_client_imports_redis_msgpack_and_numpy_only() -> None:
    assert len(modules()) > 20
    wrong = {
        path.relative_to(PACKAGE).as_posix(): sorted(extra)
        for path in modules()
        if (extra := imports_of(path) - CLIENT - OF_THE_APPS.get(room_of(path), set()))
    }
    assert wrong == {}


def test_the_client_never_imports_what_needs_more() -> None:
    private = {f"rollstream.{name.removesuffix('.py')}" for name in OF_THE_APPS}
    for path in modules():
        if room_of(path) in OF_THE_APPS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            else:
                continue
            reached = {n for n in named if any(n == p or n.startswith(f"{p}.") for p in private)}
            assert not reached, f"{path.name}:{node.lineno} imports {sorted(reached)}"
