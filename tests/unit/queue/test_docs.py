"""docs/queue.md says what the scripts say."""

from __future__ import annotations

import re

from rollstream.queue.scripts import load_scripts
from tests.unit.queue.tables import BEGIN, END, PAGE, made_from_headers


def test_the_tables_of_the_page_are_those_of_the_headers() -> None:
    text = PAGE.read_text()
    table = text.partition(BEGIN)[2].partition(END)[0]
    assert table.strip() == made_from_headers().strip(), "run python -m tests.unit.queue.tables"


def test_the_page_names_every_key_with_its_type() -> None:
    wanted = {pair for script in load_scripts().values() for pair in script.header.keys}
    rows = re.findall(r"^\| (`[^|]*`) \| ([A-Z]+) \|", PAGE.read_text(), re.MULTILINE)
    found = {(name, kind) for names, kind in rows for name in re.findall(r"`([^`]*)`", names)}
    assert found == wanted
