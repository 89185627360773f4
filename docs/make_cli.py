"""Write the tables of docs/cli.md: options from the parser, keys from the schemas.

Owns the part of docs/cli.md between the two markers. Never names an option or a key that is none.

    python -m docs.make_cli          # rewrite docs/cli.md
    python -m docs.make_cli --check  # exit 1 where it differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.pages import between, write_or_check
from rollstream.cli.__main__ import make_parser
from rollstream.cli.schemas import SCHEMAS

PAGE = Path(__file__).parent / "cli.md"
BEGIN, END = "<!-- commands: made by docs/make_cli.py -->", "<!-- /commands -->"
SERVER = ("--redis", "--ca", "--timeout-s", "--run", "--json")
"""Said once, for all commands."""
CONFIG = (
    "Every effective value with its origin; takes the options of the services "
    "([configuration.md](configuration.md))."
)
ELSEWHERE = ("worker", "producer", "exporter", "config")
"""Commands with a parser of their own."""


def tables() -> str:
    """Return a section of every command."""
    parts = []
    for name, (about, parser) in commands().items():
        parts += [f"### `rollstream {name}`", "", f"{about[:1].upper()}{about[1:]}.", ""]
        parts += [*_options(parser), *_keys(name)]
    parts += ["### `rollstream config show`", "", CONFIG, "", *_keys("config show")]
    return "\n".join(parts).rstrip()


def commands() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """Return what each command is for, and its parser."""
    found = next(action for action in make_parser()._actions
                 if isinstance(action, argparse._SubParsersAction))  # fmt: skip
    about = {choice.dest: str(choice.help) for choice in found._choices_actions}
    return {name: (about[name], parser) for name, parser in found.choices.items()
            if name not in ELSEWHERE}  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        names = action.option_strings
        is_common = bool(names) and names[0] in SERVER
        if names[:1] == ["-h"] or (is_common and not _is_own(parser, action)):
            continue
        value = action.metavar or ("|".join(action.choices) if action.choices else "")
        shown = f"{', '.join(names)} {value}".strip() if names else str(value)
        rows.append(f"| `{_cell(shown)}` | {_cell(str(action.help or ''))} |")
    if rows:
        yield from ("| option | |", "|---|---|", *rows, "")


def _is_own(parser: argparse.ArgumentParser, action: argparse.Action) -> bool:
    """Return whether a common option means something else here."""
    return action.dest == "timeout_s" and parser.get_default("redis_timeout_s") is not None


def _keys(command: str) -> Iterator[str]:
    for form, keys in SCHEMAS.items():
        if form == command or form.startswith(
            (f"{command} (", f"{command} --", f"{command} GROUP")
        ):
            yield from (f"`--json` of `{form}`:", "", "| key | |", "|---|---|")
            yield from (f"| `{name}` | {_cell(about)} |" for name, about in keys.items())
            yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def updated(text: str) -> str:
    """Return the page with the part between the markers written anew."""
    return between(text, BEGIN, END, f"\n{tables()}\n")


def main(arguments: list[str]) -> None:
    """Rewrite or check docs/cli.md."""
    wanted = updated(PAGE.read_text(encoding="utf-8"))
    write_or_check(PAGE, wanted, arguments, "python -m docs.make_cli")


if __name__ == "__main__":
    main(sys.argv[1:])
