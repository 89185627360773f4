"""What messages say of settings: the keys that they name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollstream.settings import Settings

ROOT = Path(__file__).parents[3]
TABLES = {name: field.annotation for name, field in Settings.model_fields.items()}
KEY = re.compile(rf"(?<![\w.])({'|'.join(TABLES)})\.([a-z_]+)\b")
MODULES = {"worker.engines", "worker.isolation", "worker.rewards", "redis.connection"}
"""Names of the same shape that are no settings."""


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Return every key of a table that a module writes into an exception or gives to a call."""
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Raise | ast.Call):
            for text in ast.walk(part):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield from KEY.findall(text.value)


def test_every_setting_that_a_message_names_is_there() -> None:
    found = {
        (table, key, path.relative_to(ROOT).as_posix())
        for package in ("rollstream", "worker", "producer")
        for path in (ROOT / package).rglob("*.py")
        for table, key in named(path)
    }
    assert len(found) > 50
    missing = [
        one for one in found
        if one[1] not in getattr(TABLES[one[0]], "model_fields", {})
        and ".".join(one[:2]) not in MODULES
    ]  # fmt: skip
    assert missing == []
