"""docs/agents.md shows what becomes of every parameter that the code knows.

`python -m tests.unit.gateway.test_agents_docs` writes its tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from worker.gateway.dialects import anthropic, responses, rules
from worker.gateway.dialects.openai_chat import FIELDS, OpenAIChat
from worker.gateway.dialects.rules import EVERYWHERE, Fate, Rule, Table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
_TABLE = re.compile(r"(<!-- (\w+): [^\n]*-->\n).*?(<!-- /\2 -->)", re.DOTALL)


def own(table: Table) -> Table:
    """Return the rows that a dialect has for itself."""
    return {name: rule for name, rule in table.items() if EVERYWHERE.get(name) != rule}


def fields(table: Table = FIELDS) -> str:
    """Return what becomes of each field, as Markdown."""
    rows = ["| field | what becomes of it |", "|---|---|"]
    groups: dict[tuple[Fate, str, str], list[str]] = {}
    for name, rule in table.items():
        groups.setdefault((rule.fate, rule.note, rule.allowed), []).append(f"`{name}`")
    order = list(Fate)
    for (fate, note, allowed), names in sorted(groups.items(), key=lambda g: order.index(g[0][0])):
        but = f" unless {allowed}" if fate is Fate.REFUSED and allowed else ""
        why = f": {note}" if note else ""
        rows.append(f"| {' '.join(names)} | **{fate.value}**{but}{why} |")
    return "\n".join(rows) + "\n"


def cannot(
    named: str = "chat completions", carried: Mapping[str, str] = OpenAIChat.cannot_carry
) -> str:
    """Return what a dialect cannot carry, as Markdown."""
    rows = [f"| {named} | what becomes of it |", "|---|---|"]
    rows += [f"| {what} | {fate} |" for what, fate in carried.items()]
    return "\n".join(rows) + "\n"


WRITERS: dict[str, Callable[[], str]] = {
    "fields": fields,
    "cannot": cannot,
    "fields_anthropic": lambda: fields(own(anthropic.TABLE)),
    "cannot_anthropic": lambda: cannot("messages", anthropic.AnthropicMessages.cannot_carry),
    "fields_responses": lambda: fields(own(responses.FIELDS)),
    "cannot_responses": lambda: cannot("responses", responses.OpenAIResponses.cannot_carry),
}


def test_page_shows_what_becomes_of_every_field() -> None:
    found = {match[2]: match for match in _TABLE.finditer(PAGE.read_text())}
    for name, write in WRITERS.items():
        shown = found[name][0].removeprefix(found[name][1]).removesuffix(found[name][3])
        assert shown == write(), "python -m tests.unit.gateway.test_agents_docs writes it"


def test_every_refused_field_says_what_to_do() -> None:
    for table in (FIELDS, anthropic.TABLE, responses.FIELDS):
        for name in rules.names_of(table, Fate.REFUSED):
            rule: Rule = table[name]
            assert rule.note, name
            assert (rule.allows is None) == (not rule.allowed), name


def _written(found: re.Match[str]) -> str:
    write = WRITERS.get(found[2])
    return found[0] if write is None else found[1] + write() + found[3]


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(_written, PAGE.read_text()))
