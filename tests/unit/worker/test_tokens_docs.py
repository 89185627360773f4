"""docs/tokens.md shows the families that the code has.

`python -m tests.unit.worker.test_tokens_docs` writes its table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from rollstream.settings import ModelTable
from worker.doctor import families
from worker.tito.load import NAMES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tokens.md"
_TABLE = re.compile(r"(<!-- families: [^\n]*-->\n).*?(<!-- /families -->)", re.DOTALL)


def table() -> str:
    """Return the table of families as Markdown."""
    rows = ["| name | proof | `auto` takes it for | what to know |", "|---|---|---|---|"]
    for row in families():
        models = ", ".join(f"`{model}`" for model in row["models"])
        rows.append(f"| `{row['name']}` | {row['proof']} | {models} | {row['note']} |")
    return "\n".join(rows) + "\n"


def test_page_shows_every_family_with_its_proof() -> None:
    found = _TABLE.search(PAGE.read_text())
    assert found is not None
    shown = found[0].removeprefix(found[1]).removesuffix(found[2])
    assert shown == table(), "python -m tests.unit.worker.test_tokens_docs writes it"


def test_page_names_every_key_of_its_table_of_settings() -> None:
    text = PAGE.read_text()
    assert ModelTable().renderer == "auto"
    assert {"auto", "template"} <= set(NAMES)
    for key in ("tokenizer", "renderer"):
        assert f"`model.{key}`" in text


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda found: found[1] + table() + found[2], PAGE.read_text()))
