"""Every call of a logger in the code of the processes, as the syntax tree has it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHARED = ("link.py", "config.py", "logs.py", "log_sink.py")
"""Of the library, what runs in every process."""
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass
class LogCall:
    """One call."""

    where: str
    level: str
    event: str | None
    """None where it is no constant."""
    keys: dict[str, ast.expr] = field(default_factory=dict)
    has_more: bool = False
    """It hands on keys that are not spelled out here (`**about`)."""


def files() -> Iterator[Path]:
    for app in ("worker", "producer"):
        yield from sorted((ROOT / app).rglob("*.py"))
    yield from (ROOT / "rollstream" / name for name in SHARED)


@functools.cache
def log_calls() -> list[LogCall]:
    found = [call for path in files() for call in _calls_of(path)]
    assert len(found) > 80, "the calls were found at all"
    return found


def _calls_of(path: Path) -> Iterator[LogCall]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        method, args = _method(node)
        if method is None:
            continue
        event = args[0] if args else None
        is_constant = isinstance(event, ast.Constant) and isinstance(event.value, str)
        call = LogCall(
            f"{path.relative_to(ROOT)}:{node.lineno}",
            {"exception": "error"}.get(method, method),
            str(event.value) if is_constant and isinstance(event, ast.Constant) else None,
        )
        for keyword in node.keywords:
            if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                    assert isinstance(key, ast.Constant)
                    call.keys[str(key.value)] = value
            elif keyword.arg is None:
                call.has_more = True
            elif keyword.arg not in ("exc_info", "extra", "stack_info"):
                call.keys[keyword.arg] = keyword.value
        yield call


def _method(node: ast.Call) -> tuple[str | None, list[ast.expr]]:
    """Return which level a call logs at, also where it is handed on: `partial(log.error, …)`."""
    if _is_log(node.func):
        assert isinstance(node.func, ast.Attribute)
        return node.func.attr, node.args
    if node.args and _is_log(node.args[0]):
        assert isinstance(node.args[0], ast.Attribute)
        return node.args[0].attr, node.args[1:]
    return None, []


def _is_log(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in LEVELS:
        return False
    owner = node.value
    if isinstance(owner, ast.Call):
        return ast.unparse(owner.func).endswith(("getLogger", "get_logger"))
    return ast.unparse(owner).rpartition(".")[2].strip("_") in ("log", "logger")
