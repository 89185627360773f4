"""The tables of docs/queue.md, made from the headers of the scripts.

Owns the text between the markers of that page. `python -m tests.unit.queue.tables` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from rollstream.queue.scripts import Script, load_scripts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "queue.md"
BEGIN, END = "<!-- made from the scripts' headers -->\n", "<!-- end -->\n"


def made_from_headers() -> str:
    """Return both tables as Markdown."""
    scripts = list(load_scripts().values())
    return f"{_moves(scripts)}\n{_answers(scripts)}"


def _moves(scripts: list[Script]) -> str:
    rows = ["| script | what it does | moves of groups | moves of members |", "|---|---|---|---|"]
    for script in scripts:
        header = script.header
        groups = _events(header.group_events, header.creates[:1])
        members = _events(header.member_events, header.creates[1:])
        rows.append(f"| `{script.name}` | {header.purpose} | {groups} | {members} |")
    return "\n".join(rows) + "\n"


def _answers(scripts: list[Script]) -> str:
    rows = ["| script | arguments | answers | a repeated call |", "|---|---|---|---|"]
    rows += [
        f"| `{s.name}` | {_cell(s.header.argv)} | {_cell(s.header.answer)} | {s.header.repeat} |"
        for s in scripts
    ]
    return "\n".join(rows) + "\n"


def _events(names: tuple[str, ...], creates: tuple[str, ...]) -> str:
    return ", ".join([*(f"creates {s}" for s in creates), *(f"`{name}`" for name in names)]) or "-"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def main() -> None:
    """Write the tables into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made_from_headers()}\n{END}{after}")


if __name__ == "__main__":
    main()
