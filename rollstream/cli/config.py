"""`rollstream config show`: every effective value, with where it came from.

Owns the arguments of that command. Never reads a configuration itself: `rollstream.config` does.
"""

from __future__ import annotations

from rollstream.cli.exits import OK, USAGE, CommandError
from rollstream.urls import shown_url

HELP = """usage: rollstream config show [--json] [--config FILE] [--TABLE.KEY VALUE ...]

Print every effective value with its origin; secrets are masked.
Keys: docs/configuration.md, or rollstream worker --help"""


def run_config(argv: list[str]) -> int:
    """Print the configuration that an app started with `argv` would have.

    Raises:
        CommandError: wrong arguments, a wrong configuration, or pydantic is not installed.
    """
    if "-h" in argv or "--help" in argv:
        print(HELP)
        return OK
    try:
        from rollstream.config import load_settings, show, split_argv
        from rollstream.errors import ConfigError
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the configuration needs {error.name!r}: pip install 'rollstream[service]'", USAGE
        ) from None
    ours, others = split_argv(argv)
    as_json = "--json" in others
    words = [word for word in others if word != "--json"]
    if words != ["show"]:
        given = " ".join(words) or "(none)"
        raise CommandError(f"unknown arguments {shown_url(given)!r}\n{HELP}", USAGE)
    try:
        loaded = load_settings(ours, prog="rollstream config show")
    except ConfigError as error:
        raise CommandError(str(error), USAGE) from None
    print(show(loaded, as_json=as_json))
    return OK
