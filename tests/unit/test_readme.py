"""README.md: short enough to be read, and true where it can be held to the code."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make_states import BEGIN, END, diagram, updated
from rollstream.config_keys import all_keys
from rollstream.states import GroupState

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_draws_the_states_of_the_table() -> None:
    assert updated(README) == README
    assert all(state in diagram() for state in GroupState)


def test_readme_stays_within_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_readme_drawing_is_replaced_between_its_markers_only() -> None:
    text = f"before {BEGIN} old {END} after"
    assert updated(text).startswith(f"before {BEGIN}\n```mermaid")
    assert updated(text).endswith(f"{END} after")


def test_docs_link_only_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_names_only_keys_that_exist() -> None:
    known = {".".join(key) for key in all_keys()}
    tables = {key.partition(".")[0] for key in known}
    named = {
        key for key in re.findall(r"`([a-z]+\.[a-z_]+)`", README) if key.partition(".")[0] in tables
    }
    assert named
    assert named <= known
